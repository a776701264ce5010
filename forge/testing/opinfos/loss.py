"""OpInfos of the loss family."""
