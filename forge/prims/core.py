"""The function make_prim, and the checks and shape arithmetic that metas share."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, statically_known_true

from forge.ir import (
    NUMBER_TYPES,
    Dim,
    Symbol,
    Tag,
    TensorProxy,
    check,
    current_trace,
    get_grad,
    needs_grad,
    put_grad,
    register_grad,
)

__all__ = ["all_prims", "check_dim", "check_dims", "make_prim", "register_vjp", "same", "statically_true"]

_R = TypeVar("_R")
_prims: dict[str, Symbol] = {}


def make_prim(id: str, name: str, *, meta: Callable[..., _R], tags: Iterable[Tag] = ()) -> Symbol[_R]:
    """Return a primitive operation, the lowest level of symbol that a trace can call.

    Args:
        id: The unique id, an attribute of forge.prims.
        name: The name that a printed trace shows.
        meta: Checks the arguments and maps input metadata to output metadata. A size may be a torch.SymInt. An argument
            that is annotated as a TensorProxy must be one.
        tags: Properties that passes ask for; see Tag.

    Raises:
        ValueError: If `id` is taken.
    """
    check(id not in _prims, lambda: f"make_prim: the id {id!r} is taken")
    prim = Symbol(name, f"prims.{id}", meta=with_tensor_checks(f"prims.{id}", meta), tags=frozenset(tags))
    _prims[id] = prim
    return prim


def primitive(*, tags: Iterable[Tag] = ()) -> Callable[[Callable[..., _R]], Symbol[_R]]:
    """Make the decorated meta the prim of its name."""
    return lambda meta: make_prim(meta.__name__, meta.__name__, meta=meta, tags=tags)


def with_tensor_checks(
    op: str, function: Callable[..., _R], check_argument: Callable[..., None] | None = None
) -> Callable[..., _R]:
    """Wrap a function to raise TypeError for a non-tensor in an argument that is annotated as a tensor.

    check_argument: raises the error; check_tensor by default.
    """
    check_argument = check_argument or check_tensor
    parameters = enumerate(inspect.signature(function).parameters.values())
    tensor_parameters = [
        (i, each.name) for i, each in parameters if each.annotation is TensorProxy and each.kind in _SINGLE
    ]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> _R:
        for i, name in tensor_parameters:
            value = args[i] if i < len(args) else kwargs.get(name, TensorProxy)  # the call reports a missing argument
            if not isinstance(value, TensorProxy) and value is not TensorProxy:
                check_argument(op, **{name: value})
        return function(*args, **kwargs)

    return run if tensor_parameters else function


_SINGLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def register_vjp(symbol: Symbol, **formulas: Callable[..., Any] | None) -> None:
    """Register the gradient rule of a symbol by a formula for each argument, as in torch's derivatives.yaml.

    A formula names the values that it reads: `g`, the incoming gradient (`grad` where an argument is called g), `out`,
    arguments, and `*rest`, all arguments that follow those. It runs if its argument needs a gradient. None stands for
    an argument without a gradient. With several outputs, `g` is that of the first.
    """
    signature = inspect.signature(symbol.definition)
    names = list(signature.parameters)
    all_formulas = {name: formula or (lambda: None) for name, formula in formulas.items()}
    readers = [(name, formula, _reader(formula, names)) for name, formula in all_formulas.items()]
    read_by_formulas = {each for _, _, (read, _) in readers for each in read} - {"g", "grad", "out"}
    for name in (*formulas, *sorted(read_by_formulas)):
        check(
            name in names,
            lambda name=name: (
                f"register_vjp: {symbol.id} has no argument {name!r}, only {', '.join(names)}"
                + ("; use register_grad for a symbol of *args and **kwargs" if "kwargs" in names else "")
            ),
            TypeError,
        )

    @register_grad(symbol)
    def rule(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False))
        if kwargs or len(args) != len(names):  # otherwise no binding is needed, which takes time
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs, arguments = bound.args, bound.kwargs, bound.arguments
        out = symbol(*args, **kwargs)
        g = get_grad(out if isinstance(out, TensorProxy) else out[0])
        values = {"g": g, "grad": g, "out": out, **arguments}
        for name, formula, (read, rest) in readers:
            if needs_grad(values[name]):
                put_grad(values[name], formula(*[values[each] for each in (*read, *rest)]))
        return out


def _reader(formula: Callable[..., Any], names: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the values that a formula reads, and of those in its *rest."""
    parameters = inspect.signature(formula).parameters.values()
    read = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    after = max((names.index(name) for name in read if name in names), default=-1) + 1
    return read, names[after:] if len(read) < len(parameters) else []


def all_prims() -> dict[str, Symbol]:
    """Return every prim by id."""
    return dict(_prims)


def torch_check(ok: bool, message: Callable[..., str]) -> None:
    """Raise RuntimeError unless `ok`, like TORCH_CHECK in torch's C++."""
    check(ok, message, RuntimeError)


def check_tensor(op: str, **arguments: Any) -> None:
    """Raise TypeError naming the first argument that is not a tensor."""
    for name, value in arguments.items():
        check(
            isinstance(value, TensorProxy),
            lambda name=name, value=value: f"{op}: {name} is {value!r}, but must be a tensor",
            TypeError,
        )


def check_dim(op: str, dim: int, ndim: int) -> int:
    """Return `dim` counted from the front. Raises IndexError if it is out of range (a 0-d tensor counts as 1-d)."""
    if isinstance(dim, torch.SymInt):  # the program depends on the dim
        dim = int(dim)
    bound = max(ndim, 1)
    check(
        -bound <= dim < bound,
        lambda: (
            f"{op}: Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim}); "
            f"the tensor has {ndim} dims"
        ),
        IndexError,
    )
    return dim % bound


def check_dims(op: str, dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return distinct dims counted from the front. Raises IndexError for a dim out of range, ValueError for a repeated
    one."""
    result = tuple(check_dim(op, dim, ndim) for dim in dims)
    torch_check(len(set(result)) == len(result), lambda: f"{op}: dims {tuple(dims)} name a dim twice")
    return result


def same(a: Dim, b: Dim) -> bool:
    """Return whether two lengths are equal; a symbolic length is guarded on only if the answer is not known.

    If that depends on values, the lengths are assumed to be equal, which the kernels check; a length is not assumed to
    be 1.
    """
    return a is b or (guard_or_false if isinstance(b, int) and b == 1 else guard_or_true)(a == b)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return whether two shapes are equal, in the sense of `same`."""
    return len(a) == len(b) and all(map(same, a, b))


def statically_true(condition: Any) -> bool:
    """Return whether a condition on lengths is known to hold, without a guard."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def check_same_shape(op: str, *tensors: TensorProxy) -> None:
    """Raise ValueError unless all tensors have the same shape."""
    first = tensors[0]
    for other in tensors[1:]:
        check(
            same_shape(first.shape, other.shape),
            lambda other=other: f"{op}: {first} and {other} must have one shape; use clang.broadcast first",
        )


def check_same_device(op: str, *values: Any) -> torch.device:
    """Return the device of the tensors among `values`; a 0-d CPU tensor goes with any device, as in torch.

    Raises RuntimeError if they differ, as torch does.
    """
    device: torch.device | None = None
    for value in values:
        if not isinstance(value, TensorProxy):
            continue
        if device is None or (device.type == "cpu" and device != value.device and all_cpu_scalars(values, device)):
            device = value.device
        torch_check(
            value.device == device or (value.ndim == 0 and value.device.type == "cpu"),
            lambda value=value, device=device: (
                f"{op}: Expected all tensors to be on the same device, but found {value} where {device} was wanted; "
                "move it with .to(device)"
            ),
        )
    assert device is not None, f"{op}: none of its arguments is a tensor"
    return device


def all_cpu_scalars(values: Iterable[Any], device: torch.device) -> bool:
    """Return whether every tensor on `device` is 0-d, in which case another tensor's device determines the result's."""
    return all(value.ndim == 0 for value in values if isinstance(value, TensorProxy) and value.device == device)


def check_number_or_tensor(op: str, **arguments: Any) -> None:
    """Raise TypeError naming the first argument that is neither a number nor a tensor."""
    for name, value in arguments.items():
        check(
            isinstance(value, (TensorProxy, *NUMBER_TYPES)),
            lambda name=name, value=value: f"{op}: {name} is {value!r}, but must be a tensor or a number",
            TypeError,
        )


def like(
    x: TensorProxy,
    *,
    shape: Sequence[Dim] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> TensorProxy:
    """Return a new proxy with the given shape, dtype and device, by default `x`'s."""
    return current_trace().tensor(x.shape if shape is None else shape, dtype or x.dtype, device or x.device)
