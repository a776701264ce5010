"""OpInfos of the linalg family."""
