"""Writes to inputs as one call: the cases in which they join, those in which they do not, and equal effects."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge import prims
from forge.executors import OperatorExecutor, claim, resolve_executors
from forge.executors.torchex.memory import copies, copy_each_
from forge.ir import Tag, Trace
from forge.transforms import join_copies

N = 3


def joined(function: Callable, *inputs: torch.Tensor, executors: Any = ("torch",)) -> Trace:
    claimed, _ = claim(forge.trace(function, *inputs), resolve_executors([*executors]))
    return join_copies(claimed, copies)


def written(trace: Trace) -> list[str]:
    """Return each call by its name, a joined one with its targets."""
    return [
        f"copy {', '.join(target.name for target in bound.args[0])}"
        if bound.symbol is copies
        else bound.symbol.name.rpartition(".")[2]
        for bound in trace.bound_symbols
    ]


def inputs(**dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = dtypes.get("dtype", torch.float32)
    return [torch.randn(N, N, generator=generator).to(dtype) for _ in range(4)]


def assert_same_writes(trace: Trace, function: Callable, *given: torch.Tensor) -> None:
    """Check that a trace leaves its inputs in the same state as the claimed one without joined copies."""
    ours, theirs = [[each.clone() for each in given] for _ in range(2)]
    claimed, _ = claim(forge.trace(function, *given), resolve_executors(["torch"]))
    trace.python_callable()(*ours)
    claimed.python_callable()(*theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert [each._version for each in ours] == [each._version for each in theirs]


def test_copies_join_at_the_place_of_the_last() -> None:
    def function(a: Any, b: Any, x: Any, y: Any) -> Any:
        prims.copy_(a, prims.neg(x))
        out = prims.exp(x)
        prims.copy_(b, prims.sin(y))
        return prims.neg(out)

    trace = joined(function, *inputs())
    assert written(trace) == ["neg", "exp", "sin", "copy a, b", "neg"]
    assert trace.stage == "join_copies"
    assert_same_writes(trace, function, *inputs())
    (call,) = [bound for bound in trace.bound_symbols if bound.symbol is copies]
    assert Tag.EFFECT in call.all_tags
    assert "copy_each_([a, b], [" in str(trace)


def test_copies_of_a_dtype_join() -> None:
    def function(a: Any, b: Any, c: Any, d: Any) -> Any:
        for target in (a, c, b, d):
            prims.copy_(target, prims.neg(target))

    a, b, c, d = inputs()
    given = [a, b, c.to(torch.int64), d.to(torch.int64)]
    trace = joined(function, *given)
    assert written(trace) == ["neg", "neg", "neg", "copy a, b", "neg", "copy c, d"]
    assert_same_writes(trace, function, *given)


def read(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    out = prims.neg(a)
    prims.copy_(b, y)
    return out


def view(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    out = prims.permute(a, (1, 0))
    prims.copy_(b, y)
    return out


def read_through_a_view(a: Any, b: Any, x: Any, y: Any) -> Any:
    shown = prims.permute(a, (1, 0))
    prims.copy_(a, x)
    out = prims.neg(shown)
    prims.copy_(b, y)
    return out


def write_the_source(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, b)
    prims.copy_(b, y)


def write_the_source_through_a_view(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, prims.permute(b, (1, 0)))
    prims.copy_(b, y)


def write_the_source_unseen(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_data_(x, y)
    prims.copy_(b, y)


def read_by_a_copy(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_(b, a)


def write_twice(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_(a, y)


def write_to_a_view(a: Any, b: Any, x: Any, y: Any) -> Any:
    shown = prims.permute(a, (1, 0))
    prims.copy_(shown, x)
    prims.copy_(a, y)


def write_to_views(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(prims.permute(a, (1, 0)), x)
    prims.copy_(prims.permute(b, (1, 0)), y)


def set_the_mode(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.set_grad_enabled(True)
    prims.copy_(b, y)


def broadcast(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_(b, prims.sum(y, (0,)))


def convert(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_(b, prims.convert_element_type(y, torch.float16))


REFUSED = (
    read,
    view,
    read_through_a_view,
    write_the_source,
    write_the_source_through_a_view,
    write_the_source_unseen,
    read_by_a_copy,
    write_twice,
    write_to_a_view,
    write_to_views,
    set_the_mode,
    broadcast,
    convert,
)


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_copies_stay_apart_where_joining_them_changes_something(function: Callable) -> None:
    trace = joined(function, *inputs())
    assert not any(bound.symbol is copies for bound in trace.bound_symbols)
    assert trace.stage != "join_copies"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda b: prims.permute(b, (0, 1)), (N, N)),
        (lambda b: prims.permute(b, (1, 0)), (N, N)),
        (lambda b: prims.broadcast_in_dim(b, (2, N, N), (1, 2)), (2, N, N)),
        (lambda b: prims.broadcast_in_dim(b, (N, N, 1), (0, 1)), (N, N, 1)),
        (lambda b: prims.broadcast_in_dim(b, (N, N, 2, 2), (0, 1)), (N, N, 2, 2)),
    ],
)
def test_views_by_operators_of_torch_share_memory(make: Callable, shape: tuple[int, ...]) -> None:
    def function(a: Any, b: Any, y: Any) -> None:
        prims.copy_(a, make(b))
        prims.copy_(b, y)

    a, b, y = torch.zeros(shape), torch.ones(N, N), torch.zeros(N, N)
    assert written(joined(function, a, b, y))[-2:] == ["copy_", "copy_"]


def write(a: Any, b: Any, x: Any, y: Any) -> Any:
    prims.copy_(a, x)
    prims.copy_(b, y)


def test_complex_copies_stay_apart() -> None:
    """torch's function does not write to conjugated views."""
    assert written(joined(write, *inputs(dtype=torch.complex64))) == ["copy_", "copy_"]


def test_copies_of_another_executor_stay() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(prims.copy_, torch.Tensor.copy_)
    assert written(joined(write, *inputs(), executors=(mine, "torch"))) == ["copy_", "copy_"]


def test_negated_views_are_written_to() -> None:
    target = torch.zeros(N, dtype=torch.complex64)
    negated = target.conj().imag
    assert negated.is_neg()
    copy_each_([negated, other := torch.zeros(N)], [torch.ones(N), torch.ones(N)])
    assert torch.equal(target.imag, -torch.ones(N)) and torch.equal(other, torch.ones(N))


# programs


def norms(count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(count)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{}, {"executors": ["torch"]}, {"check": "eager"}], ids=str)
def test_batch_norms_write_their_statistics_together(grad: bool, options: dict[str, Any]) -> None:
    ours = norms()
    theirs = copy.deepcopy(ours)
    before = [each._version for each in ours.buffers()]
    jitted = forge.jit(ours, **options)
    with torch.set_grad_enabled(grad):
        for batch in torch.randn(3, 4, 6):
            torch.testing.assert_close(jitted(batch), theirs(batch))
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert [each._version for each in ours.buffers()] == [version + 3 for version in before]
    final = forge.last_traces(jitted)[-1]
    calls = [bound for bound in final.bound_symbols if Tag.EFFECT in bound.all_tags and bound.args and grad]
    assert [len(bound.args[0]) for bound in calls] == ([3, 6] if grad else [])
    assert str(final).count("copy_each_(") == 2 and ".copy_(" not in str(final)


def test_writes_that_autograd_records_stay_apart() -> None:
    """Both are in the epilogue: gradients flow from the written values."""

    def program(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> None:
        a.mul_(x)
        b.add_(x)

    found = []
    for function in (forge.jit(program), program):
        a, b, x = torch.ones(3), torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
        function(a, b, x)
        (a * b).sum().backward()
        found.append((a, b, x.grad))
    torch.testing.assert_close(*found)
