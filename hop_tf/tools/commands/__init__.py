"""What `python -m hop_tf <command>` does: a module for each command."""
