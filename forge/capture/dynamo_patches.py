"""The scope in which Dynamo captures one of forge's frames: the patches of torch_internals, with forge's hooks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from forge.capture.checks import CHECKS, capture_check
from forge.capture.fake_substitutes import STAND_INS
from forge.capture.layers import mark_layers
from forge.executors.modules import ModuleExecutor
from forge.torch_internals import (  # noqa: F401  # whose patches are in the table
    dynamo_attributes,
    dynamo_branches,
    dynamo_calls,
    dynamo_functions,
    dynamo_globals,
    dynamo_guards,
    dynamo_hooks,
    dynamo_leaves,
    dynamo_methods,
    dynamo_tensors,
)
from forge.torch_internals.distributed import load_dtensor_patches
from forge.torch_internals.patch import Scope, patches_of


@dynamo_calls.capture_call.provide
def _capture_call(tx: Any, function: Callable, args: Any, kwargs: dict[str, Any], call: Callable) -> Any:
    """Capture a call of a torch function: as forge's check, as its substitute, or as it is, by `call`."""
    function = STAND_INS.get(function, function)
    if function in CHECKS:
        return capture_check(tx, function, args, kwargs, call=partial(call, function))
    return call(function, args, kwargs)


@contextmanager
def capture_scope(layers: ModuleExecutor | None = None) -> Iterator[None]:
    """Enter the patches under which Dynamo captures one of forge's frames; `layers` may replace the forward of
    modules."""
    with ExitStack() as stack:
        stack.enter_context(mark_layers(layers))
        load_dtensor_patches()
        for each in patches_of(Scope.CAPTURE):
            stack.enter_context(each)
        yield
