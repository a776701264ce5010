"""Recurrent modules are captured with the surrounding program: values, gradients, states, random dropout."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import forge
from forge.torch_internals.versions import TORCH
from forge.torchlang import autocast_mode

X = (5, 2, 8)  # length, batch, features


class Tagger(nn.Module):
    """A recurrent module between other layers of the program."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.up, self.cell, self.head = nn.Linear(8, 8), cell, nn.LazyLinear(3)

    def forward(self, x: torch.Tensor, *state: Any) -> Any:
        h, last = self.cell(nn.functional.gelu(self.up(x)), *state)
        return nn.functional.silu(self.head(h)), last


def same(model: nn.Module, *inputs: Any, **options: Any) -> forge.Explanation:
    """Check that outputs and gradients are eager's, from the same random state."""
    model(*inputs)  # lazy layers
    jitted = forge.jit(model, **options)
    found = []
    for call in (model, jitted):
        torch.manual_seed(1)
        outputs = [each for each in _pytree.tree_leaves(call(*inputs)) if isinstance(each, torch.Tensor)]
        loss = sum(each.square().sum() for each in outputs)
        wanted = [*(each for each in inputs if isinstance(each, torch.Tensor)), *model.parameters()]
        wanted = [each for each in wanted if each.requires_grad]
        found.append((outputs, torch.autograd.grad(loss, wanted)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return forge.explain(jitted)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 2, "dropout": 0.5},
        {"bias": False},
    ],
    ids=["plain", "bidirectional", "dropout", "without bias"],
)
def test_a_recurrent_module_is_a_call_of_its_program(kind: Callable, options: dict[str, Any]) -> None:
    told = same(Tagger(kind(8, 16, **options)), torch.randn(X, requires_grad=True))
    assert told.graphs == 1 and not told.graph_breaks and not told.opaque_calls


@pytest.mark.parametrize("memory", ["speed", "balanced", "smallest"])
def test_random_dropout_runs_once(memory: str) -> None:
    same(Tagger(nn.LSTM(8, 16, 2, dropout=0.5)), torch.randn(X, requires_grad=True), memory=memory)


def test_a_state_is_given_and_returned() -> None:
    state = torch.randn(1, 2, 16, requires_grad=True), torch.randn(1, 2, 16)
    assert same(Tagger(nn.LSTM(8, 16)), torch.randn(X), state).graphs == 1


@pytest.mark.parametrize(
    "model", [nn.LSTM(8, 16, proj_size=4), nn.RNN(8, 16, nonlinearity="relu"), nn.LSTMCell(8, 16), nn.GRUCell(8, 16)],
    ids=["projection", "relu", "lstm cell", "gru cell"],
)  # fmt: skip
def test_other_kinds(model: nn.Module) -> None:
    x = torch.randn(X)
    assert same(model, x[0] if "Cell" in type(model).__name__ else x).graphs == 1


@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo compiles nothing of what follows a packed sequence")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_end_a_graph_and_the_rest_is_compiled(kind: Callable) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.cell, self.head = nn.Linear(8, 8), kind(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(torch.relu(self.up(x)), lengths)
            return torch.relu(self.head(nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0])[0]))

    told = same(Packed(), torch.randn(X, requires_grad=True), torch.tensor([5, 3]))
    calls = [row.operation for row in told.rows if row.phase == "forward"]
    assert not [row.module for row in told.rows if "stack" in (row.module or "")]
    assert calls.count("torch.nn.functional.linear") == calls.count("torch.relu") == 2


def test_lengths_modes_dtypes_and_copies() -> None:
    model = Tagger(nn.LSTM(8, 16, 2, dropout=0.5))
    model(torch.randn(X))
    jitted = forge.jit(model.eval())
    for length in (5, 3, 7, 9):
        x = torch.randn(length, 2, 8)
        with torch.no_grad():
            torch.testing.assert_close(jitted(x), model(x))
    assert forge.explain(jitted).graphs == 2
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(jitted(x), model(x))
    other = copy.deepcopy(jitted)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(jitted(x), model(x))
    assert not torch.allclose(other(x)[0], model(x)[0])
    model.double()
    torch.testing.assert_close(jitted(x.double()), model(x.double()))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes|Expected 8, got 9"):
        jitted(torch.randn(5, 2, 9, dtype=torch.float64))


@pytest.mark.parametrize("kind", [nn.RNN, *(pytest.param(each, marks=pytest.mark.slow) for each in (nn.GRU, nn.LSTM))])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
@pytest.mark.slow
def test_gradients_have_gradients(kind: Callable, dropout: float) -> None:
    """This includes second gradients that torch's own kernel does not have (an LSTM's)."""
    model = kind(3, 5, 2, dropout=dropout).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    found = []
    with torch.backends.mkldnn.flags(enabled=False):
        for call in (model, forge.jit(model)):
            torch.manual_seed(1)
            first = torch.autograd.grad(call(x)[0].square().sum(), [x, *model.parameters()], create_graph=True)
            total = sum(each.square().sum() for each in first)
            found.append(torch.autograd.grad(total, [x, *model.parameters()]))
    torch.testing.assert_close(found[1], found[0])


def test_a_long_sequence_is_one_call() -> None:
    """The length of the program does not grow with that of the sequence."""
    model = nn.LSTM(3, 5, bidirectional=True)
    lengths = []
    for steps in (2, 512):
        jitted = forge.jit(model)
        jitted(torch.randn(steps, 2, 3))
        lengths.append([len(stage.show(9).splitlines()) for stage in forge.last_traces(jitted)])
    assert lengths[0] == lengths[1]


def skip_without_kernel(layer: nn.Module) -> None:
    """Skip the test of a layer under autocast if eager raises: oneDNN has bfloat16 LSTMs for AVX512 only."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(5, 2, layer.input_size))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch has no kernel for this processor: {error}")


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast_a_layer_is_compiled(kind: Callable, requires_grad: bool) -> None:
    skip_without_kernel(kind(4, 3, 2))
    layer, x = kind(4, 3, 2), torch.randn(5, 2, 4, requires_grad=requires_grad)
    jitted = forge.jit(layer)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = jitted(x)[0], layer(x)[0]
    torch.testing.assert_close(ours, theirs)
    assert forge.explain(jitted).graphs == 1 and not forge.explain(jitted).eager


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 2, "bias": False},
    ],
    ids=["layers", "bidirectional", "without bias"],
)
def test_under_autocast_an_lstms_states_have_the_dtype_of_torchs_kernel(
    options: dict[str, Any], requires_grad: bool
) -> None:
    """Fake tensors run other operators than oneDNN's, some of which return float32."""
    layer, x = nn.LSTM(4, 4, **options), torch.randn(5, 2, 4)
    skip_without_kernel(layer)

    def states(x: torch.Tensor) -> list[torch.Tensor]:
        out, (h, c) = layer(x)
        return [out.exp() + out, h.exp() + h, torch.cat([h[-2], c[-1]], -1).mean(1) * 2]

    jitted = forge.jit(states)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(requires_grad):
        ours, theirs = jitted(x), states(x)
    torch.testing.assert_close(ours, theirs)
    if requires_grad:
        ours, theirs = (torch.autograd.grad(sum(map(torch.sum, each)), layer.parameters()) for each in (ours, theirs))
        torch.testing.assert_close(ours, theirs)
    assert not forge.explain(jitted).opaque_calls


def test_under_autocast_of_cuda_a_recurrent_module_runs_in_eager() -> None:
    """cuDNN's layers convert to float16 under any autocast dtype, which fake tensors do not show."""
    with autocast_mode.preserve():
        torch.set_autocast_enabled("cuda", True)
        told = same(Tagger(nn.LSTM(8, 16)), torch.randn(X, requires_grad=True))
    assert any("LSTM" in each for each in told.graph_breaks) and not told.eager


LAYERS = [
    nn.LSTM(8, 16), nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True), nn.LSTM(8, 16, 2, dropout=0.5),
    nn.LSTM(8, 16, bias=False), nn.GRU(8, 16), nn.GRU(8, 16, 2, bidirectional=True), nn.RNN(8, 16),
    nn.RNN(8, 16, nonlinearity="relu"), nn.LSTMCell(8, 16), nn.GRUCell(8, 16), nn.RNNCell(8, 16),
]  # fmt: skip


@pytest.mark.parametrize("alone", [False, True], ids=["after a layer", "alone"])
@pytest.mark.parametrize("cell", LAYERS, ids=str)
@pytest.mark.one_in(4)
def test_under_autocast_results_and_gradients_have_eagers_dtypes(cell: nn.Module, alone: bool) -> None:
    """The input is bfloat16 after a linear layer, and float32 where the module is called by itself."""
    model = cell if alone else Tagger(copy.deepcopy(cell))
    if isinstance(cell, nn.LSTM) and alone:
        skip_without_kernel(cell)
    x = torch.randn(X)[0] if "Cell" in type(cell).__name__ else torch.randn(X)
    if not alone:
        model.head = nn.Linear(16 * (2 if getattr(cell, "bidirectional", False) else 1), 3)
    if isinstance(cell, (nn.LSTMCell, nn.GRUCell, nn.RNNCell)) and not alone:
        model = nn.Sequential(model.up, nn.GELU(), model.cell)
    jitted, found = forge.jit(model), []
    for call in (model, jitted):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = _pytree.tree_leaves(call(x))
        loss = sum(each.float().square().sum() for each in outputs)
        found.append((outputs, torch.autograd.grad(loss, list(model.parameters()))))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(1)
            found[-1] += (_pytree.tree_leaves(call(x)),)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
    told = forge.explain(jitted)
    assert told.graphs == 2 and not told.graph_breaks and not told.eager
