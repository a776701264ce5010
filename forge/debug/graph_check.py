"""Comparison of a program's results and gradients with the captured graph in eager. It finds calls that were recorded,
decomposed or differentiated wrongly, which a comparison of calls with torch's functions cannot."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from forge.compiler.program import Program
from forge.debug.eager_check import copy_as_leaf, differs, largest, same_random_numbers, tolerance_of
from forge.executors.errors import CheckError
from forge.torch_internals.pytree import tensor_leaves


def against_eager(call: Callable, eager: Callable, program: Program) -> Callable:
    """Wrap `call` to raise CheckError for a result, a mutated input or a gradient that differs from `eager`'s.
    Gradients are not compared if the program mutates an input that requires one."""
    names, mutated = program.trace.input_names, program.mutated
    compare = _Comparison(tolerance_of(program.trace))

    def run(*inputs: Any) -> Any:
        compares_gradients = torch.is_grad_enabled() and not any(inputs[i].requires_grad for i in mutated)
        copies = [copy_as_leaf(each) if isinstance(each, torch.Tensor) else each for each in inputs]
        with same_random_numbers():
            expected = eager(*copies)
        if compares_gradients and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
            gradients = _Gradients(compare, names, copies, tensor_leaves(expected))
            result = gradients.hook_outputs(call(*gradients.gate_inputs(inputs)))
        else:
            result = call(*inputs)
        compare("result", map(str, range(len(tensor_leaves(result)))), tensor_leaves(result), tensor_leaves(expected))
        compare(
            "changed input", [names[i] for i in mutated], [inputs[i] for i in mutated], [copies[i] for i in mutated]
        )
        return result

    return run


class _Comparison:
    """A comparison that raises CheckError for the first tensor that differs. within: as for `differs`."""

    def __init__(self, within: float) -> None:
        self._within = within

    def __call__(
        self, what: str, names: Iterable[str], actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> None:
        around = largest(expected)
        for name, one, other in zip(names, actual, expected, strict=True):
            reason = differs(one.detach(), other.detach(), self._within, around)
            if reason is not None:
                wrong = "a gradient rule" if what == "gradient of" else "what a call was recorded as, or consists of,"
                raise CheckError(
                    f"{what} {name} is not what eager gives: {reason}; each call gave what torch's functions give for "
                    f"it, so {wrong} is wrong",
                    actual=one.detach(),
                    expected=other.detach(),
                )


class _Gradients:
    """A recorder of the gradients of a program's results and inputs during the backward."""

    def __init__(
        self, compare: _Comparison, names: Sequence[str], copies: Sequence[Any], expected: Sequence[torch.Tensor]
    ) -> None:
        self._compare = compare
        self._names = names
        self._copies = copies
        self._expected = expected
        self._places: list[int] = []
        self._incoming: dict[int, torch.Tensor] = {}

    def gate_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs, with a gate on each that requires a gradient."""
        places = [i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor) and each.requires_grad]
        views = _In.apply(self, places, *[inputs[i] for i in places])
        gates = dict(zip(places, views, strict=True))
        return [gates.get(i, each) for i, each in enumerate(inputs)]

    def hook_outputs(self, result: Any) -> Any:
        """Return the result, with hooks that record the gradients of its tensors."""
        for index, tensor in enumerate(tensor_leaves(result)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, index=index: self._incoming.__setitem__(index, grad))
        return result

    def compare(self, places: Sequence[int], grads: Sequence[torch.Tensor | None]) -> None:
        """Compare the gradients of the inputs at these places with autograd's."""
        output_places = [place for place, grad in self._incoming.items() if grad is not None]
        differentiable_places = [place for place in output_places if self._expected[place].requires_grad]
        outputs = [self._expected[place] for place in differentiable_places]
        inputs = [self._copies[place] for place in places]
        incoming = [self._incoming[place] for place in differentiable_places]
        expected = torch.autograd.grad(outputs, inputs, incoming, retain_graph=True, allow_unused=True)
        self._incoming.clear()
        pairs = [(self._names[i], one, other) for i, one, other in zip(places, grads, expected, strict=True)]
        both = [
            (name, torch.zeros_like(other) if one is None else one, torch.zeros_like(one) if other is None else other)
            for name, one, other in pairs
            if not (one is None and other is None)
        ]
        self._compare("gradient of", [each[0] for each in both], [each[1] for each in both], [each[2] for each in both])


class _In(torch.autograd.Function):
    """The identity in the forward; a recorder of the program's input gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, places: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradients, ctx.places = gradients, places
        ctx.set_materialize_grads(False)
        return tuple([tensor.view_as(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        with torch.enable_grad():
            ctx.gradients.compare(ctx.places, grads)
        return (None, None, *grads)
