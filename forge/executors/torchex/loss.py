"""How torch runs the loss family."""
