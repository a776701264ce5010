"""The operators of nvFuser in torch: their result dtypes and values."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from nvfuser_double.values import DataType, TensorView, Val

HALVES = (torch.float16, torch.bfloat16)
Dtypes = Callable[[dict[str, Any]], tuple[torch.dtype | None, torch.dtype]]


class Operator(NamedTuple):
    """An operator. dtypes: the dtype in which the operands are computed (None: unchanged), and that of the result."""

    dtypes: Dtypes
    function: Callable


OPERATORS: dict[str, Operator] = {}


# dtypes


def promoted(arguments: dict[str, Any], *, widens: bool) -> torch.dtype:
    """Return torch's promotion of the operands; numbers count by their kind, and half precision is widened to float32
    if `widens`."""
    tensors = [each.dtype().value for each in arguments.values() if isinstance(each, TensorView)]
    numbers = [_kind(each) for each in arguments.values() if isinstance(each, (Val, bool, int, float))]
    if not tensors:
        return max((torch.tensor(each).dtype for each in numbers), key=_RANK.index)
    found = torch.empty(1, dtype=tensors[0])
    for dtype in tensors[1:]:
        found = found.to(torch.promote_types(found.dtype, dtype))
    for number in numbers:
        found = found.to(torch.result_type(found, number))
    return torch.float32 if widens and found.dtype in HALVES else found.dtype


_RANK = [torch.bool, torch.int64, torch.float32, torch.float64]


def _kind(number: Any) -> Any:
    if isinstance(number, Val):
        return {DataType.Bool: True, DataType.Int: 1}.get(number.dtype(), 1.0)
    return number


def _widened(arguments: dict[str, Any]) -> tuple:
    dtype = promoted(arguments, widens=True)
    return dtype, dtype


def _floating(arguments: dict[str, Any]) -> tuple:
    dtype = promoted(arguments, widens=True)
    dtype = dtype if dtype.is_floating_point else torch.float32
    return dtype, dtype


def _kept(arguments: dict[str, Any]) -> tuple:
    dtype = promoted(arguments, widens=False)
    return dtype, dtype


def _truth(arguments: dict[str, Any]) -> tuple:
    return promoted(arguments, widens=True), torch.bool


def _first(arguments: dict[str, Any]) -> tuple:
    value = next(iter(arguments.values()))
    value = value[0] if isinstance(value, (list, tuple)) else value
    return None, value.dtype().value


def _summed(arguments: dict[str, Any]) -> tuple:
    dtype = arguments["arg"].dtype().value
    if dtype in HALVES:
        raise RuntimeError(f"a sum of {dtype} is to be cast first\nframe #0: in C++")
    return None, dtype if dtype.is_floating_point else torch.int64


def _chosen(arguments: dict[str, Any]) -> tuple:
    return None, arguments["dtype"].value


def _of_branches(arguments: dict[str, Any]) -> tuple:
    return None, promoted(dict(list(arguments.items())[1:]), widens=False)


def _whole(arguments: dict[str, Any]) -> tuple:
    return None, torch.int64


# values


def _register(dtypes: Dtypes, names: str, function: Callable | None = None) -> None:
    for name in names.split():
        OPERATORS[name] = Operator(dtypes, function or getattr(torch, name))


_register(_floating, "acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p")
_register(_floating, "log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh")
_register(_kept, "abs bitwise_not ceil floor frac neg relu round sign trunc")
_register(_kept, "set segment_set", lambda x: x)
_register(_kept, "silu", F.silu)
_register(_truth, "isfinite isinf isnan logical_not signbit")
_register(_floating, "atan2 nextafter")
_register(_widened, "pow fmod remainder")
_register(_truth, "eq ne lt le gt ge logical_and logical_or")
_register(_kept, "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift")


def _tensor_or_number(of_tensors: Callable, of_numbers: Callable) -> Callable:
    def call(a: Any, b: Any) -> Any:
        return of_tensors(a, b) if torch.is_tensor(a) or torch.is_tensor(b) else of_numbers(a, b)

    return call


_register(_widened, "add", _tensor_or_number(torch.add, lambda a, b: a + b))
_register(_widened, "sub", _tensor_or_number(torch.sub, lambda a, b: a - b))
_register(_widened, "mul", _tensor_or_number(torch.mul, lambda a, b: a * b))


def _divided(a: Any, b: Any) -> torch.Tensor:
    whole = not (a if torch.is_tensor(a) else b).is_floating_point()
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


_register(_widened, "div", _tensor_or_number(_divided, lambda a, b: int(a / b)))
_register(_floating, "truediv", torch.true_divide)


def _as_tensors(function: Callable) -> Callable:
    """Wrap a torch function that does not accept numbers in place of tensors."""

    def call(*operands: Any) -> torch.Tensor:
        like = next(each for each in operands if torch.is_tensor(each))
        return function(*[torch.as_tensor(each, dtype=like.dtype, device=like.device) for each in operands])

    return call


for _name in "atan2 nextafter logical_and logical_or eq ne lt le gt ge pow fmod remainder".split():
    OPERATORS[_name] = OPERATORS[_name]._replace(function=_as_tensors(getattr(torch, _name)))
_register(_widened, "maximum", _as_tensors(torch.maximum))
_register(_widened, "minimum", _as_tensors(torch.minimum))
_register(_of_branches, "where", torch.where)
_register(_chosen, "cast", lambda x, dtype: x)


# reductions


def _reduced(function: Callable) -> Callable:
    def call(x: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: Any) -> torch.Tensor:
        if dtype is not DataType.Null:
            raise NotImplementedError("the double reduces in the argument's dtype")
        return function(x, dims or list(range(x.ndim)), keepdim)

    return call


def _prod(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, keepdim)
    return x


_register(_summed, "sum", _reduced(torch.sum))
_register(_summed, "prod", _reduced(_prod))
_register(_first, "max", _reduced(torch.amax))
_register(_first, "min", _reduced(torch.amin))


# shapes


def _broadcast_in_dim(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    if len(dims) != x.ndim:
        raise RuntimeError(f"broadcast_in_dim: {len(dims)} dims for {x.ndim}\nframe #0: in C++")
    placed = [1] * len(shape)
    for dim, length in zip(dims, x.shape, strict=True):
        placed[dim] = length
    return x.reshape(placed).expand(shape)


def _broadcast(x: torch.Tensor, is_broadcast_dim: Sequence[bool]) -> torch.Tensor:
    if is_broadcast_dim.count(False) != x.ndim:
        raise RuntimeError(f"broadcast: {is_broadcast_dim} for {x.ndim} dims\nframe #0: in C++")
    lengths = iter(x.shape)
    return x.reshape([1 if new else next(lengths) for new in is_broadcast_dim])


def _slice(
    x: torch.Tensor, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int] | None, manual: bool
) -> torch.Tensor:
    if steps is not None and any(step != 1 for step in steps):
        raise RuntimeError("slice: steps must be 1\nframe #0: in C++")
    return x[tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))]


def _squeeze(x: torch.Tensor, dims: Sequence[int], squeeze_expanded: bool) -> torch.Tensor:
    if any(x.shape[dim] != 1 for dim in dims):
        raise RuntimeError(f"squeeze: {dims} of {tuple(x.shape)}\nframe #0: in C++")
    return torch.squeeze(x, list(dims))


def _permute(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.permute(tuple(dims))


def _pad(x: torch.Tensor, widths: Sequence[int], value: Any) -> torch.Tensor:
    return F.pad(x, tuple(widths), value=0 if value is None else value)


def ordered(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the tensor with its dims in this order in memory; repeated dims stay repeated."""
    slowest_first = sorted(range(x.ndim), key=lambda dim: -order[dim])
    if 0 in x.stride():
        return x
    back = [slowest_first.index(dim) for dim in range(x.ndim)]
    return x.permute(slowest_first).contiguous().permute(back)


_register(_first, "reshape", lambda x, shape: x.reshape(tuple(shape)))
_register(_first, "permute", _permute)
_register(_first, "broadcast_in_dim", _broadcast_in_dim)
_register(_first, "broadcast", _broadcast)
_register(_first, "slice", _slice)
_register(_first, "squeeze", _squeeze)
_register(_first, "pad", _pad)
_register(_first, "cat", lambda tensors, dim, manual_padding: torch.cat(tensors, dim))
_register(_first, "stride_order", ordered)
_register(_whole, "size", lambda x, dim: x.shape[dim])


# creation


def _full(shape: Sequence[int], value: Any, dtype: DataType) -> torch.Tensor:
    return torch.full(tuple(shape), value, dtype=dtype.value)


def _iota(length: int, start: Any, step: Any, dtype: DataType) -> torch.Tensor:
    start, step = 0 if start is None else start, 1 if step is None else step
    return torch.arange(length, dtype=dtype.value) * step + start


_register(_chosen, "full", _full)
_register(_chosen, "iota", _iota)
