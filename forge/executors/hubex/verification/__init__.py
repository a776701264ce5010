"""Verification of kernels: the comparisons, the processes that run them, and the cache of their answers."""
