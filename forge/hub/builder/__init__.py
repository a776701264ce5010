"""The builder of source trees of the Kernel Hub: build.toml in, build/<variant>/ for this machine out.

config.py       build.toml → Config, or an error with file, line and key
targets.py      the variants that this machine can build, and the reasons against the others
compilation.py  sources → one shared object: in parallel, with objects cached by their inputs
variant.py      the folder of a variant: Python files, the shared object, metadata
new.py          a template tree for the author to fill in

The Hub's own kernel-builder makes all variants, in a Nix sandbox; this builder makes the same folders, for this machine
only.
"""

from forge.hub.builder.config import FILE, Config, read_config
from forge.hub.builder.new import KINDS, write_new
from forge.hub.builder.variant import BuiltTree, BuiltVariant, build_tree
