"""The generated function that a user calls: it checks a call in about a microsecond per input, and runs the program."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forge.aot import tree
from forge.aot.signature import ConstantInput, NumberInput, Signature, TensorInput
from forge.torch_internals.autograd import set_grad_enabled

_MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
_CALL = """\
def call(*args, **kwargs):
    try:
        {taken}
        fits = {conditions}
    except misfits:
        fits = False
    if not fits:
        [{names}] = normalize(device, args, kwargs)
    grad = is_grad_enabled()
    if grad:
        set_grad_enabled(False)
        try:
            results = {run}
        finally:
            set_grad_enabled(True)
    else:
        results = {run}
    return {result}
"""


def caller(signature: Signature, device: torch.device, run: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that a user calls.

    run: the Python expression that runs the program, of the sizes, of `i0`, `i1`, ... for the inputs, and of what is in
    `scope`; it gives the results' tensors in a sequence.
    """
    names = [f"i{number}" for number in range(len(signature.inputs))]
    leaves = iter(signature.results)
    text = _CALL.format(
        taken="\n        ".join(_take(signature, names)),
        conditions=" and ".join(_conditions(signature, names)),
        names=", ".join([*signature.sizes, *names]),
        run=run,
        result=tree.build_text(signature.result, lambda: _leaf(next(leaves))),
    )
    scope |= {
        "Record": tree.Record,
        "device": device,
        "inf": math.inf,
        "is_grad_enabled": torch.is_grad_enabled,
        "math": math,
        "misfits": _MISFITS,
        "nan": math.nan,
        "normalize": signature.normalize,
        "set_grad_enabled": set_grad_enabled,
    }
    for each in signature.tensors:
        scope[f"dtype_{each.dtype}"] = getattr(torch, each.dtype)
        scope[f"device_{each.device}"] = device if each.device == device.type else torch.device(each.device)
    exec(compile(text, "<forge call>", "exec"), scope)
    function: Callable[..., Any] = scope["call"]
    return function


def _leaf(result: Any) -> str:
    if isinstance(result, int):
        return f"results[{result}]"
    return result if isinstance(result, str) else repr(result[0])


def _take(signature: Signature, names: Sequence[str]) -> Iterator[str]:
    """Return the lines that give the inputs and sizes their names; an object's parts have no place."""
    if tree.has_objects(signature.arguments):
        yield "raise ValueError"
    args, kwargs = signature.arguments[1:]
    places = [place for part, start in ((args, "args"), (kwargs, "kwargs")) for place in tree.paths(part, start)]
    leaves = [text for text, count in places if count is None]
    for name, text in zip(names, leaves, strict=True):
        yield f"{name} = {text}"
    counts = [f"len({text}) == {count}" for text, count in places if count is not None]
    yield f"fits = {' and '.join(counts)}"
    sizes: set[str] = set()
    for name, each in zip(names, signature.inputs, strict=True):
        if isinstance(each, NumberInput):
            sizes.add(each.size)
            yield f"{each.size} = {name}"
        for dim, size in enumerate(each.shape if isinstance(each, TensorInput) else ()):
            if isinstance(size, str) and size.isidentifier() and size not in sizes:
                sizes.add(size)
                yield f"{size} = {name}.shape[{dim}]"
    if not sizes.issuperset(signature.sizes):
        yield "raise ValueError"


def _conditions(signature: Signature, names: Sequence[str]) -> Iterator[str]:
    """Return the expressions that are all true of a call that fits."""
    yield "fits"
    for name, each in zip(names, signature.inputs, strict=True):
        if isinstance(each, TensorInput):
            shape, strides = ("".join(f"{size}, " for size in sizes) for sizes in (each.shape, each.strides))
            yield f"{name}.dtype is dtype_{each.dtype}"
            yield f"{name}.shape == ({shape})"
            yield f"{name}.stride() == ({strides})"
            yield f"{name}.device == device_{each.device}"
        elif isinstance(each, NumberInput):
            yield f"type({name}) is int"
        elif isinstance(each, ConstantInput):
            yield f"type({name}) is {type(each.value).__name__}" if each.value is not None else f"{name} is None"
            yield f"{name} == {each.value!r}"
    for size, (low, high) in signature.sizes.items():
        yield f"{size} >= {low or 0}"
        if high is not None:
            yield f"{size} <= {high}"
    yield from (f"({each})" for each in signature.guards)
