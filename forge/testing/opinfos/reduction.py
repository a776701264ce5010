"""OpInfos of the reduction family."""
