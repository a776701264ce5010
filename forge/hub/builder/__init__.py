"""Builds a source tree of the Kernel Hub, as build.toml describes it, into build/<variant>/ for this machine.

config.py     build.toml → Config, or an error with file, line and key
targets.py    which variants this machine can build, and why not the others
compiling.py  sources → one shared object: in parallel, each object kept by what it was made of
variant.py    the folder of a variant: Python files, the shared object, metadata
new.py        an empty tree that its author fills in

The Hub's own kernel-builder makes all variants, in a Nix sandbox; these are the same folders, for the machine at hand.
"""

from forge.hub.builder.config import FILE, Config, read_config
from forge.hub.builder.new import KINDS, write_new
from forge.hub.builder.variant import BuiltTree, BuiltVariant, build_tree
