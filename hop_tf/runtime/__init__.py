"""One rank at run time: its groups of variables, what they exchange, and who takes part."""
