"""OpInfos of the attention family."""
