"""OpInfos of the conv family."""
