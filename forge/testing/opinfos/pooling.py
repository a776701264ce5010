"""OpInfos of the pooling family."""
