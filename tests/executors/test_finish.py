"""A fusion executor that compiles in the background: its functions are called after it has finished."""

from collections.abc import Callable, Mapping

import torch

import forge
from forge.capture.handles import handle_of
from forge.executors import Declined, FusionExecutor, claim, decline, resolve_executors
from forge.ir import BoundSymbol, Trace


class Late(FusionExecutor):
    """An executor whose functions cannot be called before `finish`, and those of regions with a call in `broken`
    never."""

    def __init__(self, broken: str = "") -> None:
        super().__init__("late")
        self.broken = broken
        self.fused = 0
        self.complete: set[Callable] = set()
        self.failed: dict[Callable, Declined] = {}
        self.started: list[Callable] = []

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return bound.symbol.name in ("mul", "add", "cos", "neg")

    def fuse(self, region: Trace) -> Callable:
        self.fused += 1
        inside = claim(region, resolve_executors(["torch"]))[0].python_callable()

        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            assert call in self.complete, "called before it was complete"
            return inside(*inputs)

        if self.broken in [bound.symbol.name for bound in region.bound_symbols]:
            self.failed[call] = decline("its kernel did not build")
        else:
            self.started.append(call)
        return call

    def finish(self) -> Mapping[Callable, Declined]:
        self.complete.update(self.started)
        return self.failed


def two_regions(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2 + 1) @ x).cos().neg()


def test_what_a_program_calls_is_complete_forward_and_backward() -> None:
    late = Late()
    x = torch.randn(3, 3, requires_grad=True)
    (ours,) = torch.autograd.grad(forge.jit(two_regions, executors=[late, "torch"])(x).sum(), x)
    (theirs,) = torch.autograd.grad(two_regions(x).sum(), x)
    torch.testing.assert_close(ours, theirs)
    assert late.complete and not late.failed


def test_a_region_that_is_not_complete_in_the_end_is_left_to_the_next_executor() -> None:
    late = Late(broken="cos")
    jitted = forge.jit(two_regions, executors=[late, "torch"])
    x = torch.randn(3, 3)
    torch.testing.assert_close(jitted(x), two_regions(x))
    who = {made.operation.rpartition(".")[2]: made for made in handle_of(jitted).reports[-1].claims}
    assert who["mul"].executor == "late" and who["cos"].executor == "torch"
    assert ("late", "its kernel did not build") in who["cos"].declined
    assert late.fused == 2  # the other one was not fused again


def test_a_trace_that_is_claimed_by_hand_can_be_called() -> None:
    x = torch.randn(3, 3)
    claimed, _ = claim(forge.trace(two_regions, x), [Late(), *resolve_executors(["torch"])])
    torch.testing.assert_close(claimed.python_callable()(x), two_regions(x))


def test_a_region_is_printed_by_its_name_with_its_calls_below() -> None:
    claimed, _ = claim(forge.trace(two_regions, torch.randn(3, 3)), [Late(), *resolve_executors(["torch"])])
    text = claimed.show(2)
    assert "\nfusion0 = forge.ir.printing.printed_object(" in text and " = fusion0(x)" in text and " = fusion1(" in text
    assert "    #   t3 = torch.cos(t2)" in text
