"""Functions of torch that are Python around others, and that Dynamo puts into its graphs whole: their code runs on
proxies, as the direct front end's does, and its calls are the program's."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from forge.capture.autograd_functions import traced_directly
from forge.ir import current_trace

MODULES = ("torch.masked.", "torch.signal.")


def record(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the function's result, its calls recorded; NotImplemented, and nothing recorded, for a function outside of
    MODULES, and for one that calls a function that torchlang lacks or reads values."""
    if not (isinstance(function, FunctionType) and function.__module__.startswith(MODULES)):
        return NotImplemented
    trace = current_trace()
    try:
        with trace.collecting() as calls, traced_directly():
            output = function(*args, **kwargs)
    except (NotImplementedError, TypeError):
        return NotImplemented
    for call in calls:
        trace.record(call)
    return output
