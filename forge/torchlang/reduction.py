"""Reductions and scans of torch."""
