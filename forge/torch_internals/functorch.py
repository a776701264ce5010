"""Levels of torch.func."""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch import predispatch as predispatch
from torch._functorch.predispatch import lazy_load_decompositions as lazy_load_decompositions
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_of_transforms

functorch = torch._C._functorch
get_dynamic_layer_stack_depth = torch._C._functorch.get_dynamic_layer_stack_depth
get_unwrapped = torch._C._functorch.get_unwrapped
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
maybe_current_level = torch._C._functorch.maybe_current_level
pop_dynamic_layer_stack = torch._C._functorch.pop_dynamic_layer_stack


def level_markers(suffix: str) -> set[Callable]:
    """Return the functions that open (suffix "increment_nesting") or close ("decrement_nesting") a level, for every
    transform that has them."""
    functions = [getattr(functorch, f"_{kind}_{suffix}", None) for kind in ("grad", "jvp", "vmap", "func")]
    functions += [getattr(predispatch, f"_{kind}_{suffix}", None) for kind in ("jvp", "vmap")]
    return {each for each in functions if each is not None}


predispatch_vmap_increment_nesting = predispatch._vmap_increment_nesting
# Dynamo's graphs call it, since torch 2.13 by another name
predispatch_enter_dual_level: Any = getattr(predispatch, "_enter_dual_level", torch._C._enter_dual_level)


def allow_retained_graph(output: torch.Tensor) -> None:
    """Let the backward of a compiled function's output run under retain_graph where no buffer is donated to it.

    A function that is compiled under `functorch_config.patch(donated_buffer=False)` has None for its donated buffers,
    which torch's check takes for some once the patch is over; and a patch does not reach the threads of backwards.
    """
    metadata = getattr(getattr(type(output.grad_fn), "_forward_cls", None), "metadata", None)
    if metadata is not None and metadata.bw_donated_idxs is None:
        metadata.bw_donated_idxs = []
