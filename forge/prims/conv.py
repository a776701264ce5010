"""Convolution prims."""
