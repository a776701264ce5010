"""Programs as CUDA graphs. Without a GPU, a recorder that runs the function again into the same memory stands in."""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import forge
from forge.capture.handles import handle_of
from forge.runtime import cuda_graphs, cuda_recorder
from forge.runtime.cuda_graphs import Graph
from forge.runtime.cuda_memory import Pool
from forge.runtime.cuda_results import unique_elements
from forge.transforms import linear_cross_entropy

CUDA = torch.cuda.is_available()
CALLS = 8
SCRATCH = 2048  # bytes that a recording of the double uses while it runs


def without_owner(value: Any) -> Any:
    """Return a tensor that shares another one's memory without owning it, like a graph."""
    if type(value) is not torch.Tensor:
        return value
    count = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if not value.numel():
        return value.detach()
    memory = (ctypes.c_char * (count * value.element_size())).from_address(value.data_ptr())
    shown = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    shown = shown.as_strided(value.shape, value.stride(), 0)
    shown = shown.conj() if value.is_conj() else shown
    return torch._neg_view(shown) if value.is_neg() else shown


class Again:
    """A recording that is the function itself, on the memory of its first inputs, with its results copied to those of
    the first run. Each run overwrites memory that was free when it was recorded `before` it reads its inputs, and
    memory that became free meanwhile `after` it."""

    def __init__(self, function: Callable, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.function, self.inputs, self.outputs = function, inputs, outputs
        self.before: list[tuple[int, int]] = []
        self.after: list[tuple[int, int]] = []

    def replay(self) -> None:
        _overwrite(self.before)
        results = self.function(list(self.inputs))
        _overwrite(self.after)
        for place, new in zip(self.outputs, results, strict=True):
            if isinstance(place, torch.Tensor):
                unique_elements(place).copy_(unique_elements(new))


def _overwrite(memory: Sequence[tuple[int, int]]) -> None:
    for address, size in memory:
        ctypes.memset(address, 255, size)  # NaNs


class Double:
    """A recorder for the CPU. Results lie in memory that stays allocated, like that of graphs; a pool is a list of its
    free parts: those given up, and those that recordings used while they ran."""

    device_type = "cpu"

    memory: ClassVar[list[Any]] = []

    def new_pool(self) -> list[tuple[int, int]]:
        return []

    def has_room(self) -> bool:
        return True

    def stream(self) -> int:
        return 0

    def is_on(self, device: torch.device) -> bool:
        return True

    def is_recording(self) -> bool:
        return False

    def record(self, function: Callable, boxed: list[Any], pool: list[tuple[int, int]]) -> tuple[Again, Sequence[Any]]:
        free = list(pool)
        before = [each.detach().clone() if isinstance(each, torch.Tensor) else None for each in boxed]
        inputs = list(map(without_owner, boxed))
        theirs = {each.untyped_storage().data_ptr() for each in boxed if isinstance(each, torch.Tensor)}
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # recorded calls do not run
            results = function(boxed)
            after = [each for each in pool if each not in free]
            outputs = self._in_memory_that_stays(results, theirs, pool)
            recorded = Again(function, inputs, list(map(without_owner, outputs)))
        pool.append(self._allocate(SCRATCH, []))
        recorded.before, recorded.after = free, [*after, pool[-1]]
        for each, was in zip(inputs, before, strict=True):
            if was is not None and not torch.equal(each, was):
                each.copy_(was)
        return recorded, outputs

    def _in_memory_that_stays(self, values: Sequence[Any], theirs: set[int], pool: list[tuple[int, int]]) -> list[Any]:
        moved: dict[int, torch.Tensor] = {}
        results = []
        for each in values:
            address = each.untyped_storage().data_ptr() if type(each) is torch.Tensor else 0
            if not address or address in theirs or each.is_conj() or each.is_neg():
                results.append(each)
                continue
            if address not in moved:
                size = each.untyped_storage().nbytes()
                place = self._allocate(size, pool)
                ctypes.memmove(place[0], address, size)
                moved[address], owner = self._memory_at(place[0], size)
                weakref.finalize(owner, pool.append, place)
            storage = moved[address].untyped_storage()
            results.append(
                torch.empty(0, dtype=each.dtype).set_(storage, each.storage_offset(), each.shape, each.stride())
            )
        return results

    def _allocate(self, size: int, pool: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the address and the size of memory that is free in a pool, or of new memory."""
        size = -(-size // 64) * 64
        for place, (address, free) in enumerate(pool):
            if free >= size:
                pool[place : place + 1] = [(address + size, free - size)] if free > size else []
                return address, size
        self.memory.append((ctypes.c_char * size)())
        return ctypes.addressof(self.memory[-1]), size

    def _memory_at(self, address: int, size: int) -> tuple[torch.Tensor, Any]:
        shown = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(shown, dtype=torch.uint8), shown


class Called(Graph):
    """A graph of a function with separate arguments."""

    def __init__(self, name: str, function: Callable, *args: Any, **options: Any) -> None:
        def call(boxed: list[Any]) -> Any:
            values = list(boxed)
            boxed.clear()
            return function(*values)

        super().__init__(name, call, *args, **options)

    def __call__(self, *values: Any) -> Sequence[Any]:
        return super().__call__(list(values))


@pytest.fixture(params=["double", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no GPU here"))])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the device on which programs are recorded."""
    if request.param == "double":
        monkeypatch.setattr(cuda_recorder, "_recorder", Double())
    yield "cpu" if request.param == "double" else "cuda"
    torch._dynamo.reset()


def net(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(device)


def graphs(jitted: Any) -> list[Graph]:
    """Return the CUDA graphs of the last program, forward and backward."""
    (*_, compiled) = handle_of(jitted).reports
    stages = compiled.recorded or [traces[-1] for traces in (compiled.traces, compiled.backward_traces) if traces]
    return [b.symbol.op for trace in stages for b in trace.bound_symbols if isinstance(b.symbol.op, Graph)]


def data(device: str, count: int = CALLS, rows: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator).to(device) for _ in range(count)]


def train(model: Callable, module: nn.Module, batches: list[torch.Tensor], *, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        loss = model(batch).square().mean()
        if step % accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_training_follows_eager(device: str, dropout: float, accumulate: int) -> None:
    ours, theirs = net(device, dropout), net(device, dropout)
    jitted = forge.jit(ours, cuda_graphs=True)
    torch.manual_seed(3)
    found = train(jitted, ours, data(device, 24), accumulate=accumulate)
    torch.manual_seed(3)
    expected = train(theirs, theirs, data(device, 24), accumulate=accumulate)
    torch.testing.assert_close(found, expected)
    recorded = graphs(jitted)
    assert len(recorded) == 2 and all(each.recordings and each.failed is None for each in recorded)


def test_parameters_are_read_where_they_are(device: str) -> None:
    module = net(device)
    jitted = forge.jit(module, cuda_graphs=True)
    train(jitted, module, data(device, 12))
    forward, _ = graphs(jitted)
    copied = [len(each.copies) for each in forward._recorded]
    assert copied and max(copied) <= 1  # the batch


def test_results_may_be_kept(device: str) -> None:
    module = net(device).eval()
    jitted = forge.jit(module, cuda_graphs=True)
    batches = data(device)
    with torch.no_grad():
        kept = [jitted(batch) for batch in batches]
        expected = [module(batch) for batch in batches]
    torch.testing.assert_close(kept, expected)


def test_a_backward_that_waits_reads_what_was_saved_for_it(device: str) -> None:
    ours, theirs = net(device), net(device)
    jitted = forge.jit(ours, cuda_graphs=True)
    for model, module in ((jitted, ours), (theirs, theirs)):
        for batch in data(device):
            model(batch).sum().backward()
        module.zero_grad()
        losses = [model(batch).square().sum() for batch in data(device)]
        for loss in losses:
            loss.backward()
    gradients = [[parameter.grad for parameter in module.parameters()] for module in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_gradients_may_be_kept(device: str) -> None:
    ours, theirs = net(device), net(device)
    jitted = forge.jit(ours, cuda_graphs=True)
    kept: list[list[torch.Tensor]] = []
    for model, module in ((jitted, ours), (theirs, theirs)):
        kept.append([])
        for batch in data(device):
            kept[-1] += torch.autograd.grad(model(batch).square().sum(), list(module.parameters()))
    torch.testing.assert_close(*kept)


def test_another_shape_is_recorded_for_itself(device: str) -> None:
    module = net(device).eval()
    jitted = forge.jit(module, cuda_graphs=True, dynamic=False)
    with torch.no_grad():
        for rows in (5, 2, 5, 7, 2):
            for batch in data(device, rows=rows):
                torch.testing.assert_close(jitted(batch), module(batch))


def test_symbolic_shapes_are_right(device: str) -> None:
    module = net(device)
    jitted = forge.jit(module, cuda_graphs=True, dynamic=True)
    for rows in (5, 3, 5, 9):
        for batch in data(device, rows=rows):
            torch.testing.assert_close(jitted(batch), module(batch))
            jitted(batch).sum().backward()


def test_a_parameter_that_moved_is_read_where_it_is_now(device: str) -> None:
    module = net(device).eval()
    jitted = forge.jit(module, cuda_graphs=True)
    with torch.no_grad():
        for batch in data(device):
            jitted(batch)
        before = sum(each.recordings for each in graphs(jitted))
        module[0].weight.data = module[0].weight.data * 2
        for batch in data(device):
            torch.testing.assert_close(jitted(batch), module(batch))
        module[0].weight.mul_(3)
        for batch in data(device):
            torch.testing.assert_close(jitted(batch), module(batch))
    forward = graphs(jitted)[0]
    assert forward.recordings > before and len(forward._recorded[0].copies) <= 1


def test_two_models_take_turns(device: str) -> None:
    first, second = net(device), net(device)
    models = [forge.jit(module, cuda_graphs=True) for module in (first, second)]
    for batch in data(device, 12):
        losses = [model(batch) for model in models]
        for module, model, result in zip((first, second), models, losses, strict=True):
            torch.testing.assert_close(result, module(batch))
            result.sum().backward()
            torch.testing.assert_close(model(batch), module(batch))


def test_what_cannot_be_recorded_runs_between_graphs(device: str) -> None:
    class Looked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x.sin() + 1).exp()
            torch._assert_async((y > 0).all())
            return (y * 2).cos() + 1

    module = Looked()
    jitted = forge.jit(module, cuda_graphs=True, executors=["torch"])
    with torch.no_grad():
        for batch in data(device):
            torch.testing.assert_close(jitted(batch), module(batch))
    assert len(graphs(jitted)) == 2
    text = str(forge.explain(jitted))
    assert "CUDA graphs: 2" in text and "torch._assert_async: the call is an opaque call" in text


def test_what_fails_while_it_is_recorded_runs_without(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(type(cuda_graphs.recorder()), "record", fail)
    module = net(device).eval()
    jitted = forge.jit(module, cuda_graphs=True)
    with torch.no_grad():
        for batch in data(device):
            torch.testing.assert_close(jitted(batch), module(batch))
    assert "operation not permitted when stream is capturing" in str(forge.explain(jitted))


def test_programs_for_other_devices_are_left_as_they_are() -> None:
    module = net("cpu")
    jitted = forge.jit(module, cuda_graphs=True)
    for batch in data("cpu"):
        torch.testing.assert_close(jitted(batch), module(batch))
    assert not graphs(jitted)
    assert "is on cpu" in str(forge.explain(jitted))


def test_a_graph_whose_results_are_held_is_not_run_again(device: str) -> None:
    graph = Called("graph", lambda x: (x + 1,), Pool(), [False])
    x = torch.ones(3, device=device)
    results = [graph(x * i) for i in range(CALLS)]
    torch.testing.assert_close([each for (each,) in results], [x * i + 1 for i in range(CALLS)])


def test_what_a_kernel_keeps_besides_tensors_may_be_a_list(device: str) -> None:
    x, others = torch.ones(3, device=device), [torch.full((3,), 2.0, device=device) for _ in range(2)]
    graph = Called("g", lambda x, kept: (x * kept[1] + kept[2][0],), Pool(), [True])
    for _ in range(CALLS):
        assert graph(x, [None, 5, [others[0]]])[0].tolist() == [7.0] * 3
    assert graph.recordings == 1
    others[1].fill_(4.0)
    for kept, wanted in ((6, 8.0), (5, 7.0)):
        assert graph(x, [None, kept, [others[0]]])[0].tolist() == [wanted] * 3
    assert graph(x, [None, 5, [others[1]]])[0].tolist() == [9.0] * 3


def test_a_gradient_that_is_kept_is_scaled_once_a_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backward, not the recording, decides whether to scale the head's gradient in place."""
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 0)
    torch.manual_seed(0)
    weight = torch.randn(50, 6, device=device, requires_grad=True)
    target = torch.randint(50, (5,), device=device)
    bias = torch.randn(50, device=device, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(torch.tanh(x) * 2, weight, bias), target) * 3

    jitted = forge.jit(loss, cuda_graphs=True)
    for batch in data(device):
        x = batch.requires_grad_()
        found = jitted(x)
        torch.autograd.grad(found, (weight, x, bias))
    found, expected = jitted(x), torch.autograd.grad(loss(x), (weight, x, bias))
    for keep in (True, True, False):
        gradients = torch.autograd.grad(found, (weight, x, bias), retain_graph=keep)
        torch.testing.assert_close(gradients, expected)


def test_memory_that_is_seen_in_another_way_is_another_input(device: str) -> None:
    graph = Called("graph", lambda x: (x * 2 + 1,), Pool(), [False])
    x = torch.arange(9.0, device=device).view(3, 3)
    for _ in range(CALLS):
        for each in (x, x.t(), x.view(9), x.view(torch.int32)):
            torch.testing.assert_close(graph(each)[0], each * 2 + 1)
    assert graph.recordings == 4


def test_results_that_are_views_of_inputs_have_their_gradients(device: str) -> None:
    weight = torch.randn(4, 4, device=device, requires_grad=True)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ weight).tanh() * 2, weight.view(-1)[:4].expand(4, 4)

    jitted = forge.jit(program, cuda_graphs=True, executors=["torch"])
    for x in torch.randn(CALLS, 4, 4, device=device):
        found, expected = jitted(x), program(x)
        assert found[1].requires_grad
        gradients = [torch.autograd.grad((first * second).sum(), weight) for first, second in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_equal_numbers_that_compute_other_results_are_other_inputs(device: str) -> None:
    graph = Called("graph", lambda x, number: (torch.ones_like(x).copysign(number), x * number), Pool(), [True, True])
    x = torch.ones(3, dtype=torch.int32, device=device)
    for _ in range(CALLS):
        for number in (0.0, -0.0, 1, True, 1.0):
            expected = torch.ones_like(x).copysign(number), x * number
            torch.testing.assert_close(graph(x, number), expected, rtol=0, atol=0)


def test_a_conjugate_view_is_another_input(device: str) -> None:
    graph = Called("graph", lambda x: (x.imag + 1,), Pool(), [False])
    x = torch.randn(3, dtype=torch.complex64, device=device)
    for _ in range(CALLS):
        for each in (x, x.conj()):
            torch.testing.assert_close(graph(each)[0], each.imag + 1)
    assert graph.recordings == 2


@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_random_numbers_are_drawn_after_a_recording_that_failed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + x.sum().cpu().to(x.device)

    x = torch.ones(8, device="cuda")
    graph = Called("graph", lambda x: (program(x),), Pool(), [True])
    found = []
    for run in (graph, lambda x: (program(x),)):
        torch.manual_seed(0)
        found.append([run(x)[0] for _ in range(CALLS)])
    torch.testing.assert_close(*found)
    assert graph.failed is not None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_recordings_follow_the_generator_after_one_that_failed() -> None:
    x, pool = torch.ones(64, device="cuda"), Pool()
    first, later = (Called("graph", lambda x: (nn.functional.dropout(x * 2, 0.5),), pool, [True]) for _ in range(2))
    for _ in range(CALLS):
        first(x)
    failing = Called("graph", lambda x: (x + x.sum().cpu().to(x.device),), pool, [True])
    for _ in range(CALLS):
        failing(x), later(x)
    assert first.recordings and later.recordings and failing.failed is not None
    for graph in (first, later):
        torch.manual_seed(5)
        found = [graph(x)[0], torch.rand(3, device="cuda")]
        torch.manual_seed(5)
        torch.testing.assert_close(found, [nn.functional.dropout(x * 2, 0.5), torch.rand(3, device="cuda")])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_is_recorded_where_it_is_the_current_one() -> None:
    for device, is_current in ((0, True), (1, True), (1, False), (0, True)):
        graph = Called("graph", lambda x: (x * 2 + 1,), Pool(), [False])
        with torch.cuda.device(device if is_current else 1 - device):
            for x in torch.randn(CALLS, 3, device=f"cuda:{device}"):
                torch.testing.assert_close(graph(x)[0], x * 2 + 1)
        assert bool(graph.recordings) == is_current and graph.failed is None


@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_recordings_have_workspaces_of_their_own() -> None:
    """torch frees the workspace of matrix products on a stream together with any graph that was recorded on it."""
    a, b = torch.randn(8, 65536, device="cuda"), torch.randn(65536, 8, device="cuda")
    pools = [Pool(), Pool()]
    first, second = (Called(name, lambda a, b: (a @ b,), pool, [True]) for name, pool in zip("ab", pools, strict=True))
    expected = a @ b
    for _ in range(CALLS):
        first(a, b), second(a, b)
    assert first.recordings and second.recordings
    first._recorded.clear()
    later = Called("later", lambda a: (a * 2 + 1,), pools[0], [False])
    x = torch.randn(2**22, device="cuda")
    for _ in range(CALLS):
        (held,) = later(x)
        torch.testing.assert_close(second(a, b)[0], expected, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(held, x * 2 + 1)
        del held


def test_a_gradient_of_a_differentiable_backward_may_lie_otherwise(device: str) -> None:
    """It is at the same address, which no guard of Dynamo checks."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() * x

    jitted = forge.jit(program, cuda_graphs=True)
    x, g = (torch.randn(4, 4, device=device) for _ in range(2))
    x.requires_grad_()
    for call in range(2 * CALLS):
        gradient = g if call < CALLS else g.t()
        found = []
        for each in (jitted, program):
            (once,) = torch.autograd.grad(each(x), x, gradient, create_graph=True)
            found.append((once.detach().clone(), *torch.autograd.grad(once.square().sum(), x)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_memory_that_is_rarely_held_is_no_reason_to_record_again(device: str) -> None:
    """torch's thread that ran a backward may hold it; only frequent holders matter."""

    def held_every(calls: int) -> int:
        graph = Called("graph", lambda x: (x * 2,), Pool(), returned=[False], is_requested=False)
        x, out = torch.ones(4, device=device), None
        for i in range(200):
            new = graph(x)
            torch.testing.assert_close(new[0], x * 2)
            out = new if i % calls == 0 else None
            del new
        del out
        return graph.recordings

    assert held_every(50) == 1
    assert held_every(2) == 2
