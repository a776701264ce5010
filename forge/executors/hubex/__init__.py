"""The Hub executor: kernels of the Hugging Face Kernel Hub and of users as implementations of forge's symbols."""

from forge.executors.hubex.declaration import kernel
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.extension import KernelExtension
from forge.executors.hubex.gather import Source, gather, operators
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.layers import LayerExecutor, Layers, layer_executor
from forge.executors.hubex.listing import KernelRow, KernelTable, LayerRow, layer_table, layers_in, table_of
from forge.executors.hubex.registry import hubex, kernel_executor, register_kernel, use_kernels
from forge.executors.hubex.verification.verification_cache import Verifier, verifier, verify_all

__all__ = [
    "HubExecutor",
    "Kernel",
    "KernelExtension",
    "KernelRow",
    "KernelTable",
    "LayerExecutor",
    "LayerRow",
    "Layers",
    "Source",
    "Verifier",
    "gather",
    "hubex",
    "kernel",
    "kernel_executor",
    "layer_executor",
    "layer_table",
    "layers_in",
    "operators",
    "register_kernel",
    "table_of",
    "use_kernels",
    "verifier",
    "verify_all",
]
