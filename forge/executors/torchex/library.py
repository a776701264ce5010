"""The torch executor's implementations of the library prims, each by one torch function."""

from forge import prims
from forge.executors.torchex.core import run_prims

run_prims(prims.library_functions())
