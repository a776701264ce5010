"""How torch runs the attention family."""
