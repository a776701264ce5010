"""The dtype and dim-order aliases of an operator: their definitions, and their uses in `arg_meta`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from forge.hub.manifest.errors import InvalidText, did_you_mean
from forge.hub.manifest.layout import ORDERS
from forge.hub.manifest.model import DimOrder, DtypeAlias, OrderAlias
from forge.hub.manifest.parse import Node
from forge.hub.manifest.schema import NAME, Reader, WrongKind, pairs, text
from forge.support.dtypes import DTYPES, find_dtype


@dataclass(frozen=True)
class Aliases:
    """The aliases that an operator's entry defines; an alias with an error is None, and was reported."""

    dtypes: Mapping[str, DtypeAlias | None] = field(default_factory=dict)
    orders: Mapping[str, OrderAlias | None] = field(default_factory=dict)

    def with_own(self, reader: Reader, node: Node) -> "Aliases":
        """Return these aliases updated with those that an entry defines."""
        dtypes = reader.read(_type_aliases, node.get("type_alias"), "type_alias") or {}
        orders = reader.read(_order_aliases, node.get("dim_order_alias"), "dim_order_alias") or {}
        for name, mark, _ in pairs(node.get("dim_order_alias"), "") if orders else ():
            if name in dtypes:
                reader.problems.add(mark, f"{name!r} is a type alias already")
        return Aliases({**self.dtypes, **dtypes}, {**self.orders, **orders})


@dataclass(frozen=True)
class AliasReader(Reader):
    """A reader of values that may use aliases."""

    aliases: Aliases = Aliases()


@dataclass(frozen=True)
class Meta:
    """The constraints of `arg_meta` on one argument."""

    dtype: DtypeAlias | None = None
    order: OrderAlias | None = None
    optional: bool = False


def _type_aliases(reader: Reader, node: Node, what: str) -> dict[str, DtypeAlias | None]:
    aliases = {}
    for name, mark, item in pairs(node, "a mapping from names to dtypes"):
        if not NAME.fullmatch(name) or find_dtype(name) is not None:
            problem = "is the name of a dtype" if NAME.fullmatch(name) else "is no name"
            reader.problems.add(mark, f"the type alias {name!r} {problem}")
        dtypes = reader.read(_dtypes, item, f"type_alias {name}")
        aliases[name] = DtypeAlias(name, dtypes) if dtypes else None
    return aliases


def _order_aliases(reader: Reader, node: Node, what: str) -> dict[str, OrderAlias | None]:
    aliases = {}
    for name, mark, item in pairs(node, "a mapping from names to dim orders"):
        if not NAME.fullmatch(name) or name in ORDERS:
            problem = "is taken" if name in ORDERS else "is no name"
            reader.problems.add(mark, f"the dim order alias {name!r} {problem}")
        orders = _orders(reader, item)
        aliases[name] = OrderAlias(name, orders) if orders else None
    return aliases


def dtype(reader: Reader, node: Node, what: str) -> torch.dtype:
    """Return the dtype of this name; a manifest in Python may hold the dtype itself."""
    if isinstance(node.value, torch.dtype):
        return node.value
    name = text(reader, node, what)
    if (dtype := find_dtype(name)) is None:
        raise InvalidText(f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}")
    return dtype


def _dtypes(reader: Reader, node: Node, what: str) -> tuple[torch.dtype, ...]:
    if not node.items:
        raise WrongKind("a list of dtypes")
    return tuple(dict.fromkeys(reader.each(dtype, node, what)))


def _orders(reader: Reader, node: Node) -> tuple[DimOrder, ...]:
    several = node.is_list and not all(type(item.value) is int for item in node.value)
    orders = [reader.read(dim_order, item, "a dim order") for item in (node.value if several else (node,))]
    return tuple(dict.fromkeys(orders)) if None not in orders else ()


def dim_order(reader: Reader, node: Node, what: str) -> DimOrder:
    """Return a dim order: 'contiguous', 'channels_last', or the dims, outermost first."""
    if isinstance(node.value, str):
        if node.value in ORDERS:
            return ORDERS[node.value]
        hint = did_you_mean(node.value, ORDERS) or f"; known: {', '.join(ORDERS)}, or a list of dims"
        raise InvalidText(f"unknown dim order {node.value!r}{hint}")
    if not (node.is_list and node.value and all(type(item.value) is int for item in node.value)):
        raise WrongKind(f"{', '.join(ORDERS)} or a list of dims such as [0, 2, 3, 1]")
    dims = tuple(node.plain())
    if sorted(dims) != list(range(len(dims))):
        raise InvalidText(f"dim order {list(dims)} is not a permutation of 0..{max(len(dims) - 1, 0)}")
    return DimOrder(dims)


def meta(reader: AliasReader, node: Node, what: str) -> Meta:
    """Return the constraints of one argument, on dtype and dim order, from `T`, `[T, C]`, `[null, C]` or `C`.

    An argument with `T?` may be None. An alias may be replaced by its definition:
    `[[float32, float16], [[0, 1, 2, 3], [0, 2, 3, 1]]]`.
    """
    if not 1 <= len(node.items) <= 2:
        raise WrongKind("a dtype, or a dtype and a dim order, such as [T, C]")
    first, *rest = node.items
    name = first.value if isinstance(first.value, str) else ""
    if not rest and (name in reader.aliases.orders or name in ORDERS):
        return Meta(order=reader.read(order_or_alias, first, what))
    dtypes = reader.read(dtype_or_alias, first, what)
    return Meta(dtypes, reader.read(order_or_alias, rest[0], what) if rest else None, name.endswith("?"))


def dtype_or_alias(reader: AliasReader, node: Node, what: str) -> DtypeAlias | None:
    """Return the dtypes denoted by `T`, `T?`, `float32` or `[float32, half]`; None for null."""
    if node.value is None:
        return None
    if (node.is_list and node.value) or isinstance(node.value, torch.dtype):
        dtypes = _dtypes(reader, node, what)
        return DtypeAlias(None, dtypes) if dtypes else None
    name = text(reader, node, what).removesuffix("?").strip()
    if name in reader.aliases.dtypes:
        return reader.aliases.dtypes[name]
    if (dtype := find_dtype(name)) is None:
        raise _undefined_alias("type", name, reader.aliases.dtypes, DTYPES)
    return DtypeAlias(None, (dtype,))


def order_or_alias(reader: AliasReader, node: Node, what: str) -> OrderAlias | None:
    """Return the dim orders denoted by `C`, `contiguous` or `[0, 1]`; None for null."""
    if node.value is None:
        return None
    if node.is_list:
        orders = _orders(reader, node)
        return OrderAlias(None, orders) if orders else None
    if not isinstance(node.value, str):
        raise WrongKind("a dtype and a dim order, such as [T, C]")
    if node.value in reader.aliases.orders:
        return reader.aliases.orders[node.value]
    if node.value not in ORDERS:
        raise _undefined_alias("dim order", node.value, reader.aliases.orders, ORDERS)
    return OrderAlias(None, (ORDERS[node.value],))


def _undefined_alias(kind: str, name: str, defined: Collection[str], builtin: Collection[str]) -> InvalidText:
    near = did_you_mean(name, (*defined, *builtin))
    return InvalidText(f"undefined {kind} alias {name!r}; defined: {', '.join(defined) or 'none'}{near}")
