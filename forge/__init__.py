"""forge: a compiler framework for PyTorch with every operation in plain sight."""

from forge import startup  # before all that imports torch

# isort: split
from forge import optim
from forge.bisection import Difference, bisect
from forge.bundle import bundle
from forge.edited import EditError
from forge.executors.errors import CheckError
from forge.executors.hubex import KernelExtension, kernel, register_kernel, use_kernels
from forge.executors.hubex.registry import kernels
from forge.functional import grad, trace, value_and_grad, vjp
from forge.ir import versions
from forge.jit import StrictError, finish_compiling, jit, last_backward_traces, last_traces, refold
from forge.load_kernel import LoadedKernel, load_kernel
from forge.patterns import Pattern, pattern
from forge.report import Explanation, explain
from forge.repro import repro
from forge.version import __version__

__all__ = [
    "CheckError",
    "Difference",
    "EditError",
    "Explanation",
    "KernelExtension",
    "LoadedKernel",
    "Pattern",
    "StrictError",
    "bisect",
    "bundle",
    "explain",
    "finish_compiling",
    "grad",
    "jit",
    "kernel",
    "kernels",
    "last_backward_traces",
    "last_traces",
    "load_kernel",
    "optim",
    "pattern",
    "refold",
    "register_kernel",
    "repro",
    "trace",
    "use_kernels",
    "value_and_grad",
    "vjp",
]
versions.warn_if_untested()
