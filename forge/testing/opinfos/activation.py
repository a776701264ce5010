"""OpInfos of the activation family."""
