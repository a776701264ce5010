"""The casts that torch.autocast makes before a call. The mode itself is in autocast_mode.py.

torch has lists, by device, of operators that autocast runs in lower precision, in float32, or in the widest dtype of
their arguments. forge does not copy the lists. A call runs on fake tensors once under autocast, and once for each way
to convert its arguments beforehand; forge takes the way that gives the operators the same dtypes. A call that no way
reproduces, because it runs some operators in lower precision and others in float32, is left to torch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.ir import TensorProxy
from forge.ir.bounded import BoundedDict
from forge.ir.pytree import leaves, tree_map
from forge.prims.recurrent import KINDS
from forge.torch_internals.dispatch import TorchDispatchMode, schema_of
from forge.torch_internals.fake_tensors import call_on_fake_tensors
from forge.torch_internals.functions import torch_weight_norm
from forge.torchlang.autocast_mode import DEVICES, casts_recurrent_layers, disable, state
from forge.torchlang.fake_execution import run_on_fake_tensors

Way = Callable[..., torch.dtype]  # from a tensor that autocast may convert to its new dtype

# the ways to convert arguments


def cast_arguments(
    function: Callable, args: tuple, kwargs: dict, convert: Callable[[TensorProxy, torch.dtype], TensorProxy]
) -> tuple[tuple, dict] | None:
    """Return the converted arguments that give the function the same result without autocast as under it; None if no
    conversion does. `convert` converts a tensor. Raises ReachesInside."""
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorProxy)]
    candidates = [leaf for leaf in tensors if _is_eligible(leaf)]
    if not candidates:
        return args, kwargs
    if function in _INSIDE or (function in _RECURRENT and casts_recurrent_layers()):
        raise ReachesInside(
            f"{getattr(function, '__name__', function)} under torch.autocast: torch's own kernel calls operators that "
            "autocast converts for"
        )
    widest = _widest(candidates)
    key = (function, state(), *map(_cast_key, leaves((args, kwargs))), *kwargs)
    way = "lower" if function is torch.lstm and _runs_by_onednn(*args) else _memo.get(key, ...)
    if way is ...:
        way = _memo[key] = _find(function, args, kwargs, widest)
    if way is None:
        return None
    if way == "dtype":
        return args, {**kwargs, "dtype": torch.float32}
    to = _WAYS[way]

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, TensorProxy) or not _is_eligible(leaf):
            return leaf
        dtype = to(leaf, widest)
        return leaf if leaf.dtype == dtype else convert(leaf, dtype)

    return tree_map(change, args), tree_map(change, kwargs)


_WAYS: dict[str, Callable[[Any, torch.dtype], torch.dtype]] = {
    "as they are": lambda tensor, widest: tensor.dtype,
    "lower": lambda tensor, widest: torch.get_autocast_dtype(tensor.device.type),
    "float32": lambda tensor, widest: torch.float32,
    "widest": lambda tensor, widest: widest,
}
_memo: dict[Any, str | None] = BoundedDict(4096)


class ReachesInside(NotImplementedError):
    """The error when autocast changes the inside of one of torch's own kernels, which fake tensors do not show."""


_INSIDE = frozenset(
    (
        F.affine_grid,
        F.bilinear,
        torch.affine_grid_generator,
        torch.bilinear,
        torch.ldexp,
        torch.Tensor.ldexp,
        torch.linalg.matrix_power,
        torch.linalg.pinv,
        torch.matrix_power,
        torch.Tensor.matrix_power,
        torch.pinverse,
        torch.Tensor.pinverse,
        torch.trace,
        torch.Tensor.trace,
        torch_weight_norm,
        torch.ops.aten._safe_softmax.default,
    )
)

_RECURRENT = frozenset(getattr(torch, kind) for kind in KINDS)


def _runs_by_onednn(input: TensorProxy, hx: Any, params: Any, *options: Any) -> bool:
    """Return whether torch.lstm runs by one operator of oneDNN, which autocast converts all arguments for; fake tensors
    run the cells' operators instead. Source: use_mkldnn in aten/src/ATen/native/RNN.cpp."""
    if input.device.type != "cpu" or isinstance(hx, TensorProxy) or not torch.backends.mkldnn.is_available():
        return False  # or a packed sequence
    h, c = hx
    has_projection = h.shape[2] != c.shape[2]
    return bool(torch.backends.mkldnn.enabled) and not has_projection


def _is_eligible(tensor: Any) -> bool:
    kind = tensor.device.type
    is_float = tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    return is_float and kind in DEVICES and torch.is_autocast_enabled(kind)


def _widest(tensors: list[Any]) -> torch.dtype:
    return torch.float32 if any(each.dtype == torch.float32 for each in tensors) else tensors[0].dtype


def _cast_key(leaf: Any) -> Any:
    """Return the properties of an argument that autocast can depend on: neither lengths nor numbers."""
    if isinstance(leaf, TensorProxy):
        return leaf.dtype, leaf.device.type, len(leaf.shape)
    return leaf if isinstance(leaf, (str, torch.dtype, bool, type(None))) else type(leaf)


# trials


class _DtypeRecorder(TorchDispatchMode):
    """A mode that records the operators that run and the dtypes of their inputs, except conversions and views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = call_on_fake_tensors(func, args, kwargs or {})
        if func.namespace != "prim" and func is not torch.ops.aten._to_copy.default and not _is_view(func):
            self.calls.append((func, *_dtypes(func, list(leaves((args, kwargs or {}))))))
        return result


def _dtypes(func: Any, arguments: list[Any]) -> list[torch.dtype]:
    """Return the dtypes of an operator's tensors, after the conversion by an argument `dtype`."""
    own = next((leaf for leaf in arguments if isinstance(leaf, torch.dtype)), None)
    if func in _HALF_TO_FLOAT and True in [leaf for leaf in arguments if isinstance(leaf, bool)]:
        own = torch.float32
    tensors = [leaf.dtype for leaf in arguments if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return [] if own is None else [own]
    return tensors if own is None else [own if dtype.is_floating_point else dtype for dtype in tensors]


_HALF_TO_FLOAT = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default))


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in schema_of(func).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _find(run: Callable, args: tuple, kwargs: dict, widest: torch.dtype) -> str | None:
    expected = _trial(run, args, kwargs, None)
    if expected is None:
        return None
    for name, to in _WAYS.items():
        if name == "float32" and _is_by_dtype(run, args, kwargs, expected):
            return "dtype"
        if _trial(run, args, kwargs, lambda tensor, to=to: to(tensor, widest)) == expected:
            return name
    return None


def _is_by_dtype(run: Callable, args: tuple, kwargs: dict, expected: list[tuple]) -> bool:
    """Return whether an argument `dtype` reproduces autocast; the functions that have one need no conversion before."""
    if kwargs.get("dtype") is not None:
        return False
    return _trial(run, args, {**kwargs, "dtype": torch.float32}, lambda tensor: tensor.dtype) == expected


def _trial(run: Callable, args: tuple, kwargs: dict, to: Way | None) -> list[tuple] | None:
    """Return the operators that run under autocast or, with `to`, without it on converted arguments; None if the call
    raises."""
    recorder = _DtypeRecorder()
    if to is None:
        return None if run_on_fake_tensors(run, args, kwargs, recorder) is None else recorder.calls
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorProxy)]
    dtypes = {id(leaf): to(leaf) for leaf in tensors if _is_eligible(leaf)}
    with disable():
        converted = run_on_fake_tensors(run, args, kwargs, recorder, lambda leaf: dtypes.get(id(leaf), leaf.dtype))
    return None if converted is None else recorder.calls
