"""Kernels declared in Python: the options of a manifest, in a decorator."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forge.executors.hubex.gather import from_entry, operators_for
from forge.executors.hubex.kernels import Kernel
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
        return lambda fn: _declare(op, fn, mark, options)
    return _declare(op, fn, mark, options)


def _declare(op: str | Callable | Pattern, fn: Callable, mark: Mark, options: dict[str, Any]) -> Kernel:
    resolver, pattern = operators_for(op)
    entry = entry_of(op if pattern is None else f"pattern:{pattern.name}", fn, resolver=resolver, mark=mark, **options)
    return replace(from_entry(entry, pattern), declared=(op, fn, options))
