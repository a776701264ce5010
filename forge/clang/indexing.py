"""Indexing with torch's and numpy's conventions."""
