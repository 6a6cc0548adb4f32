"""Detection of the launcher that has started this process, and of the addresses of the job's other processes."""
