"""OpInfos of the norm family."""
