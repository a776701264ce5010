"""torch's own functions, where another package has put functions of its own in their place.

torch_geometric replaces torch.index_select, kernels of attention F.scaled_dot_product_attention. forge's tables mean
torch's function: a program that Dynamo captures calls what the replacement calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from forge.torch_internals.functions import VariableFunctions, tensor_base, torch_nn_module

_IN_FUNCTIONAL = "avg_pool2d avg_pool3d gelu linear one_hot scaled_dot_product_attention softplus softshrink".split()


@cache
def _places() -> tuple[tuple[Any, Any, str], ...]:
    """Return where torch has functions of C++, with where they come from and their names."""
    of_torch = set(dir(VariableFunctions)).difference(torch.functional.__all__)
    return (
        *((torch, VariableFunctions, name) for name in of_torch),
        *((F, torch_nn_module, name) for name in _IN_FUNCTIONAL),
        *((torch.Tensor, tensor_base, name) for name in vars(tensor_base)),
    )


def _is_replaced(function: Any) -> bool:
    """Return whether a function is written in Python, by another package than torch."""
    return isinstance(function, FunctionType) and function.__globals__["__name__"].partition(".")[0] != "torch"


@contextmanager
def torchs_functions() -> Iterator[None]:
    """Put torch's functions back while forge's tables of them are made."""
    replaced = [(*each, vars(each[0])[each[2]]) for each in _places() if _is_replaced(vars(each[0]).get(each[2]))]
    for place, source, name, _ in replaced:
        setattr(place, name, getattr(source, name))
    if replaced:
        _renew_dynamos_table()
    try:
        yield
    finally:
        for place, _, name, function in replaced:
            setattr(place, name, function)


@cache
def _renew_dynamos_table() -> None:
    """Have Dynamo take torch's functions for those that it does not trace, and trace their replacements."""
    from torch._dynamo import trace_rules  # which imports all of Dynamo

    trace_rules.get_torch_obj_rule_map.cache_clear()
    trace_rules.get_torch_obj_rule_map()
