"""Programs on DTensors become programs on their local tensors.

Dynamo's graph has the placement of each value. It is rewritten before it is recorded: DTensor.from_local and
to_local vanish, redistribute is `forge.redistribute`, whose collectives are calls of the program, and a torch function
of DTensors is that function of the local tensors, if both run the same operators. If they do not, the call becomes
the operators and collectives that DTensors run for it and for its gradient (forge/capture/operator_graphs.py), or, if
these depend on data, an opaque call. At the program's boundary inputs are unwrapped and results wrapped by
torch's own differentiable functions, outside of the autograd.Function.

Gradients follow one rule: a value's gradient has the value's placement, a partial value's is replicated. A function
that computes a shard from a replicated value gives each rank a part of that value's gradient: `forge.spread` sums
them.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from forge import torchlang
from forge.capture.dtensor_placements import DTensor, OfDTensors, Spec, example_of, place_of, spec_of
from forge.capture.dtensor_trials import FakeCall
from forge.capture.higher_order import writes
from forge.capture.operator_graphs import operator_graphs, run_graphs
from forge.compiler.program import Unsupported
from forge.ir.source import Source
from forge.torch_internals.autograd import enter_autocast, exit_autocast, set_grad_enabled
from forge.torch_internals.distributed import draws_by_part, is_masked, local_tensor, waited
from forge.torch_internals.fake_tensors import FakeScriptObject
from forge.torch_internals.pytree import torch_pytree
from forge.torch_internals.tensors import storage_id
from forge.torchlang import autocast_mode, grad_mode
from forge.torchlang.partial_draws import begin_partial_draw, end_partial_draw
from forge.torchlang.sharding import of_gradient, redistribute, spread


class LocalGraph(NamedTuple):
    """A graph on local tensors. wrap(call): turns a call on local tensors into one on DTensors."""

    graph: GraphModule
    wrap: Callable[[Callable], Callable]


def to_local_graph(graph: GraphModule) -> LocalGraph | None:
    """Return the graph on local tensors, None if it has no DTensors. Raises Unsupported for DTensor operations that
    local tensors cannot express."""
    if not any(map(_has_dtensor, graph.graph.nodes)):
        return None
    with autocast_mode.preserve(), grad_mode.preserve():
        writer = _Writer(graph)
        local = writer.write()
        writer.add_lengths()
        return LocalGraph(local, writer.wrap)


def _has_dtensor(node: Node) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in torch_pytree.tree_leaves(node.meta.get("example_value")))


class _Writer:
    def __init__(self, graph: GraphModule) -> None:
        self.old = graph
        self.new = Graph()
        self.env: dict[Node, Any] = {}
        self.locals: dict[int, tuple[Any, Any]] = {}  # DTensors and their local tensors, by the ids of the former
        self.scopes: dict[Node, Any] = {}  # of torch.autocast
        self.changed: set[int] = set()  # inputs
        self.inputs: list[Spec | None] = []  # the placement of each input, None if it is not a DTensor
        self.left_out: list[int] = []  # inputs that are not tensors
        self.lengths: list[tuple[int, int]] = []  # inputs and dims of local tensors, whose sizes are further inputs
        self.outputs: dict[int, Spec] = {}
        self.node = next(iter(graph.graph.nodes))  # the node being rewritten

    def write(self) -> GraphModule:
        for node in self.old.graph.nodes:
            self.node = node
            try:
                self.env[node] = self.write_node(node)
            except Unsupported as reason:
                reason.at(Source.of(node))
                raise
        return GraphModule(self.old, self.new)

    def write_node(self, node: Node) -> Any:
        examples = [value for each in node.all_input_nodes for value in torch_pytree.tree_leaves(example_of(each))]
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "output":
            return self.output(node)
        name = _name(node)
        self.follow_modes(node)
        if name in ("from_local", "prim_from_local", "prim from_local"):  # the last before torch 2.13
            return self.from_local(node)
        if not any(isinstance(value, DTensor) for value in examples) and not _has_dtensor(node):
            return self.copy(node)
        if name == "tag_activation_checkpoint":
            return self.checkpoint(node)
        if any(isinstance(value, FakeScriptObject) for value in examples) or node.op not in _CALLS:
            raise Unsupported(f"{name} is called with a DTensor")
        if name in ("to_local", "prim_to_local"):
            return self.to_local(node)
        if name in ("redistribute", "prim_redistribute"):
            return self.redistribute(node)
        return self.call(node, name)

    # the boundary

    def placeholder(self, node: Node) -> Any:
        value = example_of(node)
        if isinstance(value, FakeScriptObject):  # a mesh, which Dynamo guards
            self.left_out.append(len(self.inputs))
            self.inputs.append(None)
            return None
        self.inputs.append(spec_of(value) if isinstance(value, DTensor) else None)
        return self.copy(node, self.inside(value))

    def add_lengths(self) -> None:
        """Add inputs for the symbols in local tensors' sizes: before torch 2.13, Dynamo passes only the global ones."""
        placeholders = self.old.graph.find_nodes(op="placeholder")
        inputs = [self.env[node] for i, node in enumerate(placeholders) if i not in self.left_out]
        symbols = {example_of(node).node.expr for node in inputs if isinstance(example_of(node), torch.SymInt)}
        for i, spec in enumerate(self.inputs):
            shape = () if spec is None else example_of(self.env[placeholders[i]]).shape
            for dim, length in enumerate(shape):
                if isinstance(length, torch.SymInt) and length.node.expr.is_symbol and length.node.expr not in symbols:
                    symbols.add(length.node.expr)
                    self.lengths.append((i, dim))
                    with self.new.inserting_after(inputs[-1]):
                        inputs.append(self.new.placeholder(f"length_{length.node.expr}"))
                    inputs[-1].meta["example_value"] = length

    def output(self, node: Node) -> Any:
        results: Any = node.args[0]
        for i, each in enumerate(results):
            if isinstance(each, Node) and isinstance(example_of(each), DTensor):
                self.outputs[i] = spec_of(example_of(each))
        return self.copy(node)

    def wrap(self, call: Callable) -> Callable:
        """Return a call on DTensors that runs `call` on their local tensors."""
        specs = [(i, spec) for i, spec in enumerate(self.inputs) if spec is not None]
        positions = [i for i in range(len(self.inputs)) if i not in self.left_out]
        outputs, changed = list(self.outputs.items()), sorted(self.changed)
        lengths = self.lengths  # not the writer, which keeps both graphs

        def of_dtensors(*inputs: Any) -> Any:
            local = list(inputs)
            for i, spec in specs:
                local[i] = waited(inputs[i].to_local(grad_placements=spec.of_gradient))
            results = call(*[local[i] for i in positions], *[local[i].shape[dim] for i, dim in lengths])
            for i in changed:
                torch.autograd.graph.increment_version(inputs[i])
            if not outputs:
                return results
            results = list(results)
            for i, spec in outputs:
                results[i] = spec.wrap(results[i])
            return tuple(results)

        return of_dtensors

    # calls

    def follow_modes(self, node: Node) -> None:
        """Enter the grad and autocast modes in which the nodes after this one run."""
        args: tuple[Any, ...] = node.args
        if node.target is set_grad_enabled:
            set_grad_enabled(*args)
        elif node.target is enter_autocast:
            self.scopes[node] = torch.autocast(*args)
            self.scopes[node].__enter__()
        elif node.target is exit_autocast:
            self.scopes.pop(*args).__exit__(None, None, None)

    def copy(self, node: Node, example: Any = None) -> Node:
        """Return the node on local tensors."""
        if node.op == "get_attr" and isinstance(getattr(self.old, str(node.target), None), DTensor):
            raise Unsupported("the graph holds a DTensor")
        copied = self.new.node_copy(node, self.local)
        if example is not None:
            copied.meta = {**node.meta, "example_value": example}
        return copied

    def local(self, node: Node) -> Any:
        return self.env[node]

    def inside(self, value: Any) -> Any:
        """Return the fake local tensor of a fake DTensor, always the same; another value as it is."""
        if not isinstance(value, DTensor):
            return value
        if id(value) not in self.locals:
            inner = local_tensor(value)
            local = inner.detach()
            gradient = value.requires_grad and not inner.is_inference()
            self.locals[id(value)] = value, local.requires_grad_() if gradient else local
        return self.locals[id(value)][1]

    def all_inside(self, tree: Any) -> Any:
        return torch_pytree.tree_map(self.inside, tree)

    def checkpoint(self, node: Node) -> Node:
        """Return a checkpoint whose body is a graph on local tensors."""
        body: Any = node.args[0]
        inner = _Writer(getattr(self.old, body.target))
        graph = inner.write()
        if inner.outputs or inner.changed:
            raise Unsupported("a checkpoint returns or changes a DTensor")
        name = f"{body.target}_on_local_tensors"
        self.old.add_module(name, graph)
        inputs = [each for i, each in enumerate(node.args[1:]) if i not in inner.left_out]
        args = (self.new.get_attr(name), *[self.local(x) if isinstance(x, Node) else x for x in inputs])
        copied = self.new.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        copied.meta = dict(node.meta)
        return copied

    def insert(self, target: Callable, *args: Any) -> Node:
        """Return a call of a function of local tensors, the first argument among them."""
        values = [example_of(each) if isinstance(each, Node) else each for each in args]
        with values[0].fake_mode, torch.no_grad():
            result = target(*values)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            result.requires_grad_()
        node = self.new.call_function(target, args)
        node.meta = {**self.node.meta, "example_value": result}
        return node

    def spread(self, x: Node, spec: Spec, dims: Sequence[int]) -> Node:
        """Return x, with its gradients summed along these dims of the mesh."""
        for dim in dims:
            x = self.insert(spread, x, *spec.group(dim))
        return x

    def from_local(self, node: Node) -> Any:
        value: Any = node.args[0]
        parameters = ("device_mesh", "placements", "shape", "stride", "run_check")
        others = [name for name, option in node.kwargs.items() if name not in parameters and option is not None]
        if others or node.kwargs.get("run_check") or not isinstance(value, Node):
            raise Unsupported(f"DTensor.from_local is called with {', '.join(node.kwargs)}")
        spec_of(example_of(node))
        return self.local(value)

    def to_local(self, node: Node) -> Any:
        value: Any = node.args[0]
        spec, local = spec_of(example_of(value)), self.local(value)
        placements: Any = node.kwargs.get("grad_placements")
        if placements is None or not example_of(value).requires_grad:
            return local
        places = [place_of(each) for each in placements]
        summed = [dim for dim, place in enumerate(places) if place != of_gradient(spec.places[dim])]
        if any(places[dim] != "partial" or spec.places[dim] != "replicate" for dim in summed):
            return self.by_dtensors(node, DTensor.to_local, (value,), {"grad_placements": list(placements)})
        return self.spread(local, spec, summed)

    def redistribute(self, node: Node) -> Any:
        value: Any = node.args[0]
        others = {
            name: option
            for name, option in node.kwargs.items()
            if name not in ("placements", "async_op", "device_mesh") and option is not None
        }
        before, after = spec_of(example_of(value)), spec_of(example_of(node))
        if before.mesh != after.mesh:
            raise Unsupported("a DTensor is redistributed to another mesh")
        if before.placements == after.placements and not others:
            return self.local(value)
        cuts = {(dim, place) for spec in (before, after) for dim, place in enumerate(spec.places)}
        dims = [place for _, place in cuts if isinstance(place, int)]
        if others or not (before.is_even and after.is_even) or len(set(dims)) < len(dims):
            others["placements"] = after.placements
            return self.by_dtensors(node, DTensor.redistribute, (value,), others)
        local = self.local(value)
        for dim, (source, target) in enumerate(zip(before.places, after.places, strict=True)):
            if source != target:
                local = self.insert(redistribute, local, source, target, *after.group(dim))
        return local

    def call(self, node: Node, name: str) -> Any:
        """Return a torch function: of the local tensors if that is equivalent, else DTensors' implementation."""
        example = example_of(node)
        if name == "getitem" and isinstance(example_of(node.all_input_nodes[0]), (tuple, list)):
            return self.copy(node, self.inside(example))
        results = [leaf for leaf in torch_pytree.tree_leaves(example) if leaf is not None]
        changes = writes(node)
        if changes:
            self.note_change(node, name)
        elif all(isinstance(leaf, (int, float, str)) for leaf in results):
            return example  # a query of a DTensor's metadata
        function = _callable(node)
        looked_up = self.embedding(node)
        if looked_up is not None:
            return looked_up
        if all(isinstance(leaf, DTensor) and not any(map(is_masked, leaf.placements)) for leaf in results):
            # torch keeps its mask until the redistribution: no trial
            tensors = results or [example_of(node.all_input_nodes[0])]
            specs = [spec_of(leaf) for leaf in tensors]
            trial = FakeCall(function, node.args, node.kwargs)
            by_part = draws_by_part(specs[0].mesh.device_type) and bool(trial.draws)
            offsets = trial.draw_offsets(specs[0], self.inside(tensors[0])) if by_part else ()
            prepared = None if offsets is None else self.as_local(node, trial, specs)
            if prepared is not None:
                args, kwargs = prepared
                if offsets:
                    device, begin, end = offsets
                    self.move_generator(begin_partial_draw, device, begin)
                copied = self.new.create_node(node.op, node.target, args, kwargs, name=node.name)
                copied.meta = {**node.meta, "example_value": self.all_inside(example)}
                if offsets:
                    self.move_generator(end_partial_draw, device, end)
                return copied
            if by_part:
                return self.opaque(node, *self.callee(node, function, node.args, node.kwargs))
        if changes:
            raise Unsupported(f"{name} changes a DTensor in place by other operators than those of a tensor")
        return self.by_dtensors(node, function, node.args, node.kwargs)

    def move_generator(self, move: Callable, device: torch.device, offset: Any) -> None:
        moving = self.new.call_function(move, (device, offset))
        moving.meta = {**self.node.meta, "example_value": None}

    def note_change(self, node: Node, name: str) -> None:
        """Note the inputs that a node mutates. Raises Unsupported if it changes an input's autograd history, too."""
        targets = [each for each in (*node.args[:1], node.kwargs.get("out")) if isinstance(each, Node)]
        memory = {storage_id(self.inside(example_of(each))) for each in targets}
        inputs = self.old.graph.find_nodes(op="placeholder")
        for i, (each, spec) in enumerate(zip(inputs, self.inputs, strict=True)):
            if spec is not None and storage_id(self.inside(example_of(each))) in memory:
                self.changed.add(i)
                if torch.is_grad_enabled() and example_of(each).requires_grad:
                    raise Unsupported(f"{name} changes an input that is a DTensor with gradients in place")

    def embedding(self, node: Node) -> Node | None:
        """Return a lookup in an embedding with sharded rows as a partial sum: zeros for other ranks' words. None for
        another call."""
        if torchlang.function_name(node.target) != "torch.nn.functional.embedding":
            return None
        arguments = inspect.signature(functional.embedding).bind(*node.args, **node.kwargs).arguments
        words, weight = arguments.pop("input"), arguments.pop("weight")
        padding = arguments.pop("padding_idx", None)
        if any(option not in (None, False, 2.0) for option in arguments.values()):  # 2.0: max_norm's unused norm
            return None
        if not all(isinstance(each, Node) and isinstance(example_of(each), DTensor) for each in (words, weight)):
            return None
        table, read = spec_of(example_of(weight)), spec_of(example_of(words))
        dims = [dim for dim, place in enumerate(table.places) if place == 0]
        others = [place for place in table.places if place != 0]
        if len(dims) != 1 or table.mesh != read.mesh or {*others, *read.places} != {"replicate"}:
            return None
        local = self.local(weight)
        rows, (size, rank, _) = example_of(local).shape[0], table.group(dims[0])
        if not isinstance(rows, int) or rows == 0:
            return None
        start = rank * -(-table.shape[0] // size)
        if padding is not None:
            padding = padding % table.shape[0] - start
            padding = padding if 0 <= padding < rows else None
        here = self.insert(torch.sub, self.local(words), start)
        missing = self.insert(torch.logical_or, self.insert(torch.lt, here, 0), self.insert(torch.ge, here, rows))
        result = self.insert(functional.embedding, self.insert(torch.masked_fill, here, missing, 0), local, padding)
        return self.insert(torch.masked_fill, result, self.insert(torch.unsqueeze, missing, -1), 0.0)

    def as_local(self, node: Node, trial: FakeCall, results: list[Spec]) -> tuple[tuple, dict] | None:
        """Return arguments for which the function of local tensors is equivalent; None if there are none."""
        nodes = [each for each in trial.leaves if isinstance(each, Node) and isinstance(example_of(each), torch.Tensor)]
        if not all(isinstance(example_of(each), DTensor) for each in nodes):
            return None
        specs = {each: spec_of(example_of(each)) for each in nodes}
        mesh = results[0].mesh
        if any(spec.mesh != mesh or not spec.is_local for spec in (*specs.values(), *results)):
            return None
        if trial.of_dtensors is None:
            return None
        partial = [dim for dim in range(mesh.ndim) if all(spec.places[dim] == "partial" for spec in results)]
        for divided in trial.divisions(specs, partial):
            sizes = trial.sizes_of(self.inside(example_of(node)))
            for replaced in (trial.leaves, sizes):
                if replaced is not None and trial.of_local(replaced, divided) == trial.of_dtensors:
                    return self.arguments(trial, replaced, specs, results, divided)
        return None

    def arguments(
        self, trial: FakeCall, replaced: list[Any], specs: dict[Node, Spec], results: list[Spec], divided: dict
    ) -> tuple[tuple, dict] | None:
        """Return the arguments on local tensors, divided and spread as the trial requires."""
        local: dict[Node, Node] = {}
        for each, spec in specs.items():
            places = ["partial" if dim in divided.get(each, ()) else place for dim, place in enumerate(spec.places)]
            spread_along = []
            for dim, place in enumerate(places):
                replicated = [result.places[dim] == "replicate" for result in results]
                if any(replicated):
                    if not all(replicated) or place != "replicate":
                        return None
                elif place == "replicate":
                    spread_along.append(dim)
            x = self.local(each)
            for dim in divided.get(each, ()):
                x = self.insert(redistribute, x, "replicate", "partial", *spec.group(dim))
            local[each] = self.spread(x, spec, spread_along) if example_of(each).requires_grad else x
        leaves = [local.get(leaf, self.env.get(leaf)) if isinstance(leaf, Node) else leaf for leaf in replaced]
        return torch_pytree.tree_unflatten(leaves, trial.structure)

    def by_dtensors(self, node: Node, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the operators and collectives that DTensors run for a call; an opaque call if they are unknown."""
        callee, operands = self.callee(node, function, args, kwargs)
        example = self.all_inside(example_of(node))
        results = torch_pytree.tree_leaves(example)
        examples = [example_of(each) for each in operands]
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in results):
            examples = [each.detach() for each in examples]
        graphs = operator_graphs(callee, examples)
        if graphs is None:
            return self.opaque(node, callee, operands)
        parts = [self.new.get_attr(self.hold(graph)) for graph in (graphs.forward, graphs.backward)]
        call = self.new.call_function(run_graphs, (*parts, graphs.constant, *operands))
        call.meta = {**node.meta, "example_value": tuple(results)}
        if not isinstance(example, torch.Tensor):
            return call
        only = self.new.call_function(operator.getitem, (call, 0))
        only.meta = {**node.meta, "example_value": example}
        return only

    def callee(self, node: Node, function: Callable, args: tuple, kwargs: dict) -> tuple[OfDTensors, tuple[Node, ...]]:
        """Return a call of DTensors as a function of their local tensors, and these."""
        leaves, structure = torch_pytree.tree_flatten((args, kwargs))
        values = [example_of(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves]
        tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        result = example_of(node)
        callee = OfDTensors(
            function,
            [None if i in tensors else value for i, value in enumerate(values)],
            structure,
            tensors,
            {i: spec_of(value) for i, value in enumerate(values) if isinstance(value, DTensor)},
            [spec_of(leaf) if isinstance(leaf, DTensor) else None for leaf in torch_pytree.tree_leaves(result)],
        )
        return callee, tuple(self.local(leaves[i]) for i in tensors)

    def opaque(self, node: Node, callee: OfDTensors, operands: tuple[Node, ...]) -> Node:
        call = self.new.call_function(callee, operands)
        call.meta = {**node.meta, "example_value": self.all_inside(example_of(node))}
        return call

    def hold(self, graph: GraphModule) -> str:
        """Add a submodule to the graph, and return its name."""
        name = f"of_dtensors_{sum(1 for _ in self.old.named_children())}"
        self.old.add_submodule(name, graph)
        return name


_CALLS = ("call_function", "call_method")


def _name(node: Node) -> str:
    return torchlang.function_name(node.target).rpartition(".")[2]


def _callable(node: Node) -> Callable:
    return getattr(DTensor, node.target) if isinstance(node.target, str) else node.target
