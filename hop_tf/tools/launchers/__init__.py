"""Which launcher has started this process, and where the others of the job are."""
