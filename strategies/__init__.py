"""The strategies: one paper, one folder."""
