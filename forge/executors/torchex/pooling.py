"""How torch runs the pooling family."""
