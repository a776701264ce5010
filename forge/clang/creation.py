"""Tensors from nothing, with torch's defaults."""
