"""OpInfos of the embedding family."""
