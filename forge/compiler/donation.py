"""Memory that a region may write its results to: that of products which nothing reads after the region.

A product writes to new memory, and so does a region that reads it: of two values of which the first one dies, both are
in a processor's cache, and both are new pages. A region that is given the memory writes where it reads. The values of a
program's inputs, constants and results, and what a backward saves, are never donated: another call may read them.

Source: torch._inductor.ir.DonatedBuffer; jax.jit's donate_argnums.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional as F

from forge.compiler.layout import Layout, Layouts
from forge.compiler.regions import Node, Region
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol
from forge.ir.strides import has_expanded_dim

# whose results have memory of their own, whatever they are given
_PRODUCTS = frozenset({F.linear, torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm})


class Donations:
    """The memory that is donated to the regions of a program, which are written in order.

    Args:
        nodes: The calls of the program.
        outputs: The names of its results.
        layouts: Those of its values, by which it is known which of them share memory.
    """

    def __init__(self, nodes: Sequence[Node], outputs: Iterable[str], layouts: Layouts) -> None:
        self._makers = {name: node for node in nodes for name in node.makes}
        self._outputs = frozenset(outputs)
        self._layouts = layouts
        self._written: set[int] = set()  # the nodes that have run when the next one does
        self._sharing: dict[str, list[str]] = defaultdict(list)
        for name in self._makers:
            self._sharing[self._memory(name)].append(name)

    def write(self, nodes: Iterable[Node]) -> None:
        """Note that nodes are written: those that follow run after them."""
        self._written.update(map(id, nodes))

    def of(self, region: Region, body: Sequence[Node], inputs: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of a region's inputs whose memory it may overwrite. body: its calls, with the views that
        it makes of its inputs."""
        if not region.fuser.overwrites or self._layouts.is_symbolic:
            return ()
        inside = {id(node) for node in body}
        given = Counter(map(self._memory, inputs))
        return tuple(
            position
            for position, name in enumerate(inputs)
            if given[self._memory(name)] == 1 and self._is_whole(name) and self._dies(self._memory(name), inside)
        )

    def _memory(self, name: str) -> str:
        """Return the value whose memory a value is."""
        return self._layouts.shown.get(name, (name, 0))[0]

    def _is_whole(self, name: str) -> bool:
        """Return whether a value is all that a product wrote on a processor, in whatever order of dims."""
        maker, value = self._makers.get(self._memory(name)), self._layouts.values[name]
        if maker is None or not isinstance(value, Layout) or not _is_product(maker):
            return False
        made = self._layouts.values[self._memory(name)]
        is_known = self._layouts.uncertain.isdisjoint({name, self._memory(name)})
        if not isinstance(made, Layout) or not is_known or not value.is_plain or value.device.type != "cpu":
            return False
        is_whole = value.dtype == made.dtype and math.prod(value.shape) == math.prod(made.shape)
        return is_whole and not has_expanded_dim(value.strides)

    def _dies(self, memory: str, inside: set[int]) -> bool:
        """Return whether nothing reads memory after the nodes inside of a region."""
        sharing = self._sharing[memory]
        if not self._outputs.isdisjoint(sharing):
            return False
        readers = {
            id(reader): reader
            for name in sharing
            for reader in self._makers[name].readers
            if name in reader.reads and not reader.view
        }
        return all(
            key in inside or (key in self._written and (reader.fuser is not None or _is_product(reader)))
            for key, reader in readers.items()
        )


def _is_product(node: Node) -> bool:
    """Return whether a call is one of torch's products."""
    return node.fuser is None and len(node.calls) == 1 and _is_torchs_product(node.calls[0])


def _is_torchs_product(call: BoundSymbol) -> bool:
    return call.symbol.executor is torchex and call.symbol.op in _PRODUCTS
