"""The strategies: one paper, one module."""
