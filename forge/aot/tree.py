"""Nests of arguments and results as plain data, for processes that lack the classes of a model's library.

A nest is "*" for a leaf, or a list that begins with its kind: ["tuple", ...], ["list", ...], ["dict", keys, ...] and
["object", class, keys, ...], whose keys are None where its parts have no names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forge.aot.errors import ExportError
from forge.torch_internals.pytree import register_mapping, torch_pytree

LEAF = "*"
Tree = Any  # LEAF, or a list of a kind and its parts


class Record(dict[Any, Any]):
    """A dict whose keys are attributes, too: the result of a model that returns an object of its library's class."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


register_mapping(Record)


def describe(spec: Any) -> Tree:
    """Return torch's TreeSpec as plain data."""
    if spec.is_leaf():
        return LEAF
    parts = [describe(each) for each in spec.children()]
    if spec.type in (tuple, list):
        return [spec.type.__name__, *parts]
    keys = list(spec.context) if _are_names(spec.context, parts) else None
    if spec.type is dict and keys is not None:
        return ["dict", keys, *parts]
    own = spec.context if hasattr(spec.context, "_fields") else spec.type  # torch has a named tuple's class there
    fields = getattr(own, "_fields", None)
    return ["object", f"{own.__module__}.{own.__qualname__}", keys or (fields and list(fields)), *parts]


def _are_names(context: Any, parts: Sequence[Any]) -> bool:
    return isinstance(context, (list, tuple)) and len(context) == len(parts) and all(type(k) is str for k in context)


def paths(tree: Tree, start: str) -> Iterator[tuple[str, int | None]]:
    """Return Python expressions of the nest that `start` names: (leaf, None), and (inner nest, number of its parts)."""
    if tree == LEAF:
        yield start, None
        return
    _, keys, parts = _parts(tree)
    yield start, len(parts)
    for key, part in zip(keys or range(len(parts)), parts, strict=True):
        yield from paths(part, f"{start}[{key!r}]")


def has_objects(tree: Tree) -> bool:
    """Return whether a part of a nest is an object of a library's class."""
    return tree != LEAF and (tree[0] == "object" or any(map(has_objects, _parts(tree)[2])))


def _parts(tree: Tree) -> tuple[str, Sequence[Any] | None, Sequence[Tree]]:
    if tree[0] == "object":
        return tree[1], tree[2], tree[3:]
    return (tree[0], tree[1], tree[2:]) if tree[0] == "dict" else (tree[0], None, tree[1:])


def flatten(tree: Tree, value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return the leaves of a value, each with its name. Raises ExportError where the value is another nest."""
    if tree == LEAF:
        yield name, value
        return
    kind, keys, parts = _parts(tree)
    if kind == "dict" and isinstance(value, Mapping):
        if set(value) != set(keys or ()):
            raise ExportError(f"{name} has the keys {sorted(map(str, value))}, but must have {list(keys or ())}")
        values = [value[key] for key in keys or ()]
    elif kind in ("tuple", "list"):
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise ExportError(f"{name} is {_in_words(value)}, but must be a {kind} of {len(parts)}")
        values, keys = list(value), range(len(parts))
    else:
        values = _children(value, kind, keys, len(parts), name)
        keys = keys or range(len(parts))
    for key, part, each in zip(keys or (), parts, values, strict=True):
        yield from flatten(part, each, f"{name}[{key!r}]")


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Return a nest of these leaves, with dicts and tuples in the place of objects."""
    if tree == LEAF:
        return next(leaves)
    kind, keys, parts = _parts(tree)
    values = [unflatten(part, leaves) for part in parts]
    if keys is not None:
        return dict(zip(keys, values, strict=True))
    return values if kind == "list" else tuple(values)


def _children(value: Any, kind: str, keys: Sequence[Any] | None, count: int, name: str) -> list[Any]:
    """Return the parts of an object of a library's class, or of a dict or a list in its place."""
    if isinstance(value, Mapping) and keys and set(value) == set(keys):
        return [value[key] for key in keys]
    own = type(value)
    if isinstance(value, (tuple, list)) and len(value) == count:
        return list(value)
    node = torch_pytree.SUPPORTED_NODES.get(own)
    if node is not None and f"{own.__module__}.{own.__qualname__}" == kind:
        children = list(node.flatten_fn(value)[0])
        if len(children) == count:
            return children
    raise ExportError(f"{name} is {_in_words(value)}, but must be a {kind}, or a list of its {count} parts")


def _in_words(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"a {type(value).__name__}{size}"


def build_text(tree: Tree, leaf: Callable[[], str]) -> str:
    """Return the Python expression of a nest, whose leaves are expressions in order; `Record` makes objects."""
    if tree == LEAF:
        return leaf()
    kind, keys, parts = _parts(tree)
    built = [build_text(part, leaf) for part in parts]
    if kind == "list":
        return f"[{', '.join(built)}]"
    if keys is None:
        return f"({''.join(f'{each}, ' for each in built)})"
    items = ", ".join(f"{key!r}: {each}" for key, each in zip(keys, built, strict=True))
    return f"{{{items}}}" if kind == "dict" else f"Record({{{items}}})"
