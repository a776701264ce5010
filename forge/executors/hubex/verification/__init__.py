"""Verification of kernels: what is judged, and by whom."""
