"""OpInfos of recurrent layers and cells."""

from collections.abc import Iterator
from typing import Any

import torch

from forge.testing.opinfo import NO_COMPLEX_ON_A_GPU, Directive, ErrorSample, Sample
from forge.testing.table import Value, op, sample, t, tolerance, wrong

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_REAL = (torch.float32, torch.float64)
_DTYPES = {kind: _REAL if kind == "rnn_relu" else (*_REAL, torch.complex64) for kind in _GATES}
_DIRECTIVES = {kind: (NO_COMPLEX_ON_A_GPU,) if kind in ("lstm", "gru") else () for kind in _GATES}
_OTHER_NUMBERS = tuple(
    Directive(
        "xfail",
        "on a GPU cuDNN draws other numbers for its dropout",
        test=test,
        executors=("torch-prims",),
        devices=("cuda",),
    )
    for test in ("test_consistency", "test_gradient", "test_strided[offset]")  # cuDNN refuses the other layouts
)


def _small(*shape: int) -> Value:
    """Return weights with which no gate saturates."""
    return t(*shape, low=-1, high=1)


def _weights(kind: str, width: int, hidden: int, projected: int, bias: bool) -> Iterator[Value]:
    """Yield the parameters of one layer in one direction."""
    gates = _GATES[kind] * hidden
    yield from (_small(gates, width), _small(gates, projected or hidden))
    if bias:
        yield from (_small(gates), _small(gates))
    if projected:
        yield _small(projected, hidden)


def _call(
    kind: str,
    *,
    layers: int = 1,
    both: bool = False,
    bias: bool = True,
    dropout: float = 0.0,
    train: bool = True,
    first: bool = False,
    projected: int = 0,
    steps: int = 4,
) -> Sample:
    features, hidden, directions = 3, 5, 2 if both else 1
    width = projected or hidden
    params = [
        each
        for layer in range(layers)
        for _ in range(directions)
        for each in _weights(kind, directions * width if layer else features, hidden, projected, bias)
    ]
    x = t(2, steps, features) if first else t(steps, 2, features)
    h, c = t(layers * directions, 2, width), t(layers * directions, 2, hidden)
    state = (h, c) if kind == "lstm" else h
    return sample(x, state, tuple(params), bias, layers, dropout, train, both, first)


def _mistakes(kind: str) -> Iterator[ErrorSample]:
    good = _call(kind).args
    state = (t(1, 2, 5), t(1, 2, 5)) if kind == "lstm" else t(1, 2, 5)
    careless = "torch's kernel for a CPU reads beyond the weight" if kind == "lstm" else ""
    yield wrong(t(4, 2, 7), state, *good[2:], match="cannot be multiplied", stricter=careless)
    yield wrong(t(0, 2, 3), state, *good[2:], match="sequence length to be larger than 0")


for _kind in _GATES:
    _more = (_call(_kind, projected=2), _call(_kind, projected=2, both=True, layers=2)) if _kind == "lstm" else ()
    op(
        _kind,
        _call(_kind),
        _call(_kind, layers=2, both=True, first=True),
        _call(_kind, layers=2, bias=False, train=False, dropout=0.5),
        _call(_kind, steps=1),
        _more,
        _mistakes(_kind),
        dtypes=_DTYPES[_kind],
        directives=_DIRECTIVES[_kind],
        op=getattr(torch, _kind),
    )
    op(
        f"{_kind}.dropout",
        _call(_kind, layers=2, dropout=0.5),
        _mistakes(_kind),
        dtypes=_REAL,
        directives=_OTHER_NUMBERS,
        op=getattr(torch, _kind),
    )


def _cell_call(kind: str, *, bias: bool = True) -> Sample:
    gates, h = _GATES[kind] * 5, t(2, 5)
    biases: dict[str, Any] = {"b_ih": _small(gates), "b_hh": _small(gates)} if bias else {}
    return sample(t(2, 3), (h, t(2, 5)) if kind == "lstm" else h, _small(gates, 3), _small(gates, 5), **biases)


for _kind in _GATES:
    _wrong = _cell_call(_kind)
    op(
        f"{_kind}_cell",
        _cell_call(_kind),
        _cell_call(_kind, bias=False),
        wrong(t(2, 4), *_wrong.args[1:], match="cannot be multiplied"),
        dtypes=(*_DTYPES[_kind], torch.bfloat16),
        directives=(
            *_DIRECTIVES[_kind],
            tolerance(
                "the decomposition rounds to half precision at other places", dtypes=(torch.bfloat16,), executors=None
            ),
        ),
    )
