from forge import distributed, optim, quantize
from forge.aot.errors import ExportError
from forge.aot.exported import Exported
from forge.aot.loaded import load
from forge.api.bundle import bundle
from forge.api.export import EntryPoint, export
from forge.api.functional import grad, trace, value_and_grad, vjp
from forge.api.jit import finish_compiling, jit, last_backward_traces, last_traces, refold
from forge.api.load_kernel import LoadedKernel, load_kernel
from forge.compiler.program import StrictError
from forge.debug.bisection import Difference, bisect
from forge.debug.edited import EditError
from forge.debug.report import Explanation, explain
from forge.debug.repro import repro
from forge.executors.errors import CheckError
from forge.executors.hubex import KernelExtension, kernel, register_kernel, use_kernels
from forge.executors.hubex.registry import kernels
from forge.patterns import Pattern, pattern
from forge.runtime.module_transforms import ModuleTransform, original_state_dict
from forge.version import __version__ as __version__

__all__ = [
    "CheckError",
    "Difference",
    "EditError",
    "EntryPoint",
    "Explanation",
    "ExportError",
    "Exported",
    "KernelExtension",
    "LoadedKernel",
    "ModuleTransform",
    "Pattern",
    "StrictError",
    "bisect",
    "bundle",
    "distributed",
    "explain",
    "export",
    "finish_compiling",
    "grad",
    "jit",
    "kernel",
    "kernels",
    "last_backward_traces",
    "last_traces",
    "load",
    "load_kernel",
    "optim",
    "original_state_dict",
    "pattern",
    "quantize",
    "refold",
    "register_kernel",
    "repro",
    "trace",
    "use_kernels",
    "value_and_grad",
    "vjp",
]
