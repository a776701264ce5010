"""Indexing functions of torch, x[...] and x[...] = y."""
