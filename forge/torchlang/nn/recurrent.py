"""The recurrent layers and cells."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge import clang, prims
from forge.ir import Symbol, TensorProxy, check
from forge.prims.core import same, torch_check
from forge.torchlang.core import check_tensor, torchsymbol
from forge.torchlang.elementwise import sigmoid, tanh
from forge.torchlang.linalg import linear
from forge.torchlang.random import apply_dropout, check_torch_probability

Parameter = TensorProxy | None
Tensors = Sequence[TensorProxy]


# cells: one step


def _gates(
    op: str, x: TensorProxy, h: TensorProxy, w_ih: TensorProxy, w_hh: TensorProxy, b_ih: Parameter, b_hh: Parameter
) -> tuple[TensorProxy, TensorProxy]:
    """Return the input's and the state's contributions to each gate."""
    check_tensor(op, input=x, hx=h, w_ih=w_ih, w_hh=w_hh)
    return linear(x, w_ih, b_ih), linear(h, w_hh, b_hh)


def _parts(x: TensorProxy, count: int) -> list[TensorProxy]:
    size = x.shape[-1] // count
    return [clang.slice_in_dim(x, x.ndim - 1, i * size, (i + 1) * size) for i in range(count)]


@torchsymbol(torch.lstm_cell)
def lstm_cell(
    input: TensorProxy,
    hx: Tensors,
    w_ih: TensorProxy,
    w_hh: TensorProxy,
    b_ih: Parameter = None,
    b_hh: Parameter = None,
) -> tuple[TensorProxy, TensorProxy]:
    """Return (h, c) after a step: c = f * c + i * tanh(g) and h = o * tanh(c). Source: Hochreiter and Schmidhuber,
    1997."""
    torch_check(len(hx) == 2, lambda: f"lstm_cell: lstm_cell expects two hidden states, but got {len(hx)}")
    i, f, g, o = _parts(clang.add(*_gates("lstm_cell", input, hx[0], w_ih, w_hh, b_ih, b_hh)), 4)
    c = sigmoid(f) * hx[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


@torchsymbol(torch.gru_cell)
def gru_cell(
    input: TensorProxy,
    hx: TensorProxy,
    w_ih: TensorProxy,
    w_hh: TensorProxy,
    b_ih: Parameter = None,
    b_hh: Parameter = None,
) -> TensorProxy:
    """Return n + z * (h - n), where n = tanh(input's term + r * state's term). Source: Cho et al., 2014."""
    from_x, from_h = _gates("gru_cell", input, hx, w_ih, w_hh, b_ih, b_hh)
    (r, z, n), (state_r, state_z, state_n) = _parts(from_x, 3), _parts(from_h, 3)
    n = tanh(n + sigmoid(r + state_r) * state_n)
    return n + sigmoid(z + state_z) * (hx - n)


def _rnn_cell_of(activation: Callable[[TensorProxy], TensorProxy], function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        hx: TensorProxy,
        w_ih: TensorProxy,
        w_hh: TensorProxy,
        b_ih: Parameter = None,
        b_hh: Parameter = None,
    ) -> TensorProxy:
        """Return the activation of the sum of the input's and the state's terms. Source: Elman, 1990."""
        return activation(clang.add(*_gates(op, input, hx, w_ih, w_hh, b_ih, b_hh)))

    return torchsymbol(function)(body)


def _relu(x: TensorProxy) -> TensorProxy:
    return clang.where(x <= 0, 0, x)


rnn_tanh_cell = _rnn_cell_of(tanh, torch.rnn_tanh_cell)
rnn_relu_cell = _rnn_cell_of(_relu, torch.rnn_relu_cell)


# layers: whole sequences


def _layer_inputs(states: Tensors, params: Tensors, has_biases: bool, index: int) -> tuple:
    """Return (h, c, w_ih, w_hh, b_ih, b_hh, w_hr) of layer and direction `index`."""
    h, c = states[0], states[1] if len(states) > 1 else None
    projected = c is not None and not same(h.shape[2], c.shape[2])
    count = 2 + 2 * has_biases + projected
    own = list(params[index * count : (index + 1) * count])
    w_hr = own.pop() if projected else None
    biases = own[2:] if has_biases else (None, None)
    return clang.select(h, 0, index), None if c is None else clang.select(c, 0, index), *own[:2], *biases, w_hr


def _run(
    kind: str,
    input: TensorProxy,
    states: Tensors,
    params: Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple:
    """Return (the last layer's outputs, all states after the last step)."""
    check_torch_probability(kind, dropout)
    x = clang.transpose(input, 0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    last: list[tuple] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            operands = _layer_inputs(states, params, has_biases, layer * directions + direction)
            out, *state = prims.recurrent_layer(kind, direction == 1, (x, *operands))
            outputs.append(out)
            last.append(tuple(state))
        x = outputs[0] if len(outputs) == 1 else clang.cat(outputs, 2)
        if layer < num_layers - 1:
            x = apply_dropout(x, dropout, train)
    after = [clang.stack([each[i] for each in last], 0) for i in range(len(states))]
    return (clang.transpose(x, 0, 1) if batch_first else x), *after


def _check_call(op: str, input: Any, states: list[Any], params: Any, num_layers: int, bidirectional: bool) -> None:
    check(
        isinstance(params, (tuple, list)),
        lambda: f"{op}: packed sequences have batches whose sizes are values; see forge/torchlang/nn/recurrent.py",
        NotImplementedError,
    )
    check_tensor(op, input=input, **{f"hx{i}": state for i, state in enumerate(states)})
    torch_check(
        input.ndim == 3 and all(state.ndim == 3 for state in states),
        lambda: f"{op}: Expected input and hidden states to have 3 dims, but got {input} and {states}",
    )
    layers = num_layers * (2 if bidirectional else 1)
    torch_check(
        all(same(state.shape[0], layers) for state in states),
        lambda: f"{op}: Expected hidden states of {layers} layers, but got {states}",
    )


def _recurrent_of(function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        hx: TensorProxy | Tensors,
        params: Tensors,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[TensorProxy, ...]:
        """Run layers of a cell over sequences; return (outputs, the state after the last step, or an LSTM's h and c).

        Shapes: input (steps, N, features), or (N, steps, features) with batch_first; hx (layers, N, H), or two of them
        for an LSTM. Packed sequences, whose second argument is the batch sizes, are not supported.
        """
        states: list[TensorProxy] = [hx] if isinstance(hx, TensorProxy) else list(hx)
        _check_call(op, input, states, params, num_layers, bidirectional)
        expected = 2 if op == "lstm" else 1
        torch_check(len(states) == expected, lambda: f"{op}: lstm expects two hidden states, but got {len(states)}")
        return _run(op, input, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)

    return torchsymbol(function)(body)


lstm = _recurrent_of(torch.lstm)
gru = _recurrent_of(torch.gru)
rnn_tanh = _recurrent_of(torch.rnn_tanh)
rnn_relu = _recurrent_of(torch.rnn_relu)
