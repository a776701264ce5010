"""The dispatcher: keys, schemas, modes, operators."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._library import custom_ops as custom_ops
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_dispatch_stack_at as get_dispatch_stack_at
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

aten = torch.ops.aten
C = torch._C
DisableTorchFunction = torch._C.DisableTorchFunction
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
PreserveDispatchKeyGuard = torch._C._PreserveDispatchKeyGuard
TorchDispatchModeKey = torch._C._TorchDispatchModeKey
dispatch_dump = torch._C._dispatch_dump
dispatch_find_schema_or_throw = torch._C._dispatch_find_schema_or_throw
dispatch_get_all_op_names = torch._C._dispatch_get_all_op_names
dispatch_has_kernel = torch._C._dispatch_has_kernel
dispatch_has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
dispatch_keys = torch._C._dispatch_keys
dispatch_tls_local_exclude_set = torch._C._dispatch_tls_local_exclude_set
dispatch_tls_local_include_set = torch._C._dispatch_tls_local_include_set
get_dispatch_mode = torch._C._get_dispatch_mode
get_schema = torch._C._get_schema
is_tracing = torch._C._is_tracing
jit_get_schemas_for_operator = torch._C._jit_get_schemas_for_operator
jit_resolve_packet = torch._C._jit_resolve_packet
len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
parse_schema = torch._C.parse_schema
HigherOrderOperator = torch._ops.HigherOrderOperator
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket


class _State(threading.local):
    keeps_operators = False


_state = _State()


@contextmanager
def keep_operators() -> Iterator[None]:
    """Have torch's Python dispatcher, in this thread, leave operators that a mode would see without it.

    It has decompositions of a few that are not composite, and of composites that leave such a one out
    (torch/_decomp/decompositions.py, upsample_bilinear2d): a mode sees what they consist of, and not the operator that
    runs and that a table of decompositions may have.
    """
    _yield_to_operators()
    before, _state.keeps_operators = _state.keeps_operators, True
    try:
        yield
    finally:
        _state.keeps_operators = before


@functools.cache
def _yield_to_operators() -> None:
    for operator in decomposition_table:
        if isinstance(operator, OpOverload) and not operator._can_decompose():
            _replace_decomposition(operator, functools.partial(_below_autograd, operator))
    for packet in (
        aten.upsample_linear1d,
        aten.upsample_bilinear2d,
        aten.upsample_trilinear3d,
        aten.upsample_bicubic2d,
    ):
        _replace_decomposition(packet.vec, functools.partial(_upsample, packet.default))


def _replace_decomposition(operator: OpOverload, by_operator: Callable) -> None:
    """Have the Python dispatcher call `by_operator` in place of its decomposition of an operator, if it has one, in
    threads that keep operators."""
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
        if key in operator.py_kernels:
            operator.py_kernels[key] = _either(operator.py_kernels[key], by_operator)
    operator._dispatch_cache.clear()


def _either(decompose: Callable, by_operator: Callable) -> Callable:
    @functools.wraps(decompose)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (by_operator if _state.keeps_operators else decompose)(*args, **kwargs)

    return call


def _below_autograd(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args, **kwargs)


def _upsample(operator: OpOverload, x: Any, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
    """Source: torch/_decomp/decompositions.py, _upsample_linear_vec."""
    size = upsample_compute_output_size(x.size(), output_size, scale_factors)
    return operator(x, size, align_corners, *(scale_factors or [None] * len(size)))


def schema_of(overload: OpOverload) -> torch._C.FunctionSchema:
    """Return the schema of an operator."""
    return overload._schema


def find_schema(function: Any) -> torch._C.FunctionSchema | None:
    """Return the schema of a function if it is an operator, None for another one."""
    return getattr(function, "_schema", None)


def operator_name(overload: OpOverload) -> str:
    """Return "add" for aten.add.Tensor."""
    return overload._opname


def overload_name(overload: OpOverload) -> str:
    """Return "Tensor" for aten.add.Tensor, "default" for an overload without a name."""
    return overload._overloadname


def packet_name(packet: OpOverloadPacket) -> str:
    """Return "aten::add" for aten.add."""
    return packet._qualified_op_name


def find_packet_name(function: Any) -> str | None:
    """Return "aten::add" for aten.add, None for a function that is no packet of operators."""
    return getattr(function, "_qualified_op_name", None)


def destroy_library(library: torch.library.Library) -> None:
    """Remove what a library has registered, now rather than when it is collected."""
    library._destroy()


def custom_op_name(definition: CustomOpDef) -> str:
    """Return "mine::add" for an operator of torch.library.custom_op."""
    return definition._qualname


def custom_op_functions(definition: CustomOpDef) -> list[Any]:
    """Return the functions of an operator of torch.library.custom_op, None or empty for those that it does not have."""
    names = "_init_fn _backend_fns _abstract_fn _setup_context_fn _backward_fn _torch_dispatch_fns".split()
    return [getattr(definition, name, None) for name in names]
