"""The declaration of a kernel in Python, equivalent to a manifest."""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forge.hub.manifest.calls import kernel_problems
from forge.hub.manifest.errors import ManifestError, Mark, Problem, Problems, did_you_mean
from forge.hub.manifest.kernels import KernelKeys, KernelReader, read_kernel
from forge.hub.manifest.model import KernelEntry, Library, Resolver, Signature
from forge.hub.manifest.parse import from_python
from forge.hub.manifest.schema import keys_of
from forge.ir.checks import check, check_list
from forge.ir.printing import qualified_name

Dtypes = Sequence[torch.dtype | str] | Mapping[str, Any]

OPTIONS = ("name", "library", "dtypes", *(key for key in keys_of(KernelKeys) if key not in ("name", "kernel_name")))
_FUNCTIONS = ("assumes", "samples")
_LISTS = {
    "args": "arguments, or a mapping from the kernel's parameters to them",
    "where": "conditions",
    "faster": "conditions",
    "mutates": "the names of arguments",
    "result": "texts",
}


def kernel(
    op: str | Callable,
    fn: Callable,
    *,
    resolver: Resolver,
    library: str = "",
    dtypes: Dtypes | None = None,
    mark: Mark | None = None,
    **options: Any,
) -> KernelEntry:
    """Return the entry of a function that implements `op`: a torch function, its name, the name of an aten operator, or
    "pattern:name".

    dtypes: the dtypes of all tensor arguments, which share one dtype in a call; or a mapping from each argument to its
    own. options: the keys of a manifest's kernel (KernelKeys). `arg_meta` with `type_alias` and `dim_order_alias`
    expresses more than dtypes; in `grad`, functions may replace their names.
    Raises ManifestError with every problem, at `mark`: the caller's file and line unless given; TypeError for an option
    of a wrong type.
    """
    name = options.get("name")
    label = name if isinstance(name, str) else getattr(fn, "__name__", "")
    _check_options(label, fn, options, library, dtypes)
    problems = Problems()
    mark = mark or caller(2)
    signature = _signature(op, resolver, mark)
    functions: dict[str, Any] = {f"{key}_fn": options.get(key) for key in _FUNCTIONS}
    options["grad"], grad_functions = _with_names(options.get("grad", "none"))
    for key in ("where", "faster", "mutates"):
        options[key] = options.get(key) or None
    for key in _FUNCTIONS:
        options[key] = options.get(key) and _name_of(options[key], key)
    if options.get("tolerance"):
        options["tolerance"] = {str(dtype): limits for dtype, limits in options["tolerance"].items()}
    if dtypes is not None:
        meta, options["type_alias"] = _uniform(dtypes, signature, options.get("type_alias"))
        options["arg_meta"] = {**meta, **(options.get("arg_meta") or {})}
    kind = "pattern" if isinstance(op, str) and op.startswith("pattern:") else "op"
    reader = KernelReader(problems, op=signature.name, kind=kind, signature=signature, library=Library(library))
    entry = read_kernel(reader, from_python(options, mark), 0, fn)
    if entry is not None:
        entry = dataclasses.replace(entry, grad=dataclasses.replace(entry.grad, **grad_functions), **functions)
        for text in kernel_problems(entry, signature, find_nothing):
            problems.add(mark, text)
    problems.raise_any()
    assert entry is not None, "an entry without problems was read"
    return entry


def _check_options(name: str, fn: Any, options: Mapping[str, Any], library: Any, dtypes: Any) -> None:
    """Check the types of the options that a manifest does not write as text, or that strings in Python could
    imitate."""
    _check(fn, f"kernel {name}", callable(fn), "a function")
    _check_dtypes(dtypes, f"kernel {name}: dtypes")
    for option, what in _LISTS.items():
        kinds = (Mapping, type(None)) if option == "args" else (str, type(None))
        if not isinstance(options.get(option), kinds):
            check_list(options[option], f"kernel {name}: {option}", what)
    for option in _FUNCTIONS:
        value = options.get(option)
        _check(value, f"kernel {name}: {option}", value is None or callable(value), "a function")
    tolerance, expectation = options.get("tolerance"), "a mapping from dtypes to [rtol, atol]"
    _check(tolerance, f"kernel {name}: tolerance", isinstance(tolerance, (Mapping, type(None))), expectation)
    _check(library, f"kernel {name}: library", isinstance(library, str), "text")


def _check_dtypes(dtypes: Any, what: str) -> None:
    if dtypes is None or isinstance(dtypes, Mapping):
        return
    expectation = "dtypes, or a mapping from arguments to them"
    _check(dtypes, what, not isinstance(dtypes, torch.dtype), f"a list of {expectation}: [{dtypes}]")
    check_list(dtypes, what, expectation)
    _check(dtypes, what, len(dtypes) > 0, "a list of at least one dtype; left out, there is none that it must be")
    for i, each in enumerate(dtypes):
        _check(each, f"{what}[{i}]", isinstance(each, (torch.dtype, str)), "a dtype")


def _check(value: Any, what: str, ok: bool, expectation: str) -> None:
    check(ok, lambda: f"{what} is {value!r}, but must be {expectation}", TypeError)


def caller(depth: int) -> Mark:
    """Return the place of the call `depth` frames above."""
    frame = sys._getframe(depth)
    return Mark(frame.f_code.co_filename, frame.f_lineno, 1)


def _with_names(grad: Any) -> tuple[Any, dict[str, Any]]:
    """Return `grad` with functions replaced by names, and the functions by field."""
    if callable(grad):
        grad = {"kernel_name": grad}
    if not isinstance(grad, Mapping):
        return grad, {}
    fields = {"kernel_name": "fn", "forward": "forward_fn"}
    functions = {key: grad[key] for key in fields if callable(grad.get(key))}
    names = {key: _name_of(each, key) for key, each in functions.items()}
    if len(set(names.values())) < len(names):  # for example, two lambdas
        names = {key: f"{name}_{fields[key]}" for key, name in names.items()}
    return {**grad, **names}, {fields[key]: function for key, function in functions.items()}


def _name_of(function: Callable, otherwise: str) -> str:
    return re.sub(r"\W", "_", getattr(function, "__name__", otherwise))


def _signature(op: str | Callable, resolver: Resolver, mark: Mark) -> Signature:
    text = op if isinstance(op, str) else qualified_name(op)
    signature = resolver.resolve(text) if text is not None else None
    if signature is None:
        name = text or ""
        if isinstance(op, type) and issubclass(op, torch.nn.Module):
            name = f"torch.nn.functional.{op.__name__.lower()}"
        near = did_you_mean(name, resolver.names())
        raise ManifestError([Problem(mark, f"unknown operator {text or op!r}{near}")])
    return signature


def _uniform(dtypes: Dtypes, signature: Signature, type_alias: Mapping | None) -> tuple[dict, dict]:
    """Return the arg_meta and type_alias that express `dtypes`."""
    if isinstance(dtypes, Mapping):
        types = {f"{name}_dtype": value for name, value in dtypes.items()}
        return {name: f"{name}_dtype" for name in dtypes}, {**(type_alias or {}), **types}
    tensors = [signature.by_name[name] for name in signature.tensors if not signature.by_name[name].out]
    meta = {p.name: "T?" if p.optional else "T" for p in tensors}
    return meta, {**(type_alias or {}), "T": list(dtypes)}


def find_nothing(name: str) -> Any:
    """Raise ImportError: a declaration in Python passes functions, so a name cannot be resolved."""
    raise ImportError(
        f"{name!r} names no function; a declaration in Python passes functions themselves, or grad as 'none', "
        "'composite' or 'autograd'"
    )
