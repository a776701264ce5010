"""Kernels whose arguments or results are views of the operator's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.hub.manifest import Argument, KernelArgument, View


def adapt(
    function: Callable,
    args: Sequence[KernelArgument] | None,
    out: Sequence[str | int] = (),
    results: Sequence[Argument] = (),
) -> Callable:
    """Wrap a function to take the tensors that a manifest's `args` name, of which it takes views, and to return the
    manifest's `result`; return the function unchanged if neither is declared. out: the parameters that it writes
    to."""
    if not (results or any(isinstance(each.value, View) for each in args or ())):
        return function
    return AdaptedFunction(function, args or (), out, results)


class AdaptedFunction:
    """A kernel's function with the operator's arguments and results, converted to and from the kernel's."""

    def __init__(
        self, function: Callable, args: Sequence[KernelArgument], out: Sequence[str | int], results: Sequence[Argument]
    ) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "kernel")
        positional: list[Any] = [each.value for each in args if each.parameter is None]
        for place in sorted(place for place in out if isinstance(place, int)):
            positional.insert(place, None)
        self._adaptations: dict[int | str | None, Any] = dict(enumerate(positional))
        self._adaptations |= {each.parameter: each.value for each in args if each.parameter is not None}
        self._results = results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises TypeError or IndexError if its result does not match `result`, RuntimeError for a
        view that a tensor does not have."""
        arguments: dict[int | str | None, Any] = dict([*enumerate(args), *kwargs.items()])
        adaptations = {place: self._adaptations.get(place) for place in arguments}
        tensors = {
            each.name: arguments[place]
            for place, each in adaptations.items()
            if isinstance(each, Argument) and isinstance(arguments[place], torch.Tensor)
        }
        for place, each in adaptations.items():
            if isinstance(each, View):
                arguments[place] = each.of(arguments[place], tensors)
        returned = self.function(*(arguments[i] for i in range(len(args))), **{key: arguments[key] for key in kwargs})
        if not self._results:
            return returned
        results = tuple(each.of(returned, tensors) if isinstance(each, View) else returned for each in self._results)
        return results[0] if len(results) == 1 else results
