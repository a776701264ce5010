"""Dtype and dim-order aliases of an operator: their definitions, and what `arg_meta` makes of them."""

from dataclasses import dataclass, field

import torch

from forge.hub.manifest.errors import did_you_mean
from forge.hub.manifest.fields import NAME, Reader
from forge.hub.manifest.layout import ORDERS
from forge.hub.manifest.model import DimOrder, DtypeAlias, OrderAlias
from forge.hub.manifest.parse import ListNode, Node, ScalarNode
from forge.support.dtypes import DTYPES, find_dtype


@dataclass
class Aliases:
    """The aliases that an operator's entry defines; an alias that was wrong is None, and was reported."""

    dtypes: dict[str, DtypeAlias | None] = field(default_factory=dict)
    orders: dict[str, OrderAlias | None] = field(default_factory=dict)

    def with_own(self, own: "Aliases") -> "Aliases":
        """These, and those of one kernel, which go before."""
        return Aliases({**self.dtypes, **own.dtypes}, {**self.orders, **own.orders})


@dataclass(frozen=True)
class Meta:
    """What `arg_meta` says of one argument."""

    dtype: DtypeAlias | None = None
    order: OrderAlias | None = None
    optional: bool = False


def read_aliases(reader: Reader, types: Node | None, orders: Node | None) -> Aliases:
    """`type_alias` and `dim_order_alias`."""
    found = Aliases()
    for name, mark, node in reader.pairs(types, "type_alias", "a mapping from names to dtypes"):
        if not NAME.fullmatch(name):
            reader.problems.add(mark, f"the type alias {name!r} is no name")
        elif find_dtype(name) is not None:
            reader.problems.add(mark, f"the type alias {name!r} is the name of a dtype")
        found.dtypes[name] = _dtype_alias(reader, name, node)
    for name, mark, node in reader.pairs(orders, "dim_order_alias", "a mapping from names to dim orders"):
        if not NAME.fullmatch(name) or name in ORDERS:
            reader.problems.add(mark, f"the dim order alias {name!r} {'is taken' if name in ORDERS else 'is no name'}")
        elif name in found.dtypes:
            reader.problems.add(mark, f"{name!r} is a type alias already")
        found.orders[name] = _order_alias(reader, name, node)
    return found


def _dtype_alias(reader: Reader, name: str, node: Node) -> DtypeAlias | None:
    dtypes = [read_dtype(reader, item, f"type_alias {name}") for item in reader.one_or_more(node)]
    if not dtypes:
        reader.no(node, f"type_alias {name}", "a list of dtypes")
    return DtypeAlias(name, tuple(dict.fromkeys(dtypes))) if dtypes and None not in dtypes else None


def read_dtype(reader: Reader, node: Node, what: str) -> torch.dtype | None:
    """A dtype by one of its names."""
    if isinstance(node, ScalarNode) and isinstance(node.value, torch.dtype):  # given in Python
        return node.value
    name = reader.text(node, what)
    dtype = None if name is None else find_dtype(name)
    if name is not None and dtype is None:
        reader.problems.add(node.mark, unknown_dtype(name))
    return dtype


def unknown_dtype(name: str) -> str:
    """'unknown dtype 'Flot'; did you mean 'Float'?'"""
    return f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}"


def _order_alias(reader: Reader, name: str, node: Node) -> OrderAlias | None:
    several = isinstance(node, ListNode) and any(not _is_integer(item) for item in node.items)
    items = node.items if several and isinstance(node, ListNode) else (node,)
    orders = [read_order(reader, item) for item in items]
    return OrderAlias(name, tuple(dict.fromkeys(orders))) if None not in orders else None


def _is_integer(node: Node) -> bool:
    return isinstance(node, ScalarNode) and type(node.value) is int


def read_order(reader: Reader, node: Node) -> DimOrder | None:
    """A dim order: 'contiguous', 'channels_last', or the dims, outermost first."""
    if isinstance(node, ListNode) and node.items and all(map(_is_integer, node.items)):
        dims = tuple(item.value for item in node.items)
        if sorted(dims) == list(range(len(dims))):
            return DimOrder(dims)
        last = max(len(dims) - 1, 0)
        reader.problems.add(node.mark, f"dim order {list(dims)} is not a permutation of 0..{last}")
    elif isinstance(node, ScalarNode) and isinstance(node.value, str):
        if node.value in ORDERS:
            return ORDERS[node.value]
        hint = did_you_mean(node.value, ORDERS) or f"; known: {', '.join(ORDERS)}, or a list of dims"
        reader.problems.add(node.mark, f"unknown dim order {node.value!r}{hint}")
    else:
        reader.no(node, "a dim order", f"{', '.join(ORDERS)} or a list of dims such as [0, 2, 3, 1]")
    return None


def read_meta(reader: Reader, name: str, node: Node, aliases: Aliases) -> Meta:
    """`T`, `[T, C]`, `[null, C]`, `C`: the dtype and the dim order of one argument; `T?` may be None. In the
    place of an alias may stand what it would be defined as: `[[float32, float16], [[0, 1, 2, 3], [0, 2, 3, 1]]]`."""
    what = f"arg_meta of {name}"
    items = reader.one_or_more(node)
    if not 1 <= len(items) <= 2:
        reader.no(node, what, "a dtype, or a dtype and a dim order, such as [T, C]")
        return Meta()
    if len(items) == 1:
        return _single(reader, what, items[0], aliases)
    dtype, optional = read_dtype_or_alias(reader, what, items[0], aliases)
    return Meta(dtype, _order(reader, what, items[1], aliases), optional)


def _single(reader: Reader, what: str, node: Node, aliases: Aliases) -> Meta:
    name = node.value if isinstance(node, ScalarNode) else None
    if isinstance(name, str) and (name in aliases.orders or name in ORDERS):
        return Meta(order=_order(reader, what, node, aliases))
    dtype, optional = read_dtype_or_alias(reader, what, node, aliases)
    return Meta(dtype, None, optional)


def read_dtype_or_alias(reader: Reader, what: str, node: Node, aliases: Aliases) -> tuple[DtypeAlias | None, bool]:
    """`T`, `T?`, `float32`: the dtypes that are meant, and whether None is allowed."""
    if isinstance(node, ScalarNode) and node.value is None:
        return None, False
    if isinstance(node, ScalarNode) and isinstance(node.value, torch.dtype):
        return DtypeAlias(None, (node.value,)), False
    if isinstance(node, ListNode) and node.items:
        dtypes = [read_dtype(reader, item, what) for item in node.items]
        return (None if None in dtypes else DtypeAlias(None, tuple(dict.fromkeys(dtypes)))), False
    text = reader.text(node, what)
    if text is None:
        return None, False
    name = text.removesuffix("?").strip()
    if name in aliases.dtypes:
        return aliases.dtypes[name], text.endswith("?")
    dtype = find_dtype(name)
    if dtype is None:
        _undefined(reader, node, "type", name, tuple(aliases.dtypes), tuple(DTYPES))
        return None, False
    return DtypeAlias(None, (dtype,)), text.endswith("?")


def _order(reader: Reader, what: str, node: Node, aliases: Aliases) -> OrderAlias | None:
    if isinstance(node, ScalarNode) and node.value is None:
        return None
    if isinstance(node, ListNode):
        alias = _order_alias(reader, what, node)
        return alias and OrderAlias(None, alias.orders)
    name = node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else None
    if name in aliases.orders:
        return aliases.orders[name]
    if name in ORDERS:
        return OrderAlias(None, (ORDERS[name],))
    if name is None:
        reader.no(node, what, "a dtype and a dim order, such as [T, C]")
    else:
        _undefined(reader, node, "dim order", name, tuple(aliases.orders), tuple(ORDERS))
    return None


def _undefined(reader: Reader, node: Node, kind: str, name: str, defined: tuple, builtin: tuple) -> None:
    near = did_you_mean(name, (*defined, *builtin))
    reader.problems.add(node.mark, f"undefined {kind} alias {name!r}; defined: {', '.join(defined) or 'none'}{near}")
