"""OpInfos of the indexing family."""
