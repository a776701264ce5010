"""How torch runs the random family."""
