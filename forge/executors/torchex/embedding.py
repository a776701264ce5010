"""How torch runs the embedding family."""
