"""Placements of DTensors, and their functions as functions of their local tensors, by torch's own DTensors."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node

from forge import torchlang
from forge.compiler.program import Unsupported
from forge.torch_internals.distributed import is_masked, placement_spec
from forge.torch_internals.fake_tensors import FakeScriptObject
from forge.torch_internals.pytree import torch_pytree

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
else:
    DTensor = Partial = Replicate = Shard = ()


class Spec(NamedTuple):
    """The placement of a DTensor, and its global shape and strides."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    @property
    def places(self) -> tuple[Any, ...]:
        """The place along each dim of the mesh; an unknown placement as it is."""
        return tuple(map(place_of, self.placements))

    @property
    def is_even(self) -> bool:
        """Return whether all ranks have equal shards in rank order, replicas, or partial sums."""
        cuts = [(dim, place) for dim, place in enumerate(self.places) if isinstance(place, int)]
        return (
            all(isinstance(place, (int, str)) for place in self.places)
            and all(self.shape[place] % self.mesh.size(dim) == 0 for dim, place in cuts)
            and len({place for _, place in cuts}) == len(cuts)
        )

    @property
    def is_local(self) -> bool:
        """Return whether functions of each rank's shard are shards of the global functions, their gradients too."""
        return not any(each.is_partial() and place_of(each) != "partial" for each in self.placements)

    def group(self, dim: int) -> tuple[int, int, str]:
        """Return the size, this process's rank and the name of the group along a dim of the mesh."""
        return self.mesh.size(dim), self.mesh.get_local_rank(dim), self.mesh.get_group(dim).group_name

    def wrap(self, local: torch.Tensor) -> Any:
        """Return the DTensor whose local tensor is `local`."""
        shape, stride = (None, None) if self.is_even else (torch.Size(self.shape), self.stride)
        return DTensor.from_local(local, self.mesh, self.placements, shape=shape, stride=stride)

    @property
    def of_gradient(self) -> list[Any]:
        return [Replicate() if each.is_partial() else each for each in self.placements]


def place_of(placement: Any) -> Any:
    """Return the dim of a shard, "replicate" or "partial"; another placement as it is."""
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return "replicate"
    return "partial" if type(placement) is Partial and placement.reduce_op == "sum" else placement


def spec_of(value: Any) -> Spec:
    """Return the placement of a DTensor; a masked partial sum is a partial sum. Raises Unsupported."""
    spec = placement_spec(value)
    mesh = spec.mesh.real_obj if isinstance(spec.mesh, FakeScriptObject) else spec.mesh
    if mesh.get_coordinate() is None:
        raise Unsupported("this process is no part of a DTensor's mesh")
    placements = tuple(Partial() if is_masked(each) else each for each in spec.placements)
    result = Spec(mesh, placements, tuple(value.shape), tuple(value.stride()))
    if not result.is_even and any(isinstance(size, torch.SymInt) for size in (*result.shape, *result.stride)):
        raise Unsupported("a DTensor whose length varies has uneven or strided parts")
    return result


def example_of(node: Node) -> Any:
    """Return the fake value of a node of Dynamo's graph, None if it has none."""
    return node.meta.get("example_value")


class OfDTensors:
    """A torch function of DTensors as a function of their local tensors, by torch's own DTensors and their autograd.

    leaves, structure: of its arguments; tensors: the positions of the tensors among them. specs: of the DTensors among
    those, by position; results: of its results, None for a plain tensor.
    """

    communicates = True

    def __init__(
        self,
        function: Callable,
        leaves: list[Any],
        structure: Any,
        tensors: list[int],
        specs: dict[int, Spec],
        results: list[Spec | None],
    ) -> None:
        self.function = function
        self.leaves = leaves
        self.structure = structure
        self.tensors = tensors
        self.specs = specs
        self.results = results
        self.__name__ = f"{torchlang.function_name(function)} of DTensors"

    def __call__(self, *tensors: Any) -> Any:
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = self.specs[i].wrap(tensor) if i in self.specs else tensor
        results, structure = torch_pytree.tree_flatten(run_on(self.function, leaves, self.structure))
        local = [
            each if spec is None else redistribute_as(each, spec).to_local(grad_placements=spec.of_gradient)
            for each, spec in zip(results, self.results, strict=True)
        ]
        return torch_pytree.tree_unflatten(local, structure)


def redistribute_as(x: Any, spec: Spec) -> Any:
    """Return a DTensor with the placements of a spec; a masked partial one is converted by way of a partial one."""
    if any(map(is_masked, x.placements)):
        x = x.redistribute(placements=[Replicate() if is_masked(each) else each for each in x.placements])
    return x.redistribute(placements=spec.placements)


def run_on(function: Callable, leaves: Sequence[Any], structure: Any) -> Any:
    """Return the result of a function of (args, kwargs), flattened to leaves and their structure."""
    args, kwargs = torch_pytree.tree_unflatten(list(leaves), structure)
    return function(*args, **kwargs)
