"""Nested arguments: tuples, lists, dicts and slices of proxies and literals."""

from collections.abc import Callable, Iterator
from typing import Any

from forge.ir.proxies import SYMBOLIC_TYPES, Proxy, TensorProxy

_ATOMS = frozenset({int, float, bool, str, type(None), complex})


def leaves(tree: Any) -> Iterator[Any]:
    """Return every leaf of a pytree of tuples, lists, dicts and slices, in order."""
    kind = type(tree)
    if kind in _ATOMS:
        yield tree
    elif kind is tuple or kind is list or isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif kind is dict or isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    elif kind is slice:
        yield from leaves((tree.start, tree.stop, tree.step))
    else:
        yield tree


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same pytree with `function` applied to every leaf that is not a plain literal."""
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple:
        return tuple([tree_map(function, item) for item in tree])
    if kind is list:
        return [tree_map(function, item) for item in tree]
    if kind is dict or isinstance(tree, dict):
        return {key: tree_map(function, item) for key, item in tree.items()}
    if kind is slice:
        return slice(*[tree_map(function, item) for item in (tree.start, tree.stop, tree.step)])
    if isinstance(tree, list):  # a torch.fx immutable_list
        return [tree_map(function, item) for item in tree]
    if isinstance(tree, tuple):  # a torch.Size or a named tuple
        items = [tree_map(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return function(tree)


def proxies(tree: Any) -> list[Proxy]:
    """Return the proxies of a pytree, in order, with repetitions."""
    result: list[Proxy] = []
    _collect(tree, result)
    return result


def _collect(tree: Any, result: list[Any]) -> None:
    kind = type(tree)
    if kind in _ATOMS:
        return
    if kind is TensorProxy or isinstance(tree, Proxy):
        result.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, result)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, result)
    elif kind is slice:
        _collect((tree.start, tree.stop, tree.step), result)


def rename(tree: Any, env: dict[str, Any]) -> Any:
    """Return the same pytree with every proxy whose name is in `env` replaced by its value there."""
    return tree_map(lambda leaf: env.get(leaf.name, leaf) if isinstance(leaf, Proxy) else leaf, tree)


def tensors(tree: Any) -> list[TensorProxy]:
    """Return the tensor proxies of a pytree, in order, with repetitions."""
    return [proxy for proxy in proxies(tree) if isinstance(proxy, TensorProxy)]


def names(tree: Any) -> list[str]:
    """Return the names that a pytree depends on: its proxies' and the free symbols of its symbolic numbers."""
    result: list[str] = []
    _collect_names(tree, result)
    return result


def _collect_names(tree: Any, result: list[str]) -> None:
    kind = type(tree)
    if kind is TensorProxy:
        result.append(tree.name)
    elif kind in _ATOMS:
        return
    elif kind is tuple or kind is list or isinstance(tree, (tuple, list)):
        for item in tree:
            _collect_names(item, result)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect_names(item, result)
    elif kind is slice:
        _collect_names((tree.start, tree.stop, tree.step), result)
    elif isinstance(tree, Proxy):
        result.append(tree.name)
    elif isinstance(tree, SYMBOLIC_TYPES):
        result.extend(free_symbols(tree))


def free_symbols(number: Any) -> list[str]:
    """Return the names of the symbols in a symbolic number's expression."""
    return sorted(str(symbol) for symbol in number.node.expr.free_symbols)
