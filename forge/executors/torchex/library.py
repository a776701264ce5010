"""How torch runs the library prims: each is a function of its own."""

from forge import prims
from forge.executors.torchex.core import run_prims

run_prims(prims.library_functions())
