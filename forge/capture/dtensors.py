"""Programs on DTensors become programs on the tensors inside: what this process has of each.

Dynamo's graph says how each value is placed. Here it is rewritten, before it is recorded: DTensor.from_local and
to_local vanish, redistribute is `forge.redistribute`, whose collectives are calls of the program, and a torch function
of DTensors is that function of the tensors inside, where both run the same operators. Where they do not, the call is an
opaque one, which makes DTensors of what it is given and differentiates as torch does. At the program's boundary inputs
are unwrapped and results wrapped by torch's own differentiable functions, outside of the autograd.Function.

Gradients follow one rule: that of a value is placed as the value, that of a partial one is replicated. A function that
makes a part of something of a value that every process has gives each process a part of that value's gradient:
`forge.spread` sums them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from forge import torchlang
from forge.capture.higher_order import writes
from forge.compiler.program import Unsupported
from forge.ir.source import Source
from forge.prims.library import symbolic_dispatch
from forge.torch_internals.dispatch import TorchDispatchMode
from forge.torch_internals.distributed import local_tensor, placement_spec
from forge.torch_internals.fake_tensors import FakeScriptObject, FakeTensor
from forge.torch_internals.pytree import torch_pytree
from forge.torchlang.sharding import Place, of_gradient, redistribute, spread

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
else:
    DTensor = Partial = Replicate = Shard = ()


class LocalGraph(NamedTuple):
    """A graph on local tensors. wrap(call): turns a call on local tensors into one on DTensors."""

    graph: GraphModule
    wrap: Callable[[Callable], Callable]


def to_local_graph(graph: GraphModule) -> LocalGraph | None:
    """Return the graph on local tensors, None where it has no DTensors. Raises Unsupported for an unknown placement,
    for random numbers, and for an in-place change of a DTensor."""
    if not any(map(_has_dtensor, graph.graph.nodes)):
        return None
    return _Writer(graph).write()


def _has_dtensor(node: Node) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in torch_pytree.tree_leaves(node.meta.get("example_value")))


class _Spec(NamedTuple):
    """The placement of a DTensor: a place for each dim of the mesh."""

    mesh: Any
    places: tuple[Place, ...]

    def group(self, dim: int) -> tuple[int, int, str]:
        """Return the size, this process's rank and the name of the group along a dim of the mesh."""
        return self.mesh.size(dim), self.mesh.get_local_rank(dim), self.mesh.get_group(dim).group_name

    @property
    def placements(self) -> list[Any]:
        return [_placement(place) for place in self.places]

    @property
    def of_gradient(self) -> list[Any]:
        return [_placement(of_gradient(place)) for place in self.places]


def _placement(place: Place) -> Any:
    return Shard(place) if isinstance(place, int) else Partial() if place == "partial" else Replicate()


def _place(placement: Any) -> Place | None:
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return "replicate"
    return "partial" if type(placement) is Partial and placement.reduce_op == "sum" else None


def _find_spec(value: Any, *, uneven: bool = False) -> _Spec | str:
    """Return the mesh and placements of a DTensor, or the reason why they cannot be compiled. uneven: whether the
    processes' parts may differ, as where only `to_local` reads them."""
    mesh = placement_spec(value).mesh
    mesh = mesh.real_obj if isinstance(mesh, FakeScriptObject) else mesh
    places: list[Place] = []
    for placement in placement_spec(value).placements:
        if (place := _place(placement)) is None:
            return f"a DTensor is placed as {placement}"
        places.append(place)
    if mesh.get_coordinate() is None:
        return "this process is no part of a DTensor's mesh"
    cut = [place for place in places if isinstance(place, int)]
    for dim, place in enumerate(places):
        differ = isinstance(place, int) and not uneven and value.shape[place] % mesh.size(dim)
        if isinstance(place, int) and (differ or cut.count(place) > 1):
            return f"a DTensor of shape {list(value.shape)} has uneven parts, or is cut twice along dim {place}"
    return _Spec(mesh, tuple(places))


def _spec(value: Any, *, uneven: bool = False) -> _Spec:
    found = _find_spec(value, uneven=uneven)
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def _local_fake(value: Any) -> Any:
    """Return the fake local tensor of a fake DTensor; another value as it is."""
    if not isinstance(value, DTensor):
        return value
    local = local_tensor(value).detach()
    return local.requires_grad_() if value.requires_grad and not local_tensor(value).is_inference() else local


class _Writer:
    def __init__(self, graph: GraphModule) -> None:
        self.old = graph
        self.new = Graph()
        self.env: dict[Node, Any] = {}
        self.waiting: dict[Node, Callable] = {}  # calls whose results have no place before they are redistributed
        self.sums: dict[Node, _Spec] = {}  # of calls that are written as sums: how they are placed
        self.inputs: list[_Spec | None] = []  # of each input: how it is placed, None where it is no DTensor
        self.left_out: list[int] = []  # inputs that are no tensors
        self.outputs: dict[int, _Spec] = {}
        self.node = next(iter(graph.graph.nodes))  # the one that is rewritten

    def write(self) -> LocalGraph:
        for node in self.old.graph.nodes:
            self.node = node
            try:
                self.env[node] = self.write_node(node)
            except Unsupported as reason:
                reason.at(Source.of(node))
                raise
        return LocalGraph(GraphModule(self.old, self.new), self.wrap)

    def write_node(self, node: Node) -> Any:
        given = [value for each in node.all_input_nodes for value in torch_pytree.tree_leaves(_example(each))]
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "output":
            return self.output(node)
        name = _name(node)
        if name in ("from_local", "prim_from_local", "prim from_local"):  # the last before torch 2.13
            return self.from_local(node)
        if not any(isinstance(value, DTensor) for value in given) and not _has_dtensor(node):
            return self.copy(node)
        if name == "tag_activation_checkpoint":
            return self.checkpoint(node)
        if any(isinstance(value, FakeScriptObject) for value in given) or node.op not in _CALLS:
            raise Unsupported(f"{name} is called with a DTensor")
        if name in ("to_local", "prim_to_local"):
            return self.to_local(node)
        if name in ("redistribute", "prim_redistribute"):
            return self.redistribute(node)
        return self.call(node, name)

    # the boundary

    def placeholder(self, node: Node) -> Any:
        value = _example(node)
        if isinstance(value, FakeScriptObject):  # a mesh, which Dynamo guards
            self.left_out.append(len(self.inputs))
            self.inputs.append(None)
            return None
        self.inputs.append(_spec(value, uneven=True) if isinstance(value, DTensor) else None)
        return self.copy(node, _local_fake(value))

    def output(self, node: Node) -> Any:
        results: Any = node.args[0]
        for i, each in enumerate(results):
            if isinstance(each, Node) and isinstance(_example(each), DTensor):
                self.outputs[i] = _spec(_example(each))
        return self.copy(node)

    def wrap(self, call: Callable) -> Callable:
        """Return a call on DTensors that runs `call` on their local tensors."""
        specs = [(i, spec) for i, spec in enumerate(self.inputs) if spec is not None]
        kept = [i for i in range(len(self.inputs)) if i not in self.left_out]
        outputs = list(self.outputs.items())

        def of_dtensors(*inputs: Any) -> Any:
            local = list(inputs)
            for i, spec in specs:
                local[i] = inputs[i].to_local(grad_placements=spec.of_gradient)
            results = call(*[local[i] for i in kept])
            if not outputs:
                return results
            results = list(results)
            for i, spec in outputs:
                results[i] = DTensor.from_local(results[i], spec.mesh, spec.placements, run_check=False)
            return tuple(results)

        return of_dtensors

    # calls

    def copy(self, node: Node, example: Any = None) -> Node:
        """Return the node on local tensors."""
        if node.op == "get_attr" and isinstance(getattr(self.old, str(node.target), None), DTensor):
            raise Unsupported("the graph holds a DTensor")
        copied = self.new.node_copy(node, self.local)
        if example is not None:
            copied.meta = {**node.meta, "example_value": example}
        return copied

    def local(self, node: Node) -> Any:
        """Return the local value of a node of the graph. Raises Unsupported before a pending redistribution."""
        if node in self.waiting:
            raise Unsupported(f"a result of {node.name} is used before it is redistributed")
        return self.env[node]

    def checkpoint(self, node: Node) -> Node:
        """Return a checkpoint whose body is a graph on local tensors."""
        body: Any = node.args[0]
        inner = _Writer(getattr(self.old, body.target))
        graph = inner.write().graph
        if inner.outputs:
            raise Unsupported("a checkpoint returns a DTensor")
        name = f"{body.target}_on_local_tensors"
        self.old.add_module(name, graph)
        inputs = [each for i, each in enumerate(node.args[1:]) if i not in inner.left_out]
        args = (self.new.get_attr(name), *[self.local(x) if isinstance(x, Node) else x for x in inputs])
        copied = self.new.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        copied.meta = dict(node.meta)
        return copied

    def insert(self, target: Callable, *args: Any) -> Node:
        """Return a call of a function of local tensors, the first argument among them."""
        values = [_example(each) if isinstance(each, Node) else each for each in args]
        with values[0].fake_mode, torch.no_grad():
            made = target(*values)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            made.requires_grad_()
        node = self.new.call_function(target, args)
        node.meta = {**self.node.meta, "example_value": made}
        return node

    def spread(self, x: Node, spec: _Spec, dims: Sequence[int]) -> Node:
        """Return x, whose gradients are summed along these dims of the mesh."""
        for dim in dims:
            x = self.insert(spread, x, *spec.group(dim))
        return x

    def from_local(self, node: Node) -> Any:
        value: Any = node.args[0]
        known = {name: given for name, given in node.kwargs.items() if name not in ("device_mesh", "placements")}
        others = [
            name for name, given in known.items() if name not in ("shape", "stride") and given not in (None, False)
        ]
        if others or not isinstance(value, Node):
            raise Unsupported(f"DTensor.from_local is called with {', '.join(known)}")
        spec, whole = _spec(_example(node)), list(_example(value).shape)
        for dim, place in enumerate(spec.places):
            if isinstance(place, int):
                whole[place] *= spec.mesh.size(dim)
        if whole != list(_example(node).shape):
            raise Unsupported(
                f"DTensor.from_local is called with a shape that parts of {list(_example(value).shape)} lack"
            )
        return self.local(value)

    def to_local(self, node: Node) -> Any:
        value: Any = node.args[0]
        spec, local = _spec(_example(value), uneven=True), self.local(value)
        wanted: Any = node.kwargs.get("grad_placements")
        if wanted is None:
            return local
        places = [_place(each) for each in wanted]
        summed = [dim for dim, place in enumerate(places) if place != of_gradient(spec.places[dim])]
        if any(places[dim] != "partial" or spec.places[dim] != "replicate" for dim in summed):
            raise Unsupported(f"to_local is called with grad_placements={wanted}")
        return self.spread(local, spec, summed) if _example(value).requires_grad else local

    def redistribute(self, node: Node) -> Any:
        value: Any = node.args[0]
        others = [name for name in node.kwargs if name not in ("placements", "async_op", "device_mesh")]
        if any(node.kwargs[name] is not None for name in (*others, "device_mesh") if name in node.kwargs):
            raise Unsupported(f"redistribute is called with {', '.join(node.kwargs)}")
        after = _spec(_example(node))
        if value in self.waiting:
            return self.opaque(node, self.waiting[value], value.args, value.kwargs)
        before, local = self.sums.get(value) or _spec(_example(value)), self.local(value)
        if before.mesh != after.mesh:
            raise Unsupported("a DTensor is redistributed to another mesh")
        cut = [(dim, place) for spec in (before, after) for dim, place in enumerate(spec.places)]
        if len({place for _, place in set(cut) if isinstance(place, int)}) < len(
            {(dim, place) for dim, place in cut if isinstance(place, int)}
        ):
            raise Unsupported("a DTensor is redistributed between dims of the mesh")
        for dim, (source, target) in enumerate(zip(before.places, after.places, strict=True)):
            if source != target:
                local = self.insert(redistribute, local, source, target, *after.group(dim))
        return local

    def call(self, node: Node, name: str) -> Any:
        """Return a torch function: of the local tensors where that is the same, else opaque."""
        example = _example(node)
        if name == "getitem" and isinstance(_example(node.all_input_nodes[0]), (tuple, list)):
            return self.copy(node, _local_fake(example))
        if writes(node) or "out" in node.kwargs:
            raise Unsupported(f"{name} changes a DTensor in place")
        results = [leaf for leaf in torch_pytree.tree_leaves(example) if leaf is not None]
        if not all(isinstance(leaf, DTensor) for leaf in results):
            if all(isinstance(leaf, (int, float, str)) for leaf in results):
                return example  # a query of a DTensor's metadata
            raise Unsupported(f"{name} of a DTensor gives {', '.join(type(leaf).__name__ for leaf in results)}")
        function = _callable(node)
        if any(isinstance(_find_spec(leaf), str) for leaf in results):
            if [_name(each) for each in node.users] in (["redistribute"], ["prim_redistribute"]):
                if (looked_up := self.embedding(node)) is not None:
                    return looked_up
                self.waiting[node] = function  # no trial: torch keeps what it masks until it is redistributed
                return None
            raise Unsupported(next(each for each in map(_find_spec, results) if isinstance(each, str)))
        specs = [_spec(leaf) for leaf in results]
        trial = _FakeCall(function, node.args, node.kwargs)
        prepared = self.as_local(node, trial, specs)
        if prepared is None:
            return self.opaque(node, function, node.args, node.kwargs)
        args, kwargs = prepared
        copied = self.new.create_node(node.op, node.target, args, kwargs, name=node.name)
        copied.meta = {**node.meta, "example_value": torch_pytree.tree_map(_local_fake, example)}
        return copied

    def embedding(self, node: Node) -> Node | None:
        """Return a lookup in an embedding whose rows are cut as a sum: zeros for the words that are not here. None for
        another call."""
        if torchlang.function_name(node.target) != "torch.nn.functional.embedding":
            return None
        given = inspect.signature(functional.embedding).bind(*node.args, **node.kwargs).arguments
        words, weight = given.pop("input"), given.pop("weight")
        if any(option not in (None, False, 2.0) for option in given.values()):  # 2.0: max_norm's unused norm
            return None
        if not all(isinstance(each, Node) and isinstance(_example(each), DTensor) for each in (words, weight)):
            return None
        cut, read = _spec(_example(weight)), _spec(_example(words))
        dims = [dim for dim, place in enumerate(cut.places) if place == 0]
        others = [place for place in cut.places if place != 0]
        if len(dims) != 1 or cut.mesh != read.mesh or {*others, *read.places} != {"replicate"}:
            return None
        local = self.local(weight)
        rows = _example(local).shape[0]
        here = self.insert(torch.sub, self.local(words), cut.group(dims[0])[1] * rows)
        missing = self.insert(torch.logical_or, self.insert(torch.lt, here, 0), self.insert(torch.ge, here, rows))
        found = self.insert(functional.embedding, self.insert(torch.masked_fill, here, missing, 0), local)
        self.sums[node] = cut._replace(places=tuple("partial" if place == 0 else place for place in cut.places))
        return self.insert(torch.masked_fill, found, self.insert(torch.unsqueeze, missing, -1), 0.0)

    def as_local(self, node: Node, trial: "_FakeCall", results: list[_Spec]) -> tuple[tuple, dict] | None:
        """Return the arguments with which the function of local tensors is the call; None where there are none."""
        nodes = [each for each in trial.leaves if isinstance(each, Node) and isinstance(_example(each), torch.Tensor)]
        if not all(isinstance(_example(each), DTensor) for each in nodes):
            return None
        given = {each: _spec(_example(each)) for each in nodes}
        mesh = results[0].mesh
        if any(spec.mesh != mesh for spec in (*given.values(), *results)):
            return None
        if trial.of_dtensors is None:
            return None
        partial = [dim for dim in range(mesh.ndim) if all(spec.places[dim] == "partial" for spec in results)]
        for divided in trial.divisions(given, partial):
            sizes = trial.sizes_of(_local_fake(_example(node))) if len(results) == 1 else None
            for replaced in (trial.leaves, sizes):
                if replaced is not None and trial.of_local(replaced, divided) == trial.of_dtensors:
                    return self.arguments(trial, replaced, given, results, divided)
        return None

    def arguments(
        self, trial: "_FakeCall", replaced: list[Any], given: dict[Node, _Spec], results: list[_Spec], divided: dict
    ) -> tuple[tuple, dict] | None:
        """Return the arguments on local tensors, divided and spread where that is to be."""
        local: dict[Node, Node] = {}
        for each, spec in given.items():
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
            local[each] = self.spread(x, spec, spread_along) if _example(each).requires_grad else x
        leaves = [local.get(leaf, self.env.get(leaf)) if isinstance(leaf, Node) else leaf for leaf in replaced]
        return torch_pytree.tree_unflatten(leaves, trial.structure)

    def opaque(self, node: Node, function: Callable, args: tuple, kwargs: dict) -> Node:
        """Return a call that makes DTensors of local tensors, and has local ones of what torch makes of them."""
        leaves, structure = torch_pytree.tree_flatten((args, kwargs))
        values = [_example(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves]
        specs = {i: _spec(value) for i, value in enumerate(values) if isinstance(value, DTensor)}
        results = [_spec(leaf) for leaf in torch_pytree.tree_leaves(_example(node))]
        called = OfDTensors(function, structure, specs, results)
        made = self.new.call_function(called, tuple(self.local(x) if isinstance(x, Node) else x for x in leaves))
        made.meta = {**node.meta, "example_value": torch_pytree.tree_map(_local_fake, _example(node))}
        return made


_CALLS = ("call_function", "call_method")


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _name(node: Node) -> str:
    return torchlang.function_name(node.target).rpartition(".")[2]


def _callable(node: Node) -> Callable:
    return getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target


class OfDTensors:
    """A torch function of DTensors as one of the tensors inside, by torch's own DTensors and their autograd.

    specs: of the leaves of its arguments that are DTensors, by position; results: of what it returns.
    """

    communicates = True

    def __init__(self, function: Callable, structure: Any, specs: dict[int, _Spec], results: list[_Spec]) -> None:
        self.function = function
        self.structure = structure
        self.specs = specs
        self.results = results
        self.__name__ = f"{torchlang.function_name(function)} of DTensors"

    def __call__(self, *leaves: Any) -> Any:
        given = [
            DTensor.from_local(leaf, spec.mesh, spec.placements, run_check=False) if spec is not None else leaf
            for leaf, spec in ((leaf, self.specs.get(i)) for i, leaf in enumerate(leaves))
        ]
        found, structure = torch_pytree.tree_flatten(_run(self.function, given, self.structure))
        local = [
            each.redistribute(placements=spec.placements).to_local(grad_placements=spec.of_gradient)
            for each, spec in zip(found, self.results, strict=True)
        ]
        return torch_pytree.tree_unflatten(local, structure)


def _run(function: Callable, leaves: Sequence[Any], structure: Any) -> Any:
    args, kwargs = torch_pytree.tree_unflatten(list(leaves), structure)
    return function(*args, **kwargs)


# which operators run


class _OperatorRecorder(TorchDispatchMode):
    """The operators that run on local tensors. `labels`: of each tensor, by id, the expression that makes it."""

    def __init__(self, given: Sequence[Any] = ()) -> None:
        super().__init__()
        self.random = False
        self.alive = list(given)  # an id is an object's while it lives
        self.labels: dict[int, Any] = {id(x): ("given", i) for i, x in enumerate(given) if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor calls it of the tensors inside
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **kwargs)
        read = tuple(map(self.label, torch_pytree.tree_leaves((args, kwargs))))
        for i, each in enumerate(torch_pytree.tree_leaves(result)):
            if isinstance(each, torch.Tensor) and id(each) not in self.labels:
                self.alive.append(each)
                self.labels[id(each)] = (str(func), i, read)
        return result

    def label(self, leaf: Any) -> Any:
        return self.labels.get(id(leaf), "another") if isinstance(leaf, torch.Tensor) else repr(leaf)


def _sizes(leaf: Any) -> Sequence[Any]:
    return leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]


class _FakeCall:
    """A torch function run on fake tensors, to see of which operators its results are made.

    leaves, structure: of its arguments, as nodes. of_dtensors: what it makes of DTensors; None where it fails.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function = function
        self.leaves, self.structure = torch_pytree.tree_flatten((args, kwargs))
        self.of_dtensors = self._propagate([_example(x) if isinstance(x, Node) else x for x in self.leaves], {})

    def of_local(self, leaves: Sequence[Any], divided: dict[Node, Sequence[int]]) -> Any:
        """Return the fake results for the local tensors of `leaves`, those in `divided` divided by the sizes of these
        groups."""
        values = [_example(x) if isinstance(x, Node) else x for x in leaves]
        sizes = {
            i: [_spec(_example(x)).mesh.size(dim) for dim in divided[x]]
            for i, x in enumerate(leaves)
            if isinstance(x, Node) and x in divided
        }
        return self._propagate([local_tensor(x) if isinstance(x, DTensor) else x for x in values], sizes)

    def _propagate(self, values: list[Any], sizes: dict[int, list[int]]) -> Any:
        inside = [local_tensor(x) if isinstance(x, DTensor) else x for x in values]
        fake = next(x.fake_mode for x in inside if isinstance(x, FakeTensor))
        symbolic = any(isinstance(size, torch.SymInt) for x in inside for size in _sizes(x))
        with fake, torch.no_grad(), symbolic_dispatch(symbolic), _OperatorRecorder(inside) as seen:
            try:
                for i, dividers in sizes.items():
                    for size in dividers:
                        values[i] = values[i] / size
                made = _run(self.function, values, self.structure)
            except Exception:
                return None
        if seen.random:
            raise Unsupported(f"{torchlang.function_name(self.function)} of a DTensor draws random numbers")
        results = [local_tensor(x) if isinstance(x, DTensor) else x for x in torch_pytree.tree_leaves(made)]
        return [seen.label(each) for each in results]

    def divisions(self, given: dict[Node, _Spec], partial: list[int]) -> Iterator[dict[Node, Sequence[int]]]:
        """Yield the arguments that every process has and divides where the result is a sum (a bias)."""
        yield {}
        for each, spec in given.items():
            if partial and all(spec.places[dim] == "replicate" for dim in partial):
                yield {each: partial}

    def sizes_of(self, result: Any) -> list[Any] | None:
        """Return the leaves with local shapes where a shape is read; None where none is."""
        numbers = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, int)]
        if getattr(self.function, "__name__", "") not in ("view", "reshape") or len(numbers) != result.ndim:
            return None
        shape = dict(zip(numbers, result.shape, strict=True))
        return [shape.get(i, leaf) for i, leaf in enumerate(self.leaves)]
