"""torch functions that are Python compositions and that Dynamo puts into its graphs whole: their code runs on
proxies, as in the direct front end, and its calls become the program's.

Under torch.autocast, each of these calls is converted as in eager, which converting the whole function's arguments
does not achieve (F.multi_head_attention_forward)."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from forge.capture.autograd_functions import traced_directly
from forge.ir import current_trace

MODULES = ("torch.masked.", "torch.nn.functional", "torch.signal.")
_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def record(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the function's result, its calls recorded; NotImplemented, and nothing recorded, for a function outside of
    MODULES, and for one that calls a function that torchlang lacks or reads values."""
    if not (isinstance(function, FunctionType) and function.__module__.startswith(MODULES)):
        return NotImplemented
    trace = current_trace()
    try:
        with trace.collecting() as calls, traced_directly():
            output = _without_overrides(function)(*args, **kwargs)
    except (AttributeError, NotImplementedError, TypeError):
        return NotImplemented
    for call in calls:
        trace.record(call)
    return output


def _without_overrides(function: FunctionType) -> FunctionType:
    """Return a function that runs its code on proxies, without first dispatching the whole call to them."""
    scope = {**function.__globals__, **dict.fromkeys(_OVERRIDES, lambda *tensors: False)}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
