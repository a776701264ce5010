"""Trials on fake tensors: the operators that a torch function runs with DTensors, and with local tensors."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from forge.capture.dtensor_placements import DTensor, Spec, example_of, run_on, spec_of
from forge.prims.library import symbolic_dispatch
from forge.torch_internals.dispatch import TorchDispatchMode
from forge.torch_internals.distributed import is_masked, local_tensor, random_operators
from forge.torch_internals.fake_tensors import FakeTensor
from forge.torch_internals.pytree import torch_pytree
from forge.torch_internals.tensors import storage_id
from forge.torchlang.fake_execution import changed_tensors
from forge.torchlang.partial_draws import part_offsets


class _OperatorRecorder(TorchDispatchMode):
    """The operators that run on local tensors. `labels`: the expression of each tensor, by id."""

    def __init__(self, arguments: Sequence[Any] = ()) -> None:
        super().__init__()
        self.draws: list[tuple[Any, torch.Size]] = []  # random operators, with the shapes that they fill
        self.writes: list[Any] = []  # in-place changes of arguments, and the tensors they read
        self.memory = {storage_id(x) for x in arguments if isinstance(x, torch.Tensor)}
        self.alive = list(arguments)  # ids are unique among live objects
        self.labels: dict[int, Any] = {
            id(x): ("given", i) for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor redispatches to local tensors
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append((func, args[0].shape if args and isinstance(args[0], torch.Tensor) else torch.Size()))
        result = func(*args, **kwargs)
        read = tuple(map(self.label, torch_pytree.tree_leaves((args, kwargs))))
        for x in changed_tensors(func, args, kwargs):
            self.alive.append(x)
            self.labels[id(x)] = (str(func), read)
            if storage_id(x) in self.memory:
                self.writes.append(self.labels[id(x)])
        for i, each in enumerate(torch_pytree.tree_leaves(result)):
            if isinstance(each, torch.Tensor) and id(each) not in self.labels:
                self.alive.append(each)
                self.labels[id(each)] = (str(func), i, read)
        return result

    def label(self, leaf: Any) -> Any:
        return self.labels.get(id(leaf), "another") if isinstance(leaf, torch.Tensor) else repr(leaf)


def _sizes(leaf: Any) -> Sequence[Any]:
    return leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]


class FakeCall:
    """A torch function run on fake tensors, to find the operators that compute its results.

    leaves, structure: of its arguments, as nodes. of_dtensors: its results for DTensors; None if it fails.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function = function
        self._draws: list[tuple[Any, torch.Size]] = []
        self.leaves, self.structure = torch_pytree.tree_flatten((args, kwargs))
        self.of_dtensors = self._propagate([_unmasked(x) for x in self.leaves], {})

    def of_local(self, leaves: Sequence[Any], divided: dict[Node, Sequence[int]]) -> Any:
        """Return the fake results for the local tensors of `leaves`, those in `divided` divided by the sizes of these
        groups."""
        values = [example_of(x) if isinstance(x, Node) else x for x in leaves]
        sizes = {
            i: [spec_of(example_of(x)).mesh.size(dim) for dim in divided[x]]
            for i, x in enumerate(leaves)
            if isinstance(x, Node) and x in divided
        }
        return self._propagate([local_tensor(x) if isinstance(x, DTensor) else x for x in values], sizes)

    def _propagate(self, values: list[Any], sizes: dict[int, list[int]]) -> Any:
        inside = [local_tensor(x) if isinstance(x, DTensor) else x for x in values]
        fake = next(x.fake_mode for x in inside if isinstance(x, FakeTensor))
        symbolic = any(isinstance(size, torch.SymInt) for x in inside for size in _sizes(x))
        with fake, torch.no_grad(), symbolic_dispatch(symbolic), _OperatorRecorder(inside) as recorder:
            try:
                for i, dividers in sizes.items():
                    for size in dividers:
                        values[i] = values[i] / size
                result = run_on(self.function, values, self.structure)
            except Exception:
                return None
        self._draws = recorder.draws
        results = [local_tensor(x) if isinstance(x, DTensor) else x for x in torch_pytree.tree_leaves(result)]
        return [recorder.label(each) for each in results], recorder.writes

    @functools.cached_property
    def draws(self) -> list[tuple[Any, torch.Size]]:
        """The operators on local tensors that draw random numbers, and the shapes that these fill."""
        self.of_local(self.leaves, {})
        return self._draws

    def draw_offsets(self, spec: Spec, local: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the device, and the generator offsets by which a call draws its shard of a result; () for a call
        without draws, None if they are not known."""
        shapes = [shape for operator, shape in self.draws if operator in random_operators()]
        if not shapes:
            return ()
        cuts = [(dim, place) for dim, place in enumerate(spec.places) if place != "replicate"]
        if len(self.draws) > 1 or shapes != [local.shape] or not all(isinstance(place, int) for _, place in cuts):
            return None
        if len({place for _, place in cuts}) < len(cuts):
            return None
        largest, index = list(spec.shape), 0
        for dim, place in sorted(cuts, key=lambda cut: cut[1]):
            size, rank, _ = spec.group(dim)
            largest[place] = -(-largest[place] // size)
            index = index * size + rank
        begin, end = part_offsets(math.prod(spec.shape), math.prod(largest), index)
        return local.device, begin, end

    def divisions(self, specs: dict[Node, Spec], partial: list[int]) -> Iterator[dict[Node, Sequence[int]]]:
        """Yield the replicated arguments that each rank divides if the result is a partial sum (a bias)."""
        yield {}
        for each, spec in specs.items():
            if partial and all(spec.places[dim] == "replicate" for dim in partial):
                yield {each: partial}

    def sizes_of(self, result: Any) -> list[Any] | None:
        """Return the leaves with local sizes as the shape argument; None if there is no such argument."""
        numbers = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, int)]
        if not isinstance(result, torch.Tensor) or len(numbers) != result.ndim:
            return None
        shape = dict(zip(numbers, result.shape, strict=True))
        return [shape.get(i, leaf) for i, leaf in enumerate(self.leaves)]


def _unmasked(leaf: Any) -> Any:
    """Return a node's example, a masked partial sum as a partial sum; another leaf as it is."""
    value = example_of(leaf) if isinstance(leaf, Node) else leaf
    if not isinstance(value, DTensor) or not any(map(is_masked, value.placements)):
        return value
    local: Any = local_tensor(value)
    with local.fake_mode, torch.no_grad():
        return spec_of(value).wrap(local)
