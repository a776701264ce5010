"""Recurrent layers with cuDNN's pair of operators. Without a GPU, a double of the two computes the same by composition;
it reads only the buffer of weights, and its backward overwrites the reserve, like cuDNN's."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.compiler.kernel_strides import with_kernel_strides
from forge.executors.torchex import cudnn_rnn
from forge.ir.bounded import BoundedDict
from forge.runtime import cuda_recorder
from forge.runtime.tiering import CALLS_TO_RECORD
from forge.torch_internals.fake_tensors import FakeTensorMode
from tests.executors.test_cuda_graphs import Double, graphs

CUDA = torch.cuda.is_available()
aten = torch.ops.aten
KINDS = {mode: kind for kind, mode in cudnn_rnn._MODES.items()}
RESERVE = 24  # bytes
OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "batch_first": True},
    {"bias": False},
]
RELU = {"nonlinearity": "relu"}
LAYERS = [(kind, options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for options in OPTIONS]
LAYERS += [(nn.RNN, RELU), (nn.LSTM, {"proj_size": 3}), (nn.LSTM, {"proj_size": 3, "bias": False})]


def places_of(shapes: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]]:
    """Return the length of a buffer and the positions of weights in it, with gaps between them."""
    ends = list(itertools.accumulate(torch.Size(shape).numel() + 2 for shape in shapes))
    return ends[-1], (0, *ends[:-1])


class Cudnn:
    """The operators of cuDNN for tensors on the CPU."""

    def __init__(self) -> None:
        self.flat: list[int] = []  # the addresses of the buffers of weights

    def _composed(self, x: Any, weight: Any, each: int, flat: Any, hx: Any, cx: Any, how: Any, wanted: bool) -> tuple:
        mode, _, _, count, is_batch_first, dropout, train, is_bidirectional, batch_sizes, state = how
        assert (dropout, train, batch_sizes, state) == (0.0, True, [], None) and hx.is_contiguous()
        length, places = places_of([each.shape for each in weight])
        assert flat.shape == (length,)
        self.flat.append(flat.data_ptr())
        params = [flat[at : at + w.numel()].view(w.shape) for w, at in zip(weight, places, strict=True)]
        inputs = [
            each.detach().clone().requires_grad_(wanted) for each in (x, hx, *([] if cx is None else [cx]), *params)
        ]
        x, h, *rest = inputs
        state, params = (h, rest) if cx is None else ((h, rest[0]), rest[1:])
        function = getattr(torch, KINDS[mode])
        results = function(x, state, params, each >= 4, count, 0.0, wanted, is_bidirectional, is_batch_first)
        return inputs, results

    def _cudnn_rnn(self, x: Any, weight: Any, each: int, flat: Any, hx: Any, cx: Any, *how: Any) -> tuple:
        _, (out, *states) = self._composed(x, weight, each, flat, hx, cx, how, False)
        out = out.transpose(0, 1).contiguous().transpose(0, 1) if how[4] else out
        reserve = torch.full((RESERVE,), 7, dtype=torch.uint8)
        return out, states[0], states[1] if cx is not None else out.new_empty(0), reserve, flat

    def _cudnn_rnn_backward(
        self, x: Any, weight: Any, each: int, flat: Any, hx: Any, cx: Any, out: Any, *rest: Any
    ) -> tuple:
        *gradients, reserve, mask = rest[:3] + rest[-2:]
        assert (reserve == 7).all() and (out.transpose(0, 1) if rest[7] else out).is_contiguous()
        reserve.zero_()
        with torch.enable_grad():
            inputs, results = self._composed(x, weight, each, flat, hx, cx, rest[3:-2], True)
        torch.testing.assert_close(results[0], out)
        dx, dhx, *found = torch.autograd.grad(results, inputs, [g for g in gradients if g is not None])
        dcx = None if cx is None else found.pop(0)
        joined = torch.cat([each.flatten() for each in found]) if mask[3] else None
        views, at = [], 0
        for each in found if mask[3] else ():
            views.append(joined[at : at + each.numel()].view(each.shape))
            at += each.numel()
        return dx, dhx, dcx, views


def measure(kind: str, input: Any, states: Any, params: Any, how: Any) -> tuple:
    return *places_of([each.shape for each in params]), RESERVE


@pytest.fixture(params=["double", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no GPU here"))])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "double":
        monkeypatch.setattr(cuda_recorder, "_recorder", Double())
        monkeypatch.setattr(cudnn_rnn, "aten", Cudnn())
        monkeypatch.setattr(cudnn_rnn, "_DEVICE", "cpu")
        monkeypatch.setattr(cudnn_rnn, "_measure", measure)
        monkeypatch.setattr(cudnn_rnn, "_measured", BoundedDict(8))
    yield "cpu" if request.param == "double" else "cuda"
    torch._dynamo.reset()


class Tagger(nn.Module):
    """A recurrent module between other layers of a program."""

    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        width = (cell.proj_size or cell.hidden_size) * (2 if cell.bidirectional else 1)
        self.up, self.cell, self.head = nn.Linear(6, cell.input_size), cell, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, *state: Any) -> Any:
        h, last = self.cell(torch.tanh(self.up(x)), *state)
        return self.head(torch.sigmoid(h)), last


class Scored(nn.Module):
    """A recurrent module whose states are unused."""

    def __init__(self, tagger: Tagger) -> None:
        super().__init__()
        self.tagger = tagger

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tagger(x)[0]


def tagger(kind: Callable, options: dict[str, Any], device: str, dtype: torch.dtype = torch.float32) -> Tagger:
    torch.manual_seed(0)
    return Tagger(kind(4, 5, **options)).to(device, dtype)


def sequences(device: str, count: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, 3, 6, generator=generator).to(device, dtype) for _ in range(count)]


def results_of(call: Callable, module: nn.Module, x: torch.Tensor, *, with_state: bool = True) -> list[torch.Tensor]:
    """Return the outputs and the gradients of a step."""
    x = x.detach().requires_grad_()
    out, last = call(x)
    states = list(last) if isinstance(last, tuple) else [last]
    loss = out.square().sum() + (sum(each.sin().sum() for each in states) if with_state else 0)
    wanted = [each for each in module.parameters() if each.requires_grad]
    return [out, *states, *torch.autograd.grad(loss, [x, *wanted])]


def uses_cudnn(jitted: Any) -> bool:
    """Return whether the last program's backward is cuDNN's operator."""
    return "cudnn_rnn_backward" in forge.last_backward_traces(jitted)[-1].show(9)


@pytest.mark.parametrize("with_state", [False, True], ids=["outputs", "outputs and states"])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
@pytest.mark.one_in(2)
def test_results_and_gradients_are_eagers(
    device: str, kind: Callable, options: dict[str, Any], with_state: bool
) -> None:
    module, (x,) = tagger(kind, options, device), sequences(device)
    jitted = forge.jit(module, executors=["torch"])
    found = results_of(jitted, module, x, with_state=with_state)
    torch.testing.assert_close(found, results_of(module, module, x, with_state=with_state))
    assert uses_cudnn(jitted) and not forge.explain(jitted).opaque_calls


def test_a_program_is_right_on_disk_too(device: str) -> None:
    module, (x,) = tagger(nn.LSTM, {}, device), sequences(device)
    expected = results_of(module, module, x)
    for _ in range(2):
        jitted = forge.jit(module, executors=["torch"])
        torch.testing.assert_close(results_of(jitted, module, x), expected)
        torch._dynamo.reset()


@pytest.mark.parametrize("memory", ["speed", "balanced", "smallest"])
def test_a_backward_may_run_again(device: str, memory: str) -> None:
    module, (x,) = tagger(nn.LSTM, {"batch_first": True}, device), sequences(device)
    jitted = forge.jit(module, executors=["torch"], memory=memory)
    loss = jitted(x)[0].square().sum()
    first, second = [torch.autograd.grad(loss, list(module.parameters()), retain_graph=True) for _ in range(2)]
    torch.testing.assert_close(first, second)
    assert uses_cudnn(jitted)


@pytest.mark.parametrize("frozen", ["all", "all but one", "none"])
def test_gradients_of_weights_that_are_not_needed(device: str, frozen: str) -> None:
    module, (x,) = tagger(nn.LSTM, {"num_layers": 2}, device), sequences(device)
    module.cell.requires_grad_(frozen == "none").weight_hh_l1.requires_grad_(frozen != "all")
    jitted = forge.jit(module, executors=["torch"])
    torch.testing.assert_close(results_of(jitted, module, x), results_of(module, module, x))
    assert uses_cudnn(jitted)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_gradients_of_states(device: str, kind: Callable) -> None:
    """States whose layers are not contiguous are included."""
    module, (x,) = tagger(kind, {"num_layers": 2}, device), sequences(device)
    given = [torch.randn(3, 2, 5, device=device, requires_grad=True) for _ in range(2 if kind is nn.LSTM else 1)]
    found = []
    for call in (forge.jit(module, executors=["torch"]), module):
        states = [each.tanh().transpose(0, 1).contiguous() for each in given]
        out, _ = call(x, tuple(states) if kind is nn.LSTM else states[0])
        found.append(torch.autograd.grad(out.square().sum(), given))
    torch.testing.assert_close(*found)


def test_half_precision_has_the_buffer_of_weights_made_once(device: str) -> None:
    module, (x,) = tagger(nn.LSTM, {}, device, torch.bfloat16), sequences(device, dtype=torch.bfloat16)
    jitted = forge.jit(module, executors=["torch"])
    torch.testing.assert_close(results_of(jitted, module, x), results_of(module, module, x), rtol=2e-2, atol=2e-2)
    if uses_cudnn(jitted):  # torch uses cuDNN for bfloat16 since 9.13
        assert forge.last_traces(jitted)[-1].show(9).count("cudnn_rnn._flatten(") == 1
        assert "cudnn_rnn._flatten(" not in forge.last_backward_traces(jitted)[-1].show(9)


def test_weights_that_lie_together_are_not_copied() -> None:
    shapes = [(20, 4), (20, 5), (20,), (20,)]
    count, places = places_of(shapes)
    buffer = torch.zeros(count)
    params = [buffer[at : at + torch.Size(each).numel()].view(each) for each, at in zip(shapes, places, strict=True)]
    for each in params:
        each.uniform_()
    sizes = (count, places, RESERVE)
    flat = cudnn_rnn._weight_buffer(params, sizes)
    assert flat.data_ptr() == buffer.data_ptr()
    for apart in ([*params[:3], params[3].clone()], [params[0].t().contiguous().t(), *params[1:]], params[::-1]):
        shapes = [each.shape for each in apart]
        copied = cudnn_rnn._weight_buffer(apart, (count, places_of(shapes)[1], RESERVE))
        assert copied.data_ptr() != buffer.data_ptr()
    torch.testing.assert_close(cudnn_rnn._flatten(params, sizes), buffer)


def test_gradients_have_gradients(device: str) -> None:
    """cuDNN's backward has no derivative: torch's composition runs."""
    module, (x,) = tagger(nn.LSTM, {"num_layers": 2}, device, torch.float64), sequences(device, dtype=torch.float64)
    found = []
    for call in (forge.jit(module, executors=["torch"]), module):
        with torch.backends.cudnn.flags(enabled=call is not module), torch.backends.mkldnn.flags(enabled=False):
            first = torch.autograd.grad(call(x)[0].square().sum(), list(module.parameters()), create_graph=True)
            found.append(torch.autograd.grad(sum(each.square().sum() for each in first), list(module.parameters())))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.5}, "eval", "symbolic", "disabled"], ids=str)
def test_other_calls_are_run_by_torchs_autograd(device: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x,) = tagger(nn.LSTM, options if isinstance(options, dict) else {}, device), sequences(device)
    module.train(options != "eval")
    jitted = forge.jit(module, executors=["torch"], dynamic=options == "symbolic")
    with torch.backends.cudnn.flags(enabled=options != "disabled"):
        out, _ = jitted(x.requires_grad_())
        if device == "cpu" or options != "eval":  # cuDNN raises an error
            torch.autograd.grad(out.sum(), x)
            assert not uses_cudnn(jitted)


def test_a_call_outside_of_graphs_has_a_reason(device: str) -> None:
    module = tagger(nn.LSTM, {}, device).eval()
    jitted = forge.jit(module, cuda_graphs=True)
    for x in sequences(device, 8):
        jitted(x)
    assert "in eval mode cuDNN has no backward" in str(forge.explain(jitted).unrecorded)


def train(call: Callable, module: nn.Module, batches: Sequence[torch.Tensor], lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    losses = []
    for batch in batches:
        loss = call(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requested", [True, "auto"])
@pytest.mark.parametrize(("kind", "options"), [(nn.LSTM, OPTIONS[2]), (nn.GRU, {}), (nn.RNN, RELU)], ids=str)
def test_training_is_recorded(
    device: str, kind: Callable, options: dict[str, Any], requested: Any, dtype: torch.dtype
) -> None:
    ours = Scored(tagger(kind, options, device, dtype))
    theirs = copy.deepcopy(ours)
    jitted = forge.jit(ours, cuda_graphs=requested)
    batches = sequences(device, CALLS_TO_RECORD + 26, dtype)
    exact = dtype is torch.float32
    found, expected = train(jitted, ours, batches), train(theirs, theirs, batches)
    torch.testing.assert_close(found, expected, **({} if exact else {"rtol": 5e-2, "atol": 5e-2}))
    recorded = graphs(jitted)
    assert len(recorded) == 2, forge.explain(jitted).unrecorded
    assert all(each.recordings and each.failed is None for each in recorded), [each.failed for each in recorded]
    assert forge.explain(jitted).recorded == 2


def test_a_backward_that_waits_reads_its_own_reserve(device: str) -> None:
    ours = tagger(nn.LSTM, {}, device)
    theirs = copy.deepcopy(ours)
    jitted = forge.jit(ours, cuda_graphs=True)
    for call, module in ((jitted, ours), (theirs, theirs)):
        for x in sequences(device, 8):
            call(x)[0].sum().backward()
        module.zero_grad()
        losses = [call(x)[0].square().sum() for x in sequences(device, 8)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(*[[each.grad for each in module.parameters()] for module in (ours, theirs)])


@pytest.mark.parametrize("alone", [False, True])
def test_inference_is_recorded(device: str, alone: bool) -> None:
    module = tagger(nn.LSTM, OPTIONS[1], device).eval()
    module = nn.Sequential(module.cell) if alone else module
    jitted = forge.jit(module, cuda_graphs=True if alone else "auto")
    with torch.no_grad():
        for x in sequences(device, CALLS_TO_RECORD + 10):
            x = x[..., :4].contiguous() if alone else x
            torch.testing.assert_close(jitted(x), module(x))
    assert forge.explain(jitted).recorded == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_a_gpu_gives_eagers_bits(kind: Callable, options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and torch.backends.cudnn.version() < 91300:
        pytest.skip("torch takes cuDNN for bfloat16 since 9.13")
    torch.manual_seed(0)
    cell = kind(64, 96, **options).to("cuda", dtype)
    jitted = forge.jit(cell, executors=["torch"])
    x = torch.randn(32, 16, 64, device="cuda", dtype=dtype)
    ours, theirs, again = results_of(jitted, cell, x), results_of(cell, cell, x), results_of(cell, cell, x)
    assert uses_cudnn(jitted)
    torch.testing.assert_close(ours, theirs)
    # cuDNN may add in another order from run to run
    assert all(torch.equal(*each[:2]) for each in zip(ours, theirs, again, strict=True) if torch.equal(*each[1:]))


def test_a_step_of_a_layer_counts_as_a_call(device: str) -> None:
    module, (x,) = tagger(nn.LSTM, OPTIONS[1], device), sequences(device)
    jitted = forge.jit(module, executors=["torch"])
    with torch.no_grad():
        jitted(x)
    traces = [forge.last_traces(jitted)[-1]]
    jitted(x)
    traces += [forge.last_traces(jitted)[-1], forge.last_backward_traces(jitted)[-1]]
    for trace in traces:
        (found,) = [count for count in map(cudnn_rnn.steps, trace.bound_symbols) if count > 1]
        assert found == x.shape[1] * 4


@pytest.mark.parametrize("runs", [True, False], ids=["cudnn", "others"])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_cudnn_is_asked_about_the_buffer_of_weights(
    kind: Callable, options: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes are those of a call on zeros, whose reserve autograd keeps."""
    cell, (x,) = kind(4, 5, **options), sequences("cpu")
    asked = []

    class Flattens(Cudnn):
        def _cudnn_rnn_flatten_weight(self, weights: list[torch.Tensor], *how: Any) -> torch.Tensor:
            asked.append(how)
            count, places = places_of([each.shape for each in weights])
            buffer = torch.zeros(count)
            for each, place in zip(weights, places, strict=True):
                each.set_(buffer[place : place + each.numel()].view(each.shape))
            return buffer

    monkeypatch.setattr(cudnn_rnn, "aten", Flattens())
    monkeypatch.setattr(cudnn_rnn, "cudnn_rnn_reserve", lambda node: torch.zeros(9) if runs else None)
    name = cell.mode.lower()
    width = cell.proj_size or cell.hidden_size
    layers = cell.num_layers * (2 if cell.bidirectional else 1)
    states = [torch.zeros(layers, x.shape[0 if cell.batch_first else 1], size) for size in (width, cell.hidden_size)]
    how = (cell.bias, cell.num_layers, 0.0, True, cell.bidirectional, cell.batch_first)
    x = x[..., :4]
    found = cudnn_rnn._measure(name, x, states if name == "lstm" else states[:1], cell._flat_weights, how)
    count, places = places_of([each.shape for each in cell._flat_weights])
    assert found == ((count, places, 9) if runs else None)
    of_a_layer = len(cell._flat_weights) // layers
    sizes = (4, cudnn_rnn._MODES[name], cell.hidden_size, cell.proj_size)
    assert asked == [(of_a_layer, *sizes, cell.num_layers, cell.batch_first, cell.bidirectional)]


@pytest.mark.parametrize("is_batch_first", [False, True])
def test_the_steps_of_an_output_lie_first_in_memory(is_batch_first: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, h = torch.empty(3, 7, 4, device="cuda"), torch.empty(1, 3 if is_batch_first else 7, 5, device="cuda")
        args = (x, [], 4, torch.empty(9, device="cuda"), h, h, 2, 5, 0, 1, is_batch_first, 0.0, True, False, [], None)
        out, *_ = with_kernel_strides(aten._cudnn_rnn.default, args, aten._cudnn_rnn(*args))
    assert out.stride() == ((5, 15, 1) if is_batch_first else (35, 5, 1))
