"""The version of forge, which the command `forge` reads without importing the rest."""

__version__ = "0.1.0"
