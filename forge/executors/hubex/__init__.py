"""Kernels of the Hub as implementations of symbols."""
