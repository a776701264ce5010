"""Compiled programs on disk: a second process that captures the same graph skips recording, gradients, claiming and
code generation.

slot       what a captured graph may find, and leave, under its key                          forge/cache/slot.py
key        the graph in words, modes, options, versions, as one hash                         forge/cache/graphs.py, keys.py
program    a recipe as text and a table of what its text names, and back                     forge/cache/programs.py
objects    one named object: by qualified name, by value, by who has it                      forge/cache/objects.py
entry      bytes in a file: written whole, read only where they are our own and undamaged    forge/cache/store.py

An entry is code: it is read only if this user, and nobody else, can have written it.
"""

from forge.cache.slot import Slot

__all__ = ["Slot"]
