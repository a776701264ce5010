"""Attention without a kernel in torch is composed of forge's calls in fused programs."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from forge.executors.torchex.attention import ATTENDING
from forge.ir import BoundSymbol


def attend(**options: object) -> Callable:
    def program(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query * 2, key, value, mask, **options).tanh()

    return program


def inputs(*wanted: str, heads: int = 4, hidden: bool = False) -> list[torch.Tensor]:
    shapes = {"query": (2, 4, 9, 8), "key": (2, heads, 9, 8), "value": (2, heads, 9, 8), "mask": (1, 4, 9, 9)}
    found = {name: torch.randn(shape) for name, shape in shapes.items()}
    if hidden:
        found["mask"][:, :, 3] = -torch.inf
    return [each.requires_grad_(name in wanted) for name, each in found.items()]


def flow(function: Callable, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [each for each in args if each.requires_grad])]


def runs_in_torch(jitted: Callable) -> bool:
    programs = forge.last_traces(jitted)[-1], forge.last_backward_traces(jitted)[-1]
    return any(bound.symbol.id in ATTENDING for trace in programs for bound in trace.bound_symbols)


ALL = ("query", "key", "value", "mask")
COMPOSED: dict[str, tuple[Callable, list[torch.Tensor]]] = {
    "a bias with a gradient": (attend(), inputs(*ALL)),
    "a bias alone has a gradient": (attend(scale=0.3), inputs("mask")),
    "a bias of one number": (attend(), [*inputs(*ALL[:3])[:3], torch.randn((), requires_grad=True)]),
    "rows that see nothing": (attend(), inputs(*ALL, hidden=True)),
    "groups of queries": (attend(enable_gqa=True), inputs(*ALL, heads=2)),
    "dropout on a CPU": (attend(dropout_p=0.3), inputs(*ALL[:3])),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_regions_fuse_what_torch_would_compose(name: str) -> None:
    program, args = COMPOSED[name]
    jitted = forge.jit(program)
    torch.testing.assert_close(flow(jitted, args), flow(program, args), equal_nan=True)
    assert not runs_in_torch(jitted)


def prims_of(bound: BoundSymbol) -> Iterator[str]:
    if not bound.subsymbols:
        yield bound.symbol.name
    for each in bound.subsymbols:
        yield from prims_of(each)


def test_rows_that_see_nothing_cost_no_pass_over_the_scores() -> None:
    jitted = forge.jit(attend())
    flow(jitted, inputs(*ALL))
    (stage,) = [each for each in forge.last_traces(jitted) if each.stage == "decompose_attention"]
    names = [name for bound in stage.bound_symbols for name in prims_of(bound)]
    assert [name for name in names if name in ("all", "amax", "amin", "any", "prod", "sum")] == ["amax", "sum"]


@pytest.mark.parametrize(
    "options", [{"executors": ["torch"]}, {"numerics": "eager"}], ids=["unfused", "eager numerics"]
)
def test_programs_that_round_as_eager_does_keep_torchs_composition(options: dict) -> None:
    program, args = COMPOSED["a bias with a gradient"]
    jitted = forge.jit(program, **options)
    torch.testing.assert_close(flow(jitted, args), flow(program, args))
    assert runs_in_torch(jitted)


def test_what_a_kernel_takes_stays_with_it() -> None:
    jitted = forge.jit(attend())
    flow(jitted, inputs("query", "key", "value"))
    assert runs_in_torch(jitted)


def test_a_mask_without_a_gradient_in_a_program_that_has_some_stays_with_its_kernel() -> None:
    def program(query: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            bias = mask * weight
        return F.scaled_dot_product_attention(query * weight, query, query, bias).tanh()

    query, _, _, mask = inputs()
    jitted, args = forge.jit(program), (query, mask, torch.randn((), requires_grad=True))
    torch.testing.assert_close(flow(jitted, args), flow(program, args))
    assert runs_in_torch(jitted)


def test_the_users_choice_of_no_kernel_is_followed() -> None:
    program, args = attend(), inputs("query")
    jitted = forge.jit(program)
    with sdpa_kernel([SDPBackend.MATH]):
        torch.testing.assert_close(flow(jitted, args), flow(program, args))
    assert not runs_in_torch(jitted)
