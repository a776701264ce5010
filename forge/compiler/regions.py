"""Partition of a program's fusible calls into regions, one per level.

A call's level is the number of cuts (calls outside of regions: matrix products, kernels) between it and the
program's inputs. All fusible calls of one level are one region: a region reads results of earlier levels and of the
cuts of its own, never another region of its level, so that regions cannot depend on each other in a cycle. Four
walks find the levels: forward, from operands; cuts whose results only leave the program (gradients of weights) one
level later, so that they split no region; a cut without waiting users one level later, if the calls before it read
the same memory as a region of its level; backward, each fusible call as late as its users allow. Views belong to no
region: each reader makes its own.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence, Set

from forge.executors.executor import FusionExecutor, ProductExecutor
from forge.ir import BoundSymbol, NumberProxy, Tag
from forge.ir.pytree import names, proxies, tensors
from forge.prims.distributed import MESSAGE_TAGS

_LARGE = 2**16  # elements of a tensor that is worth reading only once
BARRIERS = frozenset({Tag.EFFECT})
ORDERED = frozenset({Tag.RANDOM, Tag.OPAQUE, Tag.SYNCHRONIZING})
_SENDS = frozenset({Tag.SENDS})  # kept in the program's order


class Node:
    """One call of a program to be partitioned into regions.

    `calls` are the executors' calls that run it outside of regions, `bound` is the trace's call; `fuser` takes it
    into a region (None: a cut), `view`: its results alias its arguments. `reads` and `makes` are names.
    """

    __slots__ = ("bound", "calls", "fuser", "level", "makes", "readers", "reads", "view")

    def __init__(self, bound: BoundSymbol, calls: Sequence[BoundSymbol], fuser: FusionExecutor | None) -> None:
        self.bound = bound
        self.calls = calls
        self.fuser = fuser
        self.view = False
        self.reads = list(bound.inputs)
        self.makes = list(bound.outputs)
        self.level = 0
        self.readers: list[Node] = []

    @property
    def message(self) -> bool:
        return self.has(MESSAGE_TAGS)

    @property
    def is_cut(self) -> bool:
        return self.fuser is None or isinstance(self.fuser, ProductExecutor)

    def has(self, tags: frozenset[Tag]) -> bool:
        """Return whether it is a call with one of these tags."""
        return not tags.isdisjoint(self.bound.all_tags)

    def __repr__(self) -> str:
        return f"<{self.level}: {self.bound!r}>"


class Region:
    """The calls of one level that one fusion executor takes, in the program's order: a FusedRegion, once compiled."""

    __slots__ = ("fuser", "nodes")

    def __init__(self, fuser: FusionExecutor, nodes: Iterable[Node] = ()) -> None:
        self.fuser = fuser
        self.nodes = list(nodes)


def find_regions(nodes: Sequence[Node], outputs: Iterable[str]) -> list["Node | Region"]:
    """Return the program's cuts and regions in an executable order, without views."""
    _read_lengths(nodes)
    makers = _link(nodes)
    _count_cuts(nodes, makers)
    _move_leaves(nodes)
    if any(node.message for node in nodes):
        _settle(nodes, makers)
    _delay_cuts(nodes, makers, set(outputs))
    _move_late(nodes, set(outputs))
    return _plan(nodes)


def _read_lengths(nodes: Sequence[Node]) -> None:
    """Add to a call's inputs the symbols of its tensors' sizes that earlier calls define: a region takes them as
    inputs."""
    lengths: set[str] = set()
    for node in nodes:
        if lengths:
            shapes = [x.shape for x in tensors((node.bound.args, node.bound.kwargs, node.bound.output))]
            node.reads += [name for name in dict.fromkeys(names(shapes)) if name in lengths and name not in node.reads]
        lengths.update(each.name for each in proxies(node.bound.output) if isinstance(each, NumberProxy))


def _link(nodes: Sequence[Node]) -> dict[str, Node]:
    makers: dict[str, Node] = {}
    for node in nodes:
        for maker in {id(makers[name]): makers[name] for name in node.reads if name in makers}.values():
            maker.readers.append(node)
        makers.update((name, node) for name in node.makes)
    return makers


def _count_cuts(nodes: Sequence[Node], makers: dict[str, Node]) -> None:
    barrier = ordered = highest = send = 0
    for node in nodes:
        level = max([_first_level(makers[name], node) for name in node.reads if name in makers], default=0)
        level = max(level, barrier + (node.is_cut and not node.message))
        if node.has(_SENDS):
            send = level = max(level, send)
        elif node.is_cut:
            if node.has(BARRIERS):  # no call moves across it
                barrier = level = highest + 1
            if node.has(ORDERED):
                ordered = level = max(level, ordered)
        node.level = level
        highest = max(highest, level)


def _first_level(maker: Node, node: Node) -> int:
    """Return the first level of a node that reads another's results."""
    if not maker.is_cut:
        return maker.level + (node.is_cut or maker.fuser is not node.fuser)
    return maker.level + (node.is_cut and not (maker.message or node.message))


def _move_leaves(nodes: Sequence[Node]) -> None:
    leaving: set[int] = set()
    for node in reversed(nodes):
        if node.has(BARRIERS):  # nothing before it moves
            return
        if all((reader.view or reader.message) and id(reader) in leaving for reader in node.readers):
            leaving.add(id(node))
            node.level += node.is_cut and not node.has(ORDERED) and not node.message


def _settle(nodes: Sequence[Node], makers: Mapping[str, Node]) -> None:
    """Order messages after the leaves that they send and after each other, and their readers after them."""
    send = 0
    for node in nodes:
        level = max([_first_level(makers[name], node) for name in node.reads if name in makers], default=0)
        if node.has(_SENDS):
            send = level = max(level, send)
        node.level = max(node.level, level)


def _delay_cuts(nodes: Sequence[Node], makers: Mapping[str, Node], outputs: Set[str]) -> None:
    """Delay cuts by one level if the calls that feed only them can then join a region that reads the same memory:
    the softmax that attention's backward recomputes, for a product without waiting users, beside its gradient."""
    if any(node.has(BARRIERS) for node in nodes):
        return
    at_level: dict[int, list[Node]] = {}
    for node in nodes:
        if not node.is_cut and not node.view:
            at_level.setdefault(node.level, []).append(node)
    latest = _latest_levels(nodes)
    for cut in nodes:
        if not cut.is_cut or cut.level >= latest[id(cut)]:
            continue
        feeding = _feeding(cut, makers, outputs)
        read = set().union(*map(_large, feeding))
        now, later = (
            any(node not in feeding and not read.isdisjoint(_large(node)) for node in at_level.get(level, ()))
            for level in (cut.level - 1, cut.level)
        )
        if later and not now:
            _delay(cut, cut.level + 1)


def _latest_levels(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the last level of each node, by its id, that does not add a level."""
    last = max((node.level for node in nodes), default=0)
    latest: dict[int, int] = {}
    for node in reversed(nodes):
        if node.has(ORDERED | MESSAGE_TAGS) or not node.readers:
            latest[id(node)] = node.level if node.has(ORDERED | MESSAGE_TAGS) else last
        else:
            latest[id(node)] = min(
                latest[id(reader)] - (_first_level(node, reader) - node.level) for reader in node.readers
            )
    return latest


def _delay(node: Node, level: int) -> None:
    """Move a node to a later level, and its users with it."""
    waiting = [(node, level)]
    while waiting:
        node, level = waiting.pop()
        if node.level < level:
            node.level = level
            waiting += [(reader, _first_level(node, reader)) for reader in node.readers]


def _feeding(cut: Node, makers: Mapping[str, Node], outputs: Set[str]) -> list[Node]:
    """Return the fusible calls before a cut, through views too, that could be at its level: their users are the cut,
    each other, and fusible calls of that level or later."""
    result: dict[int, Node] = {}
    inside = {id(cut)}
    waiting = [cut]
    while waiting:
        for name in waiting.pop().reads:
            node = makers.get(name)
            if node is None or node.is_cut or id(node) in inside or not outputs.isdisjoint(node.makes):
                continue
            if all(id(reader) in inside or _is_at(reader, cut.level) for reader in node.readers):
                inside.add(id(node))
                waiting.append(node)
                if not node.view:
                    result[id(node)] = node
    return list(result.values())


def _is_at(node: Node, level: int) -> bool:
    """Return whether all users of a fusible call or a view are at a level or later."""
    if node.view:
        return all(_is_at(reader, level) for reader in node.readers)
    return not node.is_cut and node.level >= level


def _large(node: Node) -> list[str]:
    """Return the names of the large tensors that a call reads."""
    operands = tensors((node.bound.args, node.bound.kwargs))
    return [x.name for x in operands if isinstance(x.numel(), int) and x.numel() >= _LARGE]


def _move_late(nodes: Sequence[Node], outputs: set[str]) -> None:
    latest = sys.maxsize
    for node in reversed(nodes):
        if node.has(BARRIERS):
            latest = node.level - 1
        elif not node.is_cut and node.readers and outputs.isdisjoint(node.makes) and not _is_sent(node):
            target = min(_before(node, reader) for reader in node.readers)
            node.level = max(node.level, min(target, latest))


def _is_sent(node: Node) -> bool:
    """Return whether a message waits for a node's results."""
    return any(reader.message or (reader.view and _is_sent(reader)) for reader in node.readers)


def _before(node: Node, reader: Node) -> int:
    """Return the last level at which a node can feed another."""
    if reader.is_cut:
        return reader.level - 1
    return reader.level - (reader.fuser is not node.fuser)


def _plan(nodes: Sequence[Node]) -> list["Node | Region"]:
    cuts: dict[int, list[Node | Region]] = {}
    regions: dict[int, dict[int, Region]] = {}
    for node in nodes:
        if node.is_cut:
            cuts.setdefault(node.level, []).append(node if node.fuser is None else Region(node.fuser, [node]))
        elif node.fuser is not None and not node.view:
            at_level = regions.setdefault(node.level, {})
            at_level.setdefault(id(node.fuser), Region(node.fuser)).nodes.append(node)
    plan: list[Node | Region] = []
    for level in range(max((node.level for node in nodes), default=0) + 1):
        plan += cuts.get(level, ())
        plan += regions.get(level, {}).values()
    return plan
