"""Compiled programs on disk: a second process that captures the same graph skips recording, gradients, claiming and
code generation.

cache_entry.py        the cache entry of a captured graph: loads a program, or writes one
graphs.py, keys.py    the key: the graph in words, modes, options and versions, as one hash
guards.py             the guards on sizes that a program was compiled under
programs.py           conversion between a CompiledPlan and text with a table of the objects that it names
objects.py            one named object: by qualified name, by value, by its owner
store.py              bytes in a file: written whole, read only if undamaged and owned by this user

An entry is code: it is read only if no other user can have written it.
"""

from forge.cache.cache_entry import CacheEntry

__all__ = ["CacheEntry"]
