"""How torch runs the conv family."""
