"""OpInfos of the shape family."""
