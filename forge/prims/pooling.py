"""Pooling and resampling prims."""
