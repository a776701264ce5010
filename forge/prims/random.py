"""Random prims. They draw from torch's default generator in the order in which they are called."""
