"""Indexing prims: gather, scatter, take, and their kin."""
