"""How torch runs the norm family."""
