"""Processes of this machine: starting, watching, and ending them."""
