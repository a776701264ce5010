"""Kernels declared in Python: what a manifest says, in a decorator's words."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forge.executors.hubex.gather import from_entry, operators
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.operators import Operators
from forge.hub.manifest import Mark, caller, did_you_mean
from forge.hub.manifest import kernel as entry_of
from forge.hub.manifest.builder import OPTIONS
from forge.ir import check
from forge.patterns import Pattern


def kernel(op: str | Callable | Pattern, fn: Callable | None = None, **options: Any) -> Any:
    """Declare a Python function as a kernel, for forge.jit(kernels=[...]) and forge.use_kernels([...]).

        @forge.kernel("torch.nn.functional.silu", dtypes=[torch.float32], grad="composite")
        def silu(input):
            return input / (1 + torch.exp(-input))

    Args:
        op: A torch function or its name, the name of an aten operator, a Pattern, or "pattern:name" of a builtin one.
        fn: The implementation. Without it, return a decorator.
        options: Fields of a manifest entry (docs/reference/manifest.md): name, library, dtypes, arg_meta, type_alias,
            dim_order_alias, shape, where, device, args, out, result, layout, align, priority, grad, tolerance, faster,
            mutates, assumes, samples. `dtypes` restricts all tensor arguments; functions may replace names.

    Returns:
        A kernel that is called as `fn` is, or a decorator.

    Raises:
        ManifestError: With every problem of the declaration.
        TypeError: For an unknown option or one of the wrong type.
    """
    for option in options:
        hint = did_you_mean(option, OPTIONS) or f"; there are {', '.join(OPTIONS)}"
        check(option in OPTIONS, lambda o=option, h=hint: f"forge.kernel has no option {o!r}{h}", TypeError)
    mark = caller(2)
    if fn is None:
        return lambda fn: _declared(op, fn, mark, options)
    return _declared(op, fn, mark, options)


def _declared(op: str | Callable | Pattern, fn: Callable, mark: Mark, options: dict[str, Any]) -> Kernel:
    is_pattern = isinstance(op, Pattern)
    known, name = (Operators({op.name: op.reference}), f"pattern:{op.name}") if is_pattern else (operators(), op)
    entry = entry_of(name, fn, resolver=known, mark=mark, **options)
    return replace(from_entry(entry, op if is_pattern else None), declared=(op, fn, options))
