"""Kernels that are correct only for some values: their assumptions are checked at run time."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from forge import torchlang
from forge.executors.hubex.operators import Target
from forge.ir.pytree import leaves, tree_map
from forge.torch_internals.tensors import storage_id


def reference_of(target: Target, pattern: Any) -> Callable | None:
    """Return a kernel's reference on real tensors: torch's function, the reference of a pattern or operator, or the
    operator itself if a third party defines it. None for a prim."""
    if pattern is not None:
        return pattern.reference
    if target.function is not None:
        return target.function.reference or target.function.operator
    if target.symbol.id in torchlang.all_symbols():
        return torchlang.torch_function_of(target.symbol)
    return None


def taken_values(function: Callable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by name, for which a function has parameters."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


class Assumption:
    """A repository's predicate on the values of a call; it takes the arguments that it names."""

    def __init__(self, predicate: Callable) -> None:
        self.predicate = predicate
        self.name = getattr(predicate, "__name__", str(predicate))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the predicate holds for the operator's arguments, by name."""
        with torch.no_grad():
            return bool(self.predicate(**taken_values(self.predicate, values)))


class AssumingKernel:
    """A function that runs the kernel if its assumption holds, else the operator's reference."""

    def __init__(
        self,
        function: Callable,
        assumption: Assumption,
        reference: Callable | None,
        bind: Callable[[tuple, Mapping[str, Any]], dict[str, Any]],
        out: tuple[str | int, ...],
    ) -> None:
        if reference is None:
            raise NotImplementedError(
                f"assumes: {assumption.name}: a prim has no function that could run where it does not hold"
            )
        self.function = function
        self.assumption = assumption
        self.reference = reference
        self.bind = bind
        self.out = out
        self.__name__ = getattr(function, "__name__", "kernel")

    def __call__(self, call: tuple[tuple, dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        """Run the kernel or the reference. call: the operator's arguments; the other arguments are the kernel's."""
        if self.assumption.holds(self.bind(*call)):
            return self.function(*args, **kwargs)
        result = self.reference(*call[0], **call[1])
        if not self.out:
            storages = {storage_id(leaf) for leaf in leaves(call) if isinstance(leaf, torch.Tensor)}
            return tree_map(lambda leaf: _own(leaf, storages), result)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        for place, value in zip(self.out, results, strict=True):
            (args[place] if isinstance(place, int) else kwargs[place]).copy_(value)
        return None


def _own(leaf: Any, storages: set[int]) -> Any:
    shares = isinstance(leaf, torch.Tensor) and storage_id(leaf) in storages
    return leaf.clone() if shares else leaf
