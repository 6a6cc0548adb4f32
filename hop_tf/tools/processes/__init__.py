"""Processes, of this machine and over ssh: starting, watching, and ending them."""
