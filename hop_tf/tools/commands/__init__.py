"""The commands of `python -m hop_tf <command>`, a module for each."""
