"""The errors of torch for bad arguments come out of a jitted function with torch's own types."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.records import record_of

WRONG: dict[str, Callable] = {
    "a probability above 1": lambda x: F.dropout(x, 1.5),
    "a probability that is no number": lambda x: F.dropout(x, float("nan")),
    "a probability below 0, of channels": lambda x: F.dropout2d(x, -0.1),
    "one value for each channel in training": lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
    "a reduction that there is none of": lambda x: F.mse_loss(x, x, reduction="product"),
    "a dim out of range": lambda x: x.sum(7),
    "shapes that do not broadcast": lambda x: x + torch.ones(7),
    "a complex ceil": lambda x: torch.ceil(x * 1j),
    "a float index": lambda x: torch.gather(x, 0, x),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_raise_what_eager_raises(name: str) -> None:
    function, x = WRONG[name], torch.randn(2, 3, 4, 4)
    with pytest.raises(Exception) as eager:
        function(x)
    with pytest.raises(eager.type):
        forge.jit(function)(x)
    torch._dynamo.reset()


REFUSED: dict[str, Callable] = {
    "a product of two dtypes": lambda x: x[0, 0] @ torch.ones(4, 4, dtype=torch.int64),
    "a layer's dtype": lambda x: F.linear(x, torch.ones(2, 4, dtype=torch.float64)),
    "a source's dtype": lambda x: x.index_add(0, torch.tensor([0, 1]), x.double()),
    "values that do not broadcast": lambda x: x.index_put((torch.tensor([0]),), torch.ones(7)),
    "a bool taken from a number": lambda x: 1 - (x > 0),
    "an integer to a negative power": lambda x: torch.arange(3) ** -1,
    "a negative beta": lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
    "a target's dtype": lambda x: F.cross_entropy(x[0, 0], torch.zeros(4).int()),
    "more samples than there are": lambda x: torch.multinomial(x[0, 0].abs(), 9),
    "a probability above 1, drawn in place": lambda x: x.clone().bernoulli_(1.5),
    "the largest of nothing": lambda x: x[:0].max(),
    "a slice of another shape": lambda x: x.slice_scatter(torch.ones(9, 9)),
    "a variance of integers": lambda x: torch.arange(4).std(),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_while_it_runs_is_caught_by_the_program(name: str, requires_grad: bool) -> None:
    """Dynamo's fake tensors let these pass."""

    def program(x: torch.Tensor) -> tuple:
        y = x * 2
        try:
            return REFUSED[name](y), "returned"
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return y + 1, type(error).__name__, str(error)

    x = torch.randn(2, 3, 4, 4, requires_grad=requires_grad)
    jitted = forge.jit(program)
    with pytest.warns(UserWarning, match="runs in eager"):
        ours = jitted(x)
    eager = program(x)
    assert ours[1:] == eager[1:]
    torch.testing.assert_close(ours[0], eager[0])
    assert any("is refused" in reason for reason in record_of(jitted).history.graph_breaks)
    with pytest.raises(Exception) as raised:
        REFUSED[name](x)
    with pytest.raises(raised.type), pytest.warns(UserWarning, match="runs in eager"):
        forge.jit(REFUSED[name])(x)
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"strict": True}])
def test_where_nothing_may_run_in_eager_the_refusal_names_the_op_and_what_came(options: dict) -> None:
    with pytest.raises(RuntimeError, match=r"index_add.*dtype.*f32\[2, 3\]"):
        forge.jit(REFUSED["a source's dtype"], **options)(torch.ones(2, 3))


def test_torch_compile_raises_what_torch_raises() -> None:
    with pytest.raises(RuntimeError, match="source"):
        torch.compile(REFUSED["a source's dtype"], backend="forge")(torch.ones(2, 3))


def test_what_ran_before_a_refused_call_ran_once() -> None:
    seen = []

    def program(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        written.add_(1)
        torch._dynamo.graph_break()
        seen.append(len(seen))
        written.mul_(2)
        try:
            return F.linear(x, torch.ones(2, 4, dtype=torch.float64))
        except RuntimeError:
            return x + written

    written = torch.zeros(4)
    with pytest.warns(UserWarning, match="runs in eager"):
        result = forge.jit(program)(torch.ones(3, 4), written)
    assert seen == [0, 1]
    torch.testing.assert_close(written, torch.full((4,), 2.0))
    torch.testing.assert_close(result, torch.full((3, 4), 3.0))
