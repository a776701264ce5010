"""OpInfos of the creation family."""
