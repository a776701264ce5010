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
    """Return the function of the tensors that a manifest's `args` name, instead of the views of them that it takes, and
    with the manifest's `result` in the place of its own; itself, where there is nothing to do. out: the parameters that
    it writes to."""
    if not (results or any(isinstance(each.value, View) for each in args or ())):
        return function
    return AdaptedFunction(function, args or (), out, results)


class AdaptedFunction:
    """A kernel's function between the operator's arguments and results and its own."""

    def __init__(
        self, function: Callable, args: Sequence[KernelArgument], out: Sequence[str | int], results: Sequence[Argument]
    ) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "kernel")
        positional: list[Any] = [each.value for each in args if each.parameter is None]
        for place in sorted(place for place in out if isinstance(place, int)):
            positional.insert(place, None)
        self._wanted: dict[int | str | None, Any] = dict(enumerate(positional))
        self._wanted |= {each.parameter: each.value for each in args if each.parameter is not None}
        self._results = results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises TypeError or IndexError where the function does not return what `result` says,
        RuntimeError for a view that a tensor does not have."""
        given: dict[int | str | None, Any] = dict([*enumerate(args), *kwargs.items()])
        wanted = {place: self._wanted.get(place) for place in given}
        named = {
            each.name: given[place]
            for place, each in wanted.items()
            if isinstance(each, Argument) and isinstance(given[place], torch.Tensor)
        }
        for place, each in wanted.items():
            if isinstance(each, View):
                given[place] = each.of(given[place], named)
        returned = self.function(*(given[i] for i in range(len(args))), **{key: given[key] for key in kwargs})
        if not self._results:
            return returned
        found = tuple(each.of(returned, named) if isinstance(each, View) else returned for each in self._results)
        return found[0] if len(found) == 1 else found
