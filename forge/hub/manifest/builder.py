"""A kernel declared in Python: what a manifest says, without one."""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forge.hub.manifest import kernels
from forge.hub.manifest.aliases import read_aliases
from forge.hub.manifest.errors import Mark, Problems, did_you_mean
from forge.hub.manifest.fields import Reader
from forge.hub.manifest.model import KernelEntry, Resolver, Signature
from forge.hub.manifest.options import check_options
from forge.hub.manifest.parse import from_python
from forge.hub.manifest.validate import kernel_problems
from forge.ir.printing import qualified_name

Dtypes = Sequence[torch.dtype | str] | Mapping[str, Any]


def kernel(
    op: str | Callable,
    fn: Callable,
    *,
    resolver: Resolver,
    name: str | None = None,
    library: str = "",
    dtypes: Dtypes | None = None,
    arg_meta: Mapping[str, Any] | None = None,
    type_alias: Mapping[str, Any] | None = None,
    dim_order_alias: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
    where: Sequence[str] | str = (),
    faster: Sequence[str] | str = (),
    device: str | Sequence[str] | Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    out: str | int | Sequence[str | int] | None = None,
    result: str | Sequence[str] | None = None,
    layout: str | Mapping[str, str] | None = None,
    align: int | Mapping[str, int] | None = None,
    priority: int = 0,
    grad: str | Callable | Mapping[str, Any] = "none",
    tolerance: Mapping[torch.dtype | str, Sequence[float]] | None = None,
    mutates: str | Sequence[str] = (),
    assumes: Callable | None = None,
    samples: Callable | None = None,
    mark: Mark | None = None,
) -> KernelEntry:
    """The entry of a function that implements `op`: a torch function, or its name, or an aten operator's, or
    "pattern:name".

    dtypes: those that every tensor argument may have, one and the same in a call; or a mapping by argument, in which
    each has its own. `arg_meta` with `type_alias` and `dim_order_alias` says more. The other options are a manifest's;
    in `grad`, functions may stand in the place of their names.
    Raises ManifestError with every problem, at `mark`: the caller's file and line unless given; TypeError for an option
    that is none of what it may be.
    """
    called = name if isinstance(name, str) else getattr(fn, "__name__", "")
    of_functions = {"assumes": assumes, "samples": samples, "tolerance": tolerance, "library": library}
    of_texts = {"dtypes": dtypes, "args": args, "where": where, "faster": faster, "mutates": mutates}
    of_texts["result"] = result
    check_options(called, fn, {**of_functions, **of_texts})
    problems = Problems()
    reader = Reader(problems)
    mark = mark or caller(2)
    signature = _signature(op, resolver, mark, problems)
    grad, functions = _named(grad)
    given = {
        "name": name,
        "priority": priority,
        "device": device,
        "arg_meta": arg_meta,
        "shape": shape,
        "where": where or None,
        "faster": faster or None,
        "args": args,
        "out": out,
        "result": result,
        "layout": layout,
        "align": align,
        "grad": grad,
        "mutates": mutates or None,
        "assumes": assumes and _name_of(assumes, "assumes"),
        "samples": samples and _name_of(samples, "samples"),
        "tolerance": tolerance and {str(dtype): limits for dtype, limits in tolerance.items()},
    }
    if dtypes is not None:
        meta, type_alias = _uniform(dtypes, signature, type_alias)
        given["arg_meta"] = {**meta, **(arg_meta or {})}
    definitions = [from_python(alias or {}, mark) for alias in (type_alias, dim_order_alias)]
    aliases = read_aliases(reader, *definitions)
    kind = "pattern" if isinstance(op, str) and op.startswith("pattern:") else "op"
    described = kernels.Op(signature.name, kind, signature, aliases, library, 0, False, False)
    entry = kernels.read_kernel(reader, from_python(given, mark), 0, described, fn)
    if entry is not None:
        entry = dataclasses.replace(entry, grad=dataclasses.replace(entry.grad, **functions))
        entry = dataclasses.replace(entry, assumes_fn=assumes, samples_fn=samples)
        for text in kernel_problems(entry, signature, _nothing):
            problems.add(mark, text)
    problems.raise_any()
    assert entry is not None, "an entry without problems was read"
    return entry


def caller(depth: int) -> Mark:
    """The place of a call that is made `depth` calls above."""
    frame = sys._getframe(depth)
    return Mark(frame.f_code.co_filename, frame.f_lineno, 1)


def _named(grad: Any) -> tuple[Any, dict[str, Callable]]:
    """`grad` with names in the place of functions, and the functions by their fields."""
    if callable(grad):
        grad = {"kernel_name": grad}
    if not isinstance(grad, Mapping):
        return grad, {}
    fields = {"kernel_name": "fn", "forward": "forward_fn"}
    functions = {key: grad[key] for key in fields if callable(grad.get(key))}
    names = {key: _name_of(each, key) for key, each in functions.items()}
    if len(set(names.values())) < len(names):  # two lambdas, say
        names = {key: f"{name}_{fields[key]}" for key, name in names.items()}
    return {**grad, **names}, {fields[key]: function for key, function in functions.items()}


def _name_of(function: Callable, otherwise: str) -> str:
    return re.sub(r"\W", "_", getattr(function, "__name__", otherwise))


def _signature(op: str | Callable, resolver: Resolver, mark: Mark, problems: Problems) -> Signature:
    text = op if isinstance(op, str) else qualified_name(op)
    signature = resolver.resolve(text) if text is not None else None
    if signature is None:
        near = did_you_mean(text or "", resolver.names())
        problems.add(mark, f"unknown operator {text or op!r}{near}")
        problems.raise_any()
    return signature


def _uniform(dtypes: Dtypes, signature: Signature, type_alias: Mapping | None) -> tuple[dict, dict]:
    """arg_meta and type_alias that say what `dtypes` does."""
    if isinstance(dtypes, Mapping):
        types = {f"{name}_dtype": value for name, value in dtypes.items()}
        return {name: f"{name}_dtype" for name in dtypes}, {**(type_alias or {}), **types}
    tensors = [signature.by_name[name] for name in signature.tensors if not signature.by_name[name].out]
    meta = {p.name: "T?" if p.optional else "T" for p in tensors}
    return meta, {**(type_alias or {}), "T": list(dtypes)}


def _nothing(name: str) -> Any:
    raise ImportError(f"{name} was given in Python")
