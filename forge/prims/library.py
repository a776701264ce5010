"""The prims that are a single function of torch's library: factorizations, transforms, rare special functions.

Their metadata comes from torch's functions on fake tensors, so shapes, dtypes and errors are torch's.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from forge.ir import SYMBOLIC_TYPES, NumberProxy, Symbol, Tag, TensorProxy, current_trace
from forge.ir.pytree import leaves, tree_map
from forge.prims.core import make_prim
from forge.torch_internals.dispatch import (
    DisableTorchFunction,
    OpOverload,
    disable_current_modes,
    enable_python_dispatcher,
    operator_name,
    overload_name,
    schema_of,
)
from forge.torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

__all__ = ["library_functions"]

_functions: dict[Symbol, Callable[..., Any]] = {}


def make_library_prim(
    function: Callable[..., Any], meaning: str, *, name: str = "", tags: Iterable[Tag] = ()
) -> Symbol:
    """Return a prim that is one function of torch with the same arguments; it belongs to the calling file.

    name: for a function whose own name is taken, or is that of an overload. Like any prim, it needs a gradient rule, or
    Tag.NOT_DIFFERENTIABLE if torch has no derivative.
    """
    name = name or function.__name__

    def meta(*args: Any, **kwargs: Any) -> Any:
        return _metadata(f"prims.{name}", function, args, kwargs)

    meta.__doc__ = f"{meaning}\n\nMetadata and errors are torch's."
    meta.__module__ = sys._getframe(1).f_globals["__name__"]
    prim = make_prim(name, name, meta=meta, tags=tags)
    _functions[prim] = function
    return prim


def library_functions() -> dict[Symbol, Callable[..., Any]]:
    """Return every library prim with its torch function."""
    return dict(_functions)


@functools.cache
def operator_symbol(operator: OpOverload) -> Symbol | None:
    """Return the symbol of one of torch's own operators, which torch runs, for programs that torch differentiates,
    where it needs no gradient rule. None if its results are not new tensors, or if values determine their shapes."""
    schema = schema_of(operator)
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    aliases = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    if operator.namespace not in ("aten", _COLLECTIVES) or aliases or not tags.isdisjoint(operator.tags):
        return None

    def meta(*args: Any, **kwargs: Any) -> Any:
        return _metadata(str(operator), operator, args, kwargs)

    name = (
        operator_name(operator)
        if overload_name(operator) == "default"
        else f"{operator_name(operator)}_{overload_name(operator)}"
    )
    acts = not schema.returns or operator.namespace == _COLLECTIVES  # it raises for wrong values
    return Symbol(name, f"torch.ops.{operator}", meta=meta, op=operator, tags=frozenset([Tag.EFFECT] if acts else []))


_COLLECTIVES = "_c10d_functional"


def _metadata(op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a function's results on fake tensors, as proxies of the current trace.

    Raises: torch's errors; NotImplementedError if the result's shape depends on values.
    """
    without = fake_tensor_mode((args, kwargs))
    with quiet(), disable_current_modes(), DisableTorchFunction(), torch.no_grad(), without:
        args, kwargs = tree_map(_stand_in, (args, kwargs))
        try:
            result = function(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise NotImplementedError(f"{op}: its result's shape or value depends on the values of tensors") from error
        except AssertionError as error:  # functions on fake tensors assert where torch's kernels raise RuntimeError
            raise RuntimeError(str(error)) from error
    trace = current_trace()
    return tree_map(lambda leaf: trace.tensor(leaf.shape, leaf.dtype, leaf.device), _plain(result))


def symbolic_dispatch(symbolic: bool) -> AbstractContextManager[None]:
    """Make torch's Python implementations run in place of those in C++ on fake tensors with symbolic sizes.

    Those in C++ specialize sizes: each is guarded on, and the program recompiled for every size. Dynamo traces in the
    same way.
    """
    return enable_python_dispatcher() if symbolic else nullcontext()


@contextmanager
def fake_tensor_mode(tree: Any, **options: Any) -> Iterator[None]:
    """Enter a mode of fake tensors, in which the symbolic sizes and numbers of a nest keep their meaning.
    options: those of FakeTensorMode."""
    fake = FakeTensorMode(shape_env=_shape_environment(tree), **options)
    with fake, symbolic_dispatch(fake.shape_env is not None):
        yield


def _shape_environment(tree: Any) -> Any:
    """Return the ShapeEnv of the first symbolic size or number in a nest, or None."""
    sizes = (size for leaf in leaves(tree) for size in _lengths(leaf))
    return next((each.node.shape_env for each in sizes if isinstance(each, SYMBOLIC_TYPES)), None)


def _lengths(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, TensorProxy):
        return tuple(leaf.shape)
    return (leaf.value if isinstance(leaf, NumberProxy) else leaf,)


def _stand_in(leaf: Any) -> Any:
    if isinstance(leaf, TensorProxy):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaf.value if isinstance(leaf, NumberProxy) else leaf


def empty_like(leaf: Any) -> Any:
    """Return a tensor of the shape, strides, dtype and device of a proxy; other leaves of a nest unchanged."""
    if not isinstance(leaf, TensorProxy):
        return leaf
    if leaf.strides is None:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=leaf.device)


def _plain(result: Any) -> Any:
    """Return several results as a tuple: torchlang's symbols return torch's named tuples."""
    return tuple(result) if isinstance(result, (tuple, list)) else result


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's error logs for failures on fake tensors and for graph breaks of Dynamo, which the caller
    handles."""
    before = [(log, log.disabled) for log in _LOGS]
    for log in _LOGS:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in before:
            log.disabled = disabled


_LOGS = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "_dynamo.variables.tensor")]
