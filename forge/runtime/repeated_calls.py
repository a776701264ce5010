"""A call repeated with the same arguments but one, without Dynamo's guards on all of them.

Dynamo checks every parameter of a model before each call, which for one token may take longer than the kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_NEEDED = 2  # calls with the same inputs, before the same is assumed of a third


class _Call(NamedTuple):
    """A call of a program: the callable that Dynamo calls, its inputs, and the number of its results."""

    program: Callable[..., Any]
    inputs: tuple[Any, ...]
    results: int


class CallRecorder:
    """Recorder of the programs that a compiled function calls, on request. `wrap` is around each of them."""

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None

    def wrap(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call of a program, wrapped for recording."""

        def call(*inputs: Any) -> Any:
            results = program(*inputs)
            if self._calls is not None:
                self._calls.append(_Call(program, inputs, len(results)))
            return results

        return call

    @contextmanager
    def recording(self) -> Iterator[list[_Call]]:
        """Record the calls made in this context."""
        calls: list[_Call] = []
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None


class RepeatedCall:
    """A compiled function of one tensor, whose other arguments stay the same objects.

    Once two consecutive calls ran one program on the same inputs, and its only result was the function's, later calls
    run the program directly. Python code of the function does not run again; with a program of one result, and inputs
    that were the same twice, it has nothing left to do.

    Args:
        function: A compiled function of the tensor.
        recorder: The recorder of the function's programs.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], recorder: CallRecorder) -> None:
        self._function, self._recorder = function, recorder
        self._inputs: list[Any] | None = None  # of the last call, with None in place of the tensor
        self._alike = 0  # consecutive calls
        self._program: Callable[..., Any] | None = None
        self._place = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return function(x). x has the same metadata at each call."""
        if self._alike >= _NEEDED and self._program is not None and self._inputs is not None:
            inputs = self._inputs.copy()
            inputs[self._place] = x
            result: torch.Tensor = self._program(*inputs)[0]
            return result
        with self._recorder.recording() as calls:
            result = self._function(x)
        self._note(calls, x)
        return result

    def _note(self, calls: list[_Call], x: torch.Tensor) -> None:
        before, self._inputs = self._inputs, None
        places = [place for place, each in enumerate(calls[0].inputs) if each is x] if len(calls) == 1 else []
        if len(places) != 1 or calls[0].results != 1:
            self._alike = 0
            return
        program, inputs = calls[0].program, list(calls[0].inputs)
        self._place, inputs[places[0]] = places[0], None
        is_same = before is not None and program is self._program and _are_same(before, inputs)
        self._alike = self._alike + 1 if is_same else 1
        self._program, self._inputs = program, inputs


def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Return whether inputs are the same tensors and equal numbers."""
    return len(before) == len(after) and all(
        x is y or (not isinstance(x, torch.Tensor) and type(x) is type(y) and x == y)
        for x, y in zip(before, after, strict=True)
    )
