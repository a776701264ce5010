"""OpInfos of the random family."""
