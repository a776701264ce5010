"""Verification of kernels: what is verified, by which process, and what is kept of the answers."""
