"""Pooling, interpolation, padding, folding."""
