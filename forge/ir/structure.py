"""A trace's structure as a key: two traces of equal structure are one program."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from forge.ir.proxies import SYMBOLIC_TYPES, Proxy, TensorProxy
from forge.ir.symbol import BoundSymbol
from forge.ir.trace import Trace


def structure(trace: Trace) -> tuple[Any, ...]:
    """Return, as a key, inputs with their metadata, calls with their arguments and the metadata of their results,
    output, constants by identity; but neither source locations nor decompositions, which the arguments determine.
    Hashable unless the program refers to an unhashable object."""
    return (
        tuple([_with_metadata(proxy) for proxy in trace.inputs]),
        tuple([_call(bound) for bound in trace.bound_symbols]),
        key_of(trace.output),
        tuple([(name, id(value)) for name, value in trace.constants.items()]),
    )


def metadata_key(bound: BoundSymbol) -> tuple[Any, ...]:
    """Return a key of a call independent of its values' names: symbol, tags, arguments and the metadata of proxies
    among them, by position, under torch's settings. Hashable unless an argument is not."""
    places: dict[str, int] = {}

    def by_position(proxy: Proxy) -> tuple[Any, ...]:
        return (places.setdefault(proxy.name, len(places)), _with_metadata(proxy)[1:])

    inside = tuple([sub.symbol for sub in bound.subsymbols])
    arguments = [key_of(each, by_position) for each in (bound.args, bound.kwargs)]
    return (*settings(), bound.symbol, bound.tags, inside, *arguments)


def settings() -> tuple[Any, ...]:
    """Return the torch settings that, besides its arguments, determine a call's result and its kernel."""
    precision = torch.backends.cuda.matmul.fp32_precision
    return (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), precision)


def _call(bound: BoundSymbol) -> tuple[Any, ...]:
    return (
        bound.symbol,
        bound.tags,
        *[key_of(each) for each in bound.args],
        key_of(bound.kwargs) if bound.kwargs else None,
        key_of(bound.output, _with_metadata),
    )


def _with_metadata(proxy: Proxy) -> tuple[Any, ...]:
    if isinstance(proxy, TensorProxy):
        shape, strides = key_of(proxy.shape), key_of(proxy.strides)
        return (proxy.name, shape, proxy.dtype, proxy.device, proxy.requires_grad, strides)
    return (proxy.name, type(proxy))


def _by_name(proxy: Proxy) -> tuple[Any, ...]:
    return (proxy.name,)


def key_of(value: Any, proxy_key: Callable[[Proxy], object] = _by_name) -> object:
    """Return a value as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; a symbolic number is its expression."""
    kind = type(value)
    if kind is TensorProxy or isinstance(value, Proxy):
        return proxy_key(value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if isinstance(value, (tuple, list)):
        return (kind, *[key_of(item, proxy_key) for item in value])
    if isinstance(value, dict):
        return (kind, *[(key, key_of(item, proxy_key)) for key, item in value.items()])
    if kind is slice:
        return (kind, key_of(value.start, proxy_key), key_of(value.stop, proxy_key), key_of(value.step, proxy_key))
    if kind in SYMBOLIC_TYPES:
        return (kind, weakref.ref(value.node.shape_env), str(value.node.expr))  # a key in a table keeps nothing alive
    return (kind, value)
