"""The functions around a program's call are one list, and the report names those of each call."""

import pytest
import torch

import forge
from forge.capture.handles import handle_of
from forge.runtime.plan import WRAPPERS


def _changes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp()


def test_names_are_unique() -> None:
    names = [each.name for each in WRAPPERS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("function", "requires_grad", "options", "wrappers"),
    [
        (torch.relu, False, {}, []),
        (torch.relu, True, {}, ["autograd"]),
        (_changes, False, {}, ["overlap"]),
        (torch.relu, False, {"check": "eager"}, ["check"]),
        (_Scaled().requires_grad_(False), False, {"freeze": True}, ["frozen weights"]),
    ],
)
def test_a_call_has_the_wrappers_whose_condition_holds(function, requires_grad, options, wrappers) -> None:
    jitted = forge.jit(function, executors=["torch"], cache=False, **options)
    jitted(torch.ones(2, 2, requires_grad=requires_grad))
    assert handle_of(jitted).latest.wrappers == wrappers


def test_a_program_under_autocast_runs_without_it() -> None:
    jitted = forge.jit(lambda x: x @ x, executors=["torch"], cache=False)
    with torch.autocast("cpu"):
        jitted(torch.ones(2, 2))
    assert handle_of(jitted).latest.wrappers == ["without autocast"]
