"""Functionalization: handles, storages and views, against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge import torchlang
from forge.api.functional import Direct
from forge.ir import TensorProxy, Trace, recording
from forge.ir.memory import Memory, ViewStep

CPU = torch.device("cpu")


def both(function: Callable, *inputs: torch.Tensor) -> Trace:
    """Return the recorded trace, after comparing forge and eager in results and changed inputs."""
    ours, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    expected = function(*theirs)
    direct = Direct(function, ["torch"])
    torch.testing.assert_close(direct(*ours), expected)
    torch.testing.assert_close(ours, theirs)
    ((_, compiled),) = direct.compiled.values()
    return compiled.traces[0]


# programs


def test_a_write_through_a_view_is_seen_by_its_base() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        y.view(2, 3).mul_(2)
        return y

    both(function, torch.randn(6))


def test_a_write_to_a_base_is_seen_by_its_views() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        view = y.view(2, 3)
        turned = view.transpose(0, 1)
        y.add_(1)
        return view, turned

    both(function, torch.randn(6))


def test_a_write_through_one_view_is_seen_by_another() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        rows, columns = y.view(2, 3), y.view(3, 2).transpose(0, 1)
        rows.mul_(3)
        columns.add_(1)
        return rows, columns, y

    both(function, torch.randn(6))


def test_an_input_that_is_written_is_written_at_the_end() -> None:
    def function(x: Any) -> Any:
        before = x + 0
        x.mul_(2)
        return before + x

    trace = both(function, torch.randn(3))
    assert "prims.copy_" not in [bound.symbol.id for bound in trace.bound_symbols]  # the trace itself is pure


def test_a_written_input_may_be_returned() -> None:
    both(lambda x: x.mul_(2), torch.randn(3))
    both(lambda x: (x.mul_(2), x.view(3, 1)), torch.randn(3))


def test_values_before_a_write_stay_as_they_were() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        before = y * 2
        y.add_(1)
        return before, y * 2

    both(function, torch.randn(3))


def test_an_operation_with_its_own_result_written_twice() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        y.add_(y)
        y.mul_(y)
        return y

    both(function, torch.randn(3))


def test_views_of_an_input_are_returned_as_views() -> None:
    x = torch.randn(2, 3)
    view = Direct(lambda x: x.transpose(0, 1), ["torch"])(x)
    view.zero_()
    assert torch.equal(x, torch.zeros(2, 3))


def test_outputs_that_share_memory_share_it_in_the_result() -> None:
    def function(x: Any) -> Any:
        y = x * 2
        return y, y.view(3, 2)

    y, view = Direct(function, ["torch"])(torch.ones(2, 3))
    view.zero_()
    assert torch.equal(y, torch.zeros(2, 3))


def test_an_input_returned_as_it_is_is_the_same_tensor() -> None:
    x = torch.ones(2)
    assert Direct(lambda x: x, ["torch"])(x).data_ptr() == x.data_ptr()


def test_nothing_is_replayed_until_something_is_written() -> None:
    trace = forge.trace(lambda x: x.view(6).transpose(0, -1) * x, torch.ones(6))
    assert [bound.symbol.name for bound in trace.bound_symbols].count("view") <= 1


def test_gradients_flow_through_a_write() -> None:
    def function(x: Any) -> Any:
        y = x * 1
        y.view(2, 3).mul_(3)
        return y * x

    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(Direct(function, ["torch"])(x).sum(), x)
    (theirs,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(ours, theirs)


# the memory itself


def memory_of_one() -> tuple[Trace, Memory, TensorProxy]:
    trace = Trace()
    x = trace.add_input(TensorProxy("x", (6,), torch.float32, CPU))
    return trace, trace.memory, x


def fresh(trace: Trace, *shape: int) -> TensorProxy:
    return trace.tensor(shape, torch.float32, CPU)


def test_a_handle_of_which_nothing_is_known_reads_as_itself() -> None:
    _, memory, x = memory_of_one()
    assert memory.read(x) is x and memory.read_all([x, (x, 3)]) == [x, (x, 3)]
    assert memory.ref(x).storage.root is x and memory.ref(x).storage.version == 0


def test_a_write_gives_every_handle_of_the_storage_a_new_value() -> None:
    trace, memory, x = memory_of_one()
    shown: list[TensorProxy] = []

    def show(base: TensorProxy) -> TensorProxy:
        shown.append(base)
        return fresh(trace, 2, 3)

    view, new = fresh(trace, 2, 3), fresh(trace, 6)
    memory.alias(view, x, ViewStep(show, (), {}, None, lambda base, value: pytest.fail("nothing to invert")))
    memory.write(x, new)
    assert memory.read(x) is new and shown == []  # a view is replayed once, when it is read
    assert memory.read(view) is memory.read(view) and shown == [new]
    assert memory.dirty == [memory.ref(x).storage] and memory.ref(view).storage.version == 1


def test_a_write_through_a_chain_inverts_each_view_in_turn() -> None:
    trace, memory, x = memory_of_one()
    inverted: list[tuple[str, TensorProxy]] = []

    def step(name: str) -> ViewStep:
        def invert(base: TensorProxy, value: TensorProxy) -> TensorProxy:
            inverted.append((name, value))
            return fresh(trace, 6)

        return ViewStep(lambda base: fresh(trace, 6), (), {}, None, invert)

    first, second, new = (fresh(trace, 6) for _ in range(3))
    memory.alias(first, x, step("first"))
    memory.alias(second, first, step("second"))
    memory.write(second, new)
    assert [name for name, _ in inverted] == ["second", "first"] and inverted[0][1] is new
    assert memory.read(second) is new


def test_a_step_shows_one_of_several_outputs() -> None:
    pieces = ["a", "b"]
    assert ViewStep(lambda base: pieces, (), {}, 1, lambda base, value: None).show("x") == "b"


def test_memory_that_may_be_shared_cannot_be_written() -> None:
    trace, memory, x = memory_of_one()
    maybe = fresh(trace, 6)
    memory.share(maybe, x, "torch.reshape")
    for handle in (x, maybe):
        with pytest.raises(NotImplementedError, match=r"whether torch\.reshape returned a view of it or a copy"):
            memory.write(handle, fresh(trace, 6))


def test_a_storage_is_silent_until_a_write_under_grad() -> None:
    trace, memory, x = memory_of_one()
    memory.write(x, fresh(trace, 6), silently=True)
    assert memory.ref(x).storage.silently
    memory.write(x, fresh(trace, 6))
    assert not memory.ref(x).storage.silently


def test_writes_are_recorded_in_the_trace_that_is_being_recorded() -> None:
    trace, memory, x = memory_of_one()
    with recording(trace, torchlang.language):
        y = x.view(2, 3)
        y.mul_(2)
        value = memory.read(x)
    assert value.shape == (6,) and value is not x
