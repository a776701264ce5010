"""Compiled programs on disk: a second process that captures the same graph skips recording, gradients, claiming and
code generation.

slot.py               what a captured graph finds, or leaves, under its key
graphs.py, keys.py    the key: the graph in words, modes, options and versions, as one hash
programs.py           a recipe as text and a table of what its text names, and back
objects.py            one named object: by qualified name, by value, by who has it
store.py              bytes in a file: written whole, read only where they are our own and undamaged

An entry is code: it is read only if this user, and nobody else, can have written it.
"""

from forge.cache.entry import CacheEntry

__all__ = ["CacheEntry"]
