"""cuda_graphs="auto": programs that are called often are recorded without a request. Without a GPU, the recorder of
tests/executors/test_cuda_graphs.py stands in, with programs on the CPU."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.capture.handles import handle_of
from forge.compiler.cuda_graph_partition import LIST
from forge.ir import BoundSymbol, Trace
from forge.ir.printing import DEL
from forge.runtime import cuda_graphs, cuda_recorder, cuda_results, tiering
from forge.runtime.buckets import bucket_bytes_at
from forge.runtime.cuda_graphs import Graph
from forge.runtime.cuda_memory import Pool
from forge.runtime.cuda_results import HandingOut
from forge.runtime.tiering import CALLS_TO_RECORD
from tests.executors import test_cuda_graphs
from tests.executors.test_cuda_graphs import Called, Double, data, graphs, train

device = test_cuda_graphs.device

EXECUTORS = ["torch"]
MANY = CALLS_TO_RECORD + 10


def deep(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(device)


def recordings(jitted: Any) -> list[int]:
    return [each.recordings for each in graphs(jitted)]


def calls(trace: Trace) -> list[BoundSymbol]:
    return [bound for bound in trace.bound_symbols if bound.symbol not in (DEL, LIST)]


def call_often(jitted: Callable, function: Callable, *args: torch.Tensor) -> Any:
    """Return the last result of many calls, after comparing each call with the function."""
    for _ in range(MANY):
        result = jitted(*args)
        torch.testing.assert_close(result, function(*args))
    return result


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_training_follows_eager(device: str, dropout: float, accumulate: int) -> None:
    ours, theirs = deep(device, dropout), deep(device, dropout)
    jitted = forge.jit(ours)
    torch.manual_seed(3)
    found = train(jitted, ours, data(device, 2 * MANY), accumulate=accumulate)
    torch.manual_seed(3)
    expected = train(theirs, theirs, data(device, 2 * MANY), accumulate=accumulate)
    torch.testing.assert_close(found, expected)
    assert len(graphs(jitted)) == 2 and all(recordings(jitted))
    assert all(each.failed is None for each in graphs(jitted))
    assert "CUDA graphs: 2" in str(forge.explain(jitted))


def test_gradients_leave_a_recorded_backward_in_buckets(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = deep(device), deep(device)
    jitted = forge.jit(ours)
    with bucket_bytes_at(100):  # as under DistributedDataParallel
        found = train(jitted, ours, data(device, MANY))
    torch.testing.assert_close(found, train(theirs, theirs, data(device, MANY)))
    _, *backward = graphs(jitted)
    assert len(backward) >= 3 and all(recordings(jitted))
    assert "outside of CUDA graphs" not in str(forge.explain(jitted))
    events: list[str] = []
    replay = Graph.__call__
    monkeypatch.setattr(Graph, "__call__", lambda self, *args: events.append("graph") or replay(self, *args))
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    loss = jitted(*data(device, 1)).square().sum()
    events.clear()
    loss.backward()
    assert events[0] == "graph" and events.index("7.weight") < events.index("graph", 1)
    assert "0.weight" in events[len(events) - events[::-1].index("graph") :]


def test_nothing_is_recorded_at_first(device: str) -> None:
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(module)
    with torch.no_grad():
        for _ in range(CALLS_TO_RECORD - 1):
            jitted(x)
        assert not graphs(jitted)
        call_often(jitted, module, x)
    assert recordings(jitted)[0] > 0


@pytest.mark.parametrize("option", ["cuda_graphs", "deterministic", "check", "background"])
def test_it_can_be_turned_off(device: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x,) = deep(device), data(device, 1)
    options = {"cuda_graphs": {"cuda_graphs": False}, "check": {"check": "eager"}}.get(option, {})
    if option == "background":
        monkeypatch.setenv("FORGE_BACKGROUND", "0")
    torch.use_deterministic_algorithms(option == "deterministic")
    try:
        jitted = forge.jit(module, executors=EXECUTORS, **options)
        call_often(jitted, module, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not graphs(jitted)


def test_without_room_a_program_stays_as_it_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cuda_graphs.recorder()), "has_room", lambda recorder: False)
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(module, executors=EXECUTORS)
    call_often(jitted, module, x)
    assert not graphs(jitted)


def test_memory_that_fills_up_later_ends_recording(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(module, executors=EXECUTORS)
    for _ in range(CALLS_TO_RECORD):
        jitted(x)
    monkeypatch.setattr(type(cuda_graphs.recorder()), "has_room", lambda recorder: False)
    call_often(jitted, module, x)
    assert graphs(jitted)[0].recordings == 0
    assert "the device has little memory left" in str(forge.explain(jitted))


def test_large_inputs_that_move_are_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_COPY_BYTES", 8)
    module = deep(device)
    jitted = forge.jit(module, executors=EXECUTORS)
    for x in data(device, 2 * MANY):
        torch.testing.assert_close(jitted(x), module(x))
    assert "inputs are elsewhere at each call" in str(graphs(jitted)[0].failed)


def test_nothing_is_recorded_for_another_device_than_the_current_one(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(module, executors=EXECUTORS)
    with monkeypatch.context() as patch:
        patch.setattr(type(cuda_graphs.recorder()), "is_on", lambda recorder, device: False)
        call_often(jitted, module, x)
    assert recordings(jitted)[0] == 0
    call_often(jitted, module, x)
    assert recordings(jitted)[0] > 0


def test_sizes_that_come_again_are_recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "_gpu_is_idle", lambda: True)
    module = deep(device)
    jitted = forge.jit(module, dynamic=True, executors=EXECUTORS)
    inputs = {rows: data(device, 1, rows=rows) for rows in (5, 3)}
    counts = []
    with torch.no_grad():
        for rows in (5, 3, 5):
            call_often(jitted, module, *inputs[rows])
            counts += recordings(jitted)
    assert 0 < counts[0] < counts[1] == counts[2]


def test_sizes_that_never_come_again_are_not_recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "_gpu_is_idle", lambda: True)
    module = deep(device)
    jitted = forge.jit(module, dynamic=True, executors=EXECUTORS)
    with torch.no_grad():
        for rows in range(2, 90):
            (x,) = data(device, 1, rows=rows)
            torch.testing.assert_close(jitted(x), module(x))
    (graph,) = graphs(jitted)
    assert not graph.recordings
    assert graph.failed == "its sizes are others at each call"


def test_training_with_symbolic_sizes_is_not_recorded(device: str) -> None:
    module = deep(device)
    jitted = forge.jit(module, dynamic=True, executors=EXECUTORS)
    for rows in (5, 3):
        call_often(jitted, module, *data(device, 1, rows=rows))
    assert not graphs(jitted)


def test_views_of_inputs_stay_views(device: str) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = ((x @ y).tanh() * 2).exp() @ y
        return z.relu(), x.t()[1:], y, z.t()

    x, y = (torch.randn(4, 4, device=device) for _ in range(2))
    jitted = forge.jit(program, executors=EXECUTORS)
    _, view, same, _ = call_often(jitted, program, x, y)
    assert recordings(jitted) == [2]
    assert view.data_ptr() == x.t()[1:].data_ptr() and same.data_ptr() == y.data_ptr()


def test_views_of_inputs_that_move_stay_views(device: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (((x @ x).tanh() * 2).exp() @ x).relu(), x.view(16)

    jitted = forge.jit(program, executors=EXECUTORS)
    for _ in range(2 * MANY):
        x = torch.randn(4, 4, device=device)
        result, view = jitted(x)
        torch.testing.assert_close(result, program(x)[0])
        assert view.data_ptr() == x.data_ptr()


def test_results_that_share_memory_share_it_in_their_copies(device: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = ((x @ x).tanh() * 2).exp() @ x
        return z, z.t(), z.view(-1)[2:], z[:, ::2]

    jitted, x = forge.jit(program, executors=EXECUTORS), torch.randn(4, 4, device=device)
    held = []
    for _ in range(MANY):
        ours, theirs = jitted(x), program(x)
        held.append(ours)  # so that results are copied
        for results in (ours, theirs):
            results[0].add_(1)
            results[2].mul_(2)
        torch.testing.assert_close(ours, theirs)
        assert [each.stride() for each in ours] == [each.stride() for each in theirs]
    assert recordings(jitted) == [2]


@pytest.mark.parametrize("moves", [False, True])
def test_an_input_that_changed_before_the_backward_is_an_error(device: str, moves: bool) -> None:
    """The backward reads a view of the input; if the input does not move, each call has another tensor in its
    memory."""
    weight = torch.randn(4, 4, device=device, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        return ((x.t() @ weight).tanh() * 2).exp() @ weight

    jitted, x = forge.jit(program, executors=EXECUTORS), torch.randn(4, 4, device=device)
    for change in [False] * 6 * MANY + [True] * 3:
        x = torch.randn(4, 4, device=device) if moves else x.data
        ours, theirs = jitted(x), program(x)
        if change:
            x.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                ours.sum().backward()
        else:
            gradients = [torch.autograd.grad(each.sum(), weight) for each in (ours, theirs)]
            torch.testing.assert_close(*gradients)
    assert all(recordings(jitted))


def test_inputs_that_change_are_written(device: str) -> None:
    def program(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = ((x @ x).tanh() * 2).exp() @ x
        total += y
        return y.relu() + total

    jitted, x = forge.jit(program, executors=EXECUTORS), torch.randn(4, 4, device=device)
    ours, theirs = (torch.zeros(4, 4, device=device) for _ in range(2))
    for _ in range(MANY):
        torch.testing.assert_close(jitted(x, ours), program(x, theirs))
        torch.testing.assert_close(ours, theirs)
    assert graphs(jitted)[0].recordings


def test_batch_norms_change_their_statistics(device: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)))

    ours, theirs = net().to(device), net().to(device)
    jitted = forge.jit(ours, executors=EXECUTORS)
    for batch in data(device, 2 * MANY):
        torch.testing.assert_close(jitted(batch), theirs(batch))
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert graphs(jitted)[0].recordings and graphs(jitted)[0].failed is None
    assert len(calls(handle_of(jitted).reports[-1].recorded[0])) == 1  # the statistics are written in the graph
    ours.eval()
    statistics = ours[0][1].running_mean
    version = statistics._version
    ours.train()
    jitted(data(device, 1)[0])
    assert statistics._version > version


def test_an_input_that_is_written_to_and_moves_is_not_copied(device: str) -> None:
    def program(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = ((x @ x).tanh() * 2).exp() @ x
        total.view(-1).copy_(y.view(-1))
        return y.relu()

    jitted, x = forge.jit(program, executors=EXECUTORS), torch.randn(4, 4, device=device)
    for _ in range(2 * MANY):
        ours, theirs = (torch.zeros(4, 4, device=device) for _ in range(2))
        torch.testing.assert_close(jitted(x, ours), program(x, theirs))
        torch.testing.assert_close(ours, theirs)
    assert "written to" in str(graphs(jitted)[0].failed)


def test_a_cache_that_is_replaced_now_and_then_is_recorded_again(device: str) -> None:
    """Each call of generate replaces its cache."""

    def step(x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, ((x @ x).tanh() * 2).exp()[:1])
        return (cache.relu() @ x).sin()

    jitted, held = forge.jit(step, executors=EXECUTORS), []
    with torch.no_grad():
        for _ in range(2 * cuda_graphs._MOST):
            ours, theirs = (torch.zeros(8, 4, device=device) for _ in range(2))
            held.append(ours)  # so that the next one has another address
            for at in range(MANY):
                x, position = torch.randn(4, 4, device=device), torch.tensor([at % 8], device=device)
                torch.testing.assert_close(jitted(x, ours, position), step(x, theirs, position))
                torch.testing.assert_close(ours, theirs)
    (graph,) = graphs(jitted)
    assert graph.failed is None and graph.in_vain == 0
    assert graph.recordings >= len(held) - 1 and len(graph._recorded) == 1


def test_draws_on_another_device_do_not_part_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are on the meta device here, so the CPU is another device."""
    double = Double()
    double.device_type = "meta"
    monkeypatch.setattr(cuda_recorder, "_recorder", double)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            torch.rand([])
            x = x.sin() + 1
        return x.cos() * 2

    jitted = forge.jit(program, executors=EXECUTORS, cuda_graphs=True)
    jitted(torch.ones(3, device="meta"))
    final = calls(forge.last_traces(jitted)[-1])
    assert [isinstance(bound.symbol.op, Graph) for bound in final] == [False, False, False, True]


def test_draws_on_another_device_do_not_keep_a_program_from_being_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speech models draw a number on the CPU for each layer."""
    double = Double()
    double.device_type = "meta"
    monkeypatch.setattr(cuda_recorder, "_recorder", double)
    monkeypatch.setitem(tiering._RATES, "meta", tiering._RATES["cpu"])

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            if torch.rand([]) < 0.0:
                continue
            x = x.sin() + 1
        return x

    jitted = forge.jit(program, executors=EXECUTORS)
    for _ in range(CALLS_TO_RECORD + 1):
        jitted(torch.ones(3, device="meta"))
    assert forge.explain(jitted).graphs == 1
    assert len(graphs(jitted)) == 1


@pytest.mark.parametrize("moves", [0, 1])
def test_each_input_that_is_written_to_at_once_is_known(device: str, moves: int) -> None:
    def program(x: torch.Tensor, *totals: torch.Tensor) -> torch.Tensor:
        y = ((x @ x).tanh() * 2).exp() @ x
        for total in totals:
            total += y
        return y.relu()

    jitted, x = forge.jit(program, executors=EXECUTORS), torch.randn(4, 4, device=device)
    ours, theirs = ([torch.zeros(4, 4, device=device) for _ in range(2)] for _ in range(2))
    for _ in range(2 * MANY):
        for totals in (ours, theirs):
            totals[moves] = totals[moves].clone()
        torch.testing.assert_close(jitted(x, *ours), program(x, *theirs))
        torch.testing.assert_close(ours, theirs)
    assert "written to" in str(graphs(jitted)[0].failed)
    assert "join_copies" in [trace.stage for trace in forge.last_traces(jitted)]


def test_draws_on_another_device_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Double()
    double.device_type = "meta"
    monkeypatch.setattr(cuda_recorder, "_recorder", double)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.bernoulli(x.sin().add(1).new_full((3,), 0.5, device="cpu") * x.cos().shape[0] / 6)
        y = (x.sin() + 1).exp()
        second = nn.functional.dropout(y.to("cpu"), 0.5)
        return (y * 2).cos() + 1, first, second, torch.rand(3)

    jitted = forge.jit(program, executors=EXECUTORS, cuda_graphs=True)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        jitted(torch.ones(3, device="meta"))
    final = [bound.symbol.name for bound in forge.last_traces(jitted)[-1].bound_symbols]
    draws = [name for name in final if name in ("bernoulli", "dropout", "rand")]
    assert draws == ["bernoulli", "dropout", "rand"]


@pytest.mark.parametrize("training", [True, False])
def test_results_and_gradients_may_be_held(device: str, training: bool) -> None:
    module = deep(device)
    jitted = forge.jit(module, executors=EXECUTORS)
    held: list[list[torch.Tensor]] = []
    for model in (jitted, module):
        held.append([])
        for batch in data(device, 2 * MANY):
            with torch.set_grad_enabled(training):
                held[-1].append(model(batch))
            if training:
                held[-1] += torch.autograd.grad(held[-1][-1].square().sum(), list(module.parameters()))
    torch.testing.assert_close(*held)
    assert recordings(jitted) and all(recordings(jitted))


@pytest.mark.parametrize("cheap", [True, False])
def test_results_are_handed_out_in_turn(device: str, cheap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recordings take twice the memory, so results that are cheap to copy are copied."""
    if not cheap:
        monkeypatch.setattr(cuda_results, "_LARGE", 1)
    module, (x,) = deep(device).eval(), data(device, 1)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        call_often(jitted, module, x)  # holds a result while the next one is computed
        assert recordings(jitted) == [2]
        addresses = {jitted(x).data_ptr() for _ in range(6)}
        assert cheap or len(addresses) == 1  # none is held
        results = [jitted(x) for _ in range(6)]
        assert recordings(jitted) == [2 if cheap else 3]
        assert len(graphs(jitted)[0]._recorded) == (1 if cheap else 3)
        for _ in range(40):
            jitted(x)
        assert len(graphs(jitted)[0]._recorded) == 1  # the others were not needed
    assert len({each.data_ptr() for each in results}) == 6


@pytest.mark.parametrize("held", [False, True])
def test_large_results_are_handed_out_while_the_caller_drops_them(
    device: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are a language model's logits and the tensors that a forward saves."""
    monkeypatch.setattr(cuda_results, "_LARGE", 32)
    ours, theirs = deep(device), deep(device)
    jitted, batches = forge.jit(ours, executors=EXECUTORS), data(device, 2 * MANY)
    addresses = []
    for batch in batches:
        out = jitted(batch)
        expected = theirs(batch)
        torch.testing.assert_close(out, expected)
        addresses.append(out.data_ptr())
        gradients = [torch.autograd.grad(each.square().sum(), module.parameters())
                     for each, module in ((out, ours), (expected, theirs))]  # fmt: skip
        torch.testing.assert_close(*gradients)
        if not held:
            del out
    forward, _ = graphs(jitted)
    assert forward.recordings == 1 + held  # another one, whose results are copied
    (recorded,) = forward._recorded
    assert recorded.results.handing_out is (HandingOut.COPIES if held else HandingOut.LARGE)
    assert held or len(set(addresses[-4:])) == 1


def donated(jitted: Any) -> list[int]:
    return [len(each._donated) for graph in graphs(jitted) for each in graph._recorded]


def test_a_backward_uses_the_memory_of_what_its_forward_saved(device: str) -> None:
    ours, theirs = deep(device), deep(device)
    jitted = forge.jit(ours, executors=EXECUTORS)
    for batch in data(device, 2 * MANY):
        for model, module in ((jitted, ours), (theirs, theirs)):
            module.zero_grad()
            model(batch).square().sum().backward()
        torch.testing.assert_close(*[[each.grad for each in module.parameters()] for module in (ours, theirs)])
    assert recordings(jitted) == [1, 1] and donated(jitted)[1] > 1


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("hold", ["graph", "saved", "gradients", "nothing"])
def test_donated_memory_that_others_hold_is_not_written(device: str, hold: str, once: bool) -> None:
    """After the saved tensors were donated, the graph, a saved tensor, or the gradients are held while others run."""
    ours, theirs = deep(device), deep(device)
    jitted = forge.jit(ours, executors=EXECUTORS)
    other = forge.jit(lambda x: ((x @ x.t()).tanh() * 2).exp(), executors=EXECUTORS)
    held: list[list[Any]] = [[], []]
    for step, batch in enumerate(data(device, 4 * MANY)):
        holds = step > MANY and (not once or step % 7 == 0)
        for model, module, kept in ((jitted, ours, held[0]), (theirs, theirs, held[1])):
            if hold == "nothing" or not holds:
                module.zero_grad()
                kept.clear()
            loss = model(batch).square().sum()
            saved = loss.grad_fn.next_functions[0][0].next_functions[0][0] if model is jitted else None
            if hold == "saved" and holds and saved is not None:
                kept.append(saved.saved_tensors)
                copies = [None if each is None else each.clone() for each in kept[-1]]
            loss.backward(retain_graph=hold == "graph" and holds)
            if hold == "graph" and holds:
                with torch.no_grad():
                    other(batch)
                loss.backward()
        if hold == "saved" and holds:
            torch.testing.assert_close(list(kept_saved := held[0][-1]), copies)
            del kept_saved
        torch.testing.assert_close(*[[each.grad for each in module.parameters()] for module in (ours, theirs)])
        torch.testing.assert_close(other(batch), ((batch @ batch.t()).tanh() * 2).exp())
    assert all(each.failed is None for each in graphs(jitted))


def test_values_between_graphs_are_donated(device: str) -> None:
    """A call outside of graphs separates them; the second reads the first's results for the last time."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() + 1).exp() * 2
        torch._assert_async((y > 0).all())
        return ((y * 2).cos() + 1) @ y.t()

    (x,) = data(device, 1)
    jitted = forge.jit(program, executors=EXECUTORS, cuda_graphs=True)
    for _ in range(MANY):
        torch.testing.assert_close(jitted(x), program(x))
    assert donated(jitted) == [0, 1]


def test_a_recording_that_fails_gives_its_inputs_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = deep(device), deep(device)
    jitted = forge.jit(ours, executors=EXECUTORS)
    double = type(cuda_recorder.recorder())
    record, made = double.record, []

    def fail_later(recorder: Any, *args: Any) -> Any:
        made.append(record(recorder, *args))
        if len(made) % 2 == 0:  # of each step, the backward
            raise RuntimeError("this cannot be recorded")
        return made[-1]

    monkeypatch.setattr(double, "record", fail_later)
    for batch in data(device, 2 * MANY):
        for model, module in ((jitted, ours), (theirs, theirs)):
            module.zero_grad()
            model(batch).square().sum().backward()
        torch.testing.assert_close(*[[each.grad for each in module.parameters()] for module in (ours, theirs)])
    assert [each.failed for each in graphs(jitted)] == [None, "RuntimeError: this cannot be recorded"]


def test_forwards_before_their_backwards(device: str) -> None:
    ours, theirs = deep(device), deep(device)
    jitted = forge.jit(ours, executors=EXECUTORS)
    for model, module in ((jitted, ours), (theirs, theirs)):
        for batch in data(device, MANY):
            model(batch).sum().backward()
        module.zero_grad()
        losses = [model(batch).square().sum() for batch in data(device, 6)]
        for loss in losses:
            loss.backward()
    gradients = [[parameter.grad for parameter in module.parameters()] for module in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_a_program_from_disk_is_recorded(device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FORGE_CACHE", "1")
    for _ in range(2):
        torch._dynamo.reset()
        module, (x,) = deep(device), data(device, 1)
        jitted = forge.jit(module)
        call_often(jitted, module, x)
        assert "CUDA graphs: " in str(forge.explain(jitted))
    (report,) = handle_of(jitted).reports
    assert report.cached


def test_threads_share_a_recorded_program(device: str) -> None:
    module, batches = deep(device).eval(), data(device, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        expected = [module(batch) for batch in batches]
        call_often(jitted, module, batches[0])
    wrong: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                found = [jitted(batch) for batch in batches]
                wrong.extend(1 for a, b in zip(found, expected, strict=True) if not torch.allclose(a, b, atol=1e-5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_recording_ends_for_inputs_that_keep_moving(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_SMALL", 0)
    monkeypatch.setattr(cuda_graphs, "_MOVES", 1000)
    graph = Called("graph", lambda x: (x + 1,), Pool(), [True], is_requested=False)
    inputs = [torch.full((3,), float(i), device=device) for i in range(30)]
    for x in inputs:
        torch.testing.assert_close(graph(x)[0], x + 1)
    assert graph.recordings == 12 and "recorded 12 times" in str(graph.failed)


def test_functions_that_are_recorded_again_do_not_hold_each_other_up(device: str) -> None:
    """The first's results are held while the second runs, and the first is recorded again later."""
    pool = Pool()
    first, second = (Called(name, lambda x: (x.sin() + 1,), pool, [False]) for name in ("first", "second"))
    x, y, z = (torch.randn(3, device=device) for _ in range(3))
    for other in [y] * 8 + [z] * 8:
        (held,) = first(other)
        (result,) = second(x)
        torch.testing.assert_close((held, result), (other.sin() + 1, x.sin() + 1))
        del held, result
    assert (first.recordings, second.recordings) == (2, 1)


def test_a_recorded_program_stays_in_plain_sight(device: str) -> None:
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(module, executors=EXECUTORS, cache=False)
    jitted(x)
    before = str(forge.last_traces(jitted)[-1]), len(forge.last_traces(jitted))
    call_often(jitted, module, x)
    assert recordings(jitted)[0]
    assert (str(forge.last_traces(jitted)[-1]), len(forge.last_traces(jitted))) == before
    explained = forge.explain(jitted, profile=True)
    assert explained.costs and not explained.unprofiled and explained.recorded == 2


def test_the_gradient_of_a_loss_may_be_elsewhere_later(device: str) -> None:
    """It is a new tensor at each step, which happened to be at the same address while the backward was recorded."""
    module, (x,) = deep(device), data(device, 1)
    jitted = forge.jit(lambda x: module(x).square().sum(), executors=EXECUTORS)
    gradients = [torch.ones((), device=device) for _ in range(2)]
    for step in range(2 * MANY):
        jitted(x).backward(gradients[step > MANY])
    assert [each.recordings for each in graphs(jitted)] == [1, 1]


def test_a_gradient_from_another_recording_is_not_copied(device: str) -> None:
    after = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    first, second = [forge.jit(module, executors=EXECUTORS) for module in (deep(device), after)]
    (x,) = data(device, 1)
    for _ in range(2 * MANY):
        second(first(x)).sum().backward()
    assert not graphs(first)[1]._recorded[0].copied
    assert graphs(second)[1]._recorded[0].copied


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    """Layers that may be dropped, so that each is captured by itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand([]) < 1e-9:
                continue
            x = block(x)
        return x


@pytest.mark.parametrize("training", [False, True])
def test_each_of_many_layers_that_share_a_program_is_recorded(
    device: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[Any] = []
    run = cuda_graphs._Recording.run
    monkeypatch.setattr(cuda_graphs._Recording, "run", lambda *args: replays.append(args[0]) or run(*args))
    count = 14
    ours = Blocks(count).to(device).train(training)
    theirs = copy.deepcopy(ours)
    jitted = forge.jit(ours, executors=EXECUTORS)
    for _ in range(MANY):
        replays.clear()
        x = torch.randn(4, 6, device=device)
        with torch.set_grad_enabled(training):
            actual, expected = jitted(x), theirs(x)
        torch.testing.assert_close(actual, expected)
        if training:
            actual.sum().backward()
            expected.sum().backward()
    assert len(replays) == count * (1 + training)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_recordings_of_layers_that_are_gone_are_dropped(device: str) -> None:
    model = Blocks(5).to(device)
    jitted, x = forge.jit(model, executors=EXECUTORS), torch.randn(4, 6, device=device)
    with torch.no_grad():
        call_often(jitted, model, x)
        (graph,) = graphs(jitted)
        recorded = [weakref.ref(each) for layer, _ in graph._layers.values() for each in layer._recorded]
        assert len(graph._layers) == 4 and recorded
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.data = parameter.data.clone()
        call_often(jitted, model, x)
    gc.collect()
    assert len(graph._layers) == 4 and not any(each() for each in recorded)
