"""How torch runs the indexing family."""
