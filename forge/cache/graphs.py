"""A captured graph in words, the same in every process that captures the same: nodes in order, targets by qualified
name, nested graphs inline, and the metadata of every value, with its aliasing."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from forge import torchlang
from forge.cache.guards import count, known_of
from forge.capture.autograd_functions import is_once_differentiable
from forge.capture.inputs import gains_history, weight_of
from forge.capture.layers import SITE, Site
from forge.executors.fingerprint import fingerprint_of, name_in_torch
from forge.ir.grad_rules import grad_rule
from forge.ir.printing import property_name, qualified_name
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.source import Source
from forge.torch_internals.dispatch import HigherOrderOperator
from forge.torch_internals.tensors import storage_address

_NUMBERS = (bool, int, float, complex, range)
_PLAIN = (*_NUMBERS, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Uncacheable(Exception):
    """A program that cannot be cached for other processes, with the reason in words."""


class GraphKey:
    """A graph as words, from which its cache key is computed.

    lines: sources of the nodes' calls, by number. graph_constants: tensors in the graph itself, by number.
    devices: those of all tensors. symbols: its symbolic inputs. guards: the number of guards on these.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.words: list[str] = []
        self.lines: dict[Source, int] = {}
        self.graph_constants: dict[int, torch.Tensor] = {}
        self.devices: set[torch.device] = set()
        self.symbols: list[torch.SymInt] = []
        self._names: dict[int, tuple[str, Any]] = {}
        self._memory: dict[int, int] = {}
        self._storages: list[Any] = []
        self._graph(graph)
        self.words += known_of(self.symbols)
        self.guards = count(self.symbols)

    def line_of(self, source: Source | None) -> int | None:
        """Return the number of a line of the user's program."""
        return None if source is None else self.lines.get(source)

    def constant_number(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor among the graph's constants."""
        return list(self.graph_constants).index(id(tensor))

    def _graph(self, graph: GraphModule) -> None:
        self.words.append("graph")
        for node in graph.graph.nodes:
            line = self.lines.setdefault(Source.of(node), len(self.lines))  # a cached program refers to lines by number
            self._node(node, graph, line)
        self.words.append("end")

    def _node(self, node: Node, graph: GraphModule, line: int) -> None:
        target = node.target
        if node.op == "get_attr":
            target = self._attribute(operator.attrgetter(str(node.target))(graph))
        elif not isinstance(target, str):
            target = self._function(target)
        if node.op == "placeholder" and isinstance(node.meta.get("example_value"), SYMBOLIC_TYPES):
            self._symbol(node.meta["example_value"])
        example = self._example(node.meta.get("example_value"))
        arguments = f"{self._value(node.args)} {self._value(node.kwargs)}"
        self.words.append(f"{node.op} {node.name} {target} {arguments} {example} line {line}")
        weight = weight_of(node)
        if weight is not None:
            self.words.append(f"weight {weight.versioned}")
        if gains_history(node):
            self.words.append("gains history")
        if SITE in node.meta:
            self._site(node.meta[SITE])

    def _site(self, site: Site) -> None:
        """Describe a module's call, and its layer."""
        if site.how == "one call":
            raise Uncacheable(f"layer {site.layer} is one call, which is of one process")
        fingerprint = site.override.fingerprint()
        if not fingerprint.is_lasting:
            raise Uncacheable(f"layer {site.layer} is known to this process only")
        self.words.append(f"layer {site.how} {site.take is not None} {fingerprint.digest}")

    def _symbol(self, value: Any) -> None:
        """Describe an input that is a symbolic number."""
        if not isinstance(value, torch.SymInt) or not value.node.expr.is_symbol:
            raise Uncacheable("one of its inputs is a symbolic number other than a length")
        self.symbols.append(value)

    def _number(self, value: Any) -> str:
        """Return a symbolic number as an expression of inputs."""
        expression = value.node.expr
        if not expression.free_symbols <= {symbol.node.expr for symbol in self.symbols}:
            raise Uncacheable("a length of it depends on values")
        return str(expression)

    def _attribute(self, value: Any) -> str:
        if isinstance(value, GraphModule):
            self._graph(value)
            return f"graph once={is_once_differentiable(value)}"  # of an autograd.Function's backward
        if isinstance(value, torch.Tensor):
            self.graph_constants.setdefault(id(value), value)
            return f"held {self.constant_number(value)} {self._tensor(value)}"
        return self._value(value)

    # functions

    def _function(self, function: Callable) -> str:
        entry = self._names.get(id(function))
        if entry is None:
            entry = self._names[id(function)] = self._function_name(function), function
        return entry[0]

    def _function_name(self, function: Any) -> str:
        if isinstance(function, HigherOrderOperator):
            return f"higher order {function.name()}"
        if property_name(function) is not None:
            return f"property {property_name(function)}"
        name = name_in_torch(function)
        symbol = torchlang.find(function)
        meaning = [] if symbol is None else [symbol.body, symbol.meta, grad_rule(symbol)]
        foreign = [each for each in meaning if each is not None and not _is_forges(each)]
        if name is not None and not foreign:
            return name
        fingerprint = fingerprint_of(function, *foreign)
        if not fingerprint.is_lasting:
            raise Uncacheable(f"{torchlang.function_name(function)} is known to this process only")
        return f"{name or qualified_name(function)} {fingerprint.digest}"

    # values

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return f"%{value.name}"
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            return f"{kind.__name__}({','.join(map(self._value, value))})"
        if kind is torch.fx.immutable_collections.immutable_list:
            return f"list({','.join(map(self._value, value))})"
        if isinstance(value, dict):
            return f"dict({','.join(f'{key!r}:{self._value(each)}' for key, each in value.items())})"
        if kind is slice:
            return f"slice({','.join(map(self._value, (value.start, value.stop, value.step)))})"
        if isinstance(value, SYMBOLIC_TYPES):
            return self._number(value)
        if isinstance(value, _PLAIN):
            return f"{kind.__module__}.{kind.__qualname__} {value!r}"
        if callable(value) and not isinstance(value, torch.nn.Module):
            return f"function {self._function(value)}"
        raise Uncacheable(f"the graph holds a {kind.__qualname__}")

    def _example(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, SYMBOLIC_TYPES):
            return self._number(value)
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(self._example, value))})"
        return type(value).__name__ if value is not None else ""

    def _tensor(self, value: torch.Tensor) -> str:
        shape, strides = tuple(value.shape), value.stride() if value.layout == torch.strided else ()
        for size in (*shape, *strides):
            if isinstance(size, SYMBOLIC_TYPES):
                self._number(size)
        self.devices.add(value.device)
        if value.layout != torch.strided:
            return f"{value.layout} {shape}"
        kind = f"{type(value).__name__} {value.dtype} {value.device} {shape} {strides}"
        history = f"{value.requires_grad} {value.is_leaf} {value.is_inference()} {value.is_conj()} {value.is_neg()}"
        return f"{kind} {history} {value.storage_offset()} {self._memory_of(value)}"

    def _memory_of(self, value: torch.Tensor) -> int:
        try:
            storage = value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper's, which has none
            return -1
        self._storages.append(storage)  # an address identifies a storage only during its lifetime
        return self._memory.setdefault(storage_address(storage), len(self._memory))


def _is_forges(function: Callable) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "forge"
