"""Errors of torch for bad arguments are raised by a jitted function with torch's own types."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.capture.handles import handle_of

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
    """Dynamo's fake tensors do not detect these."""

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
    assert any("is refused" in reason for reason in handle_of(jitted).history.graph_breaks)
    with pytest.raises(Exception) as raised:
        REFUSED[name](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(raised.type) as ours_raised:  # one message: torch's, with forge's as a note
            forge.jit(REFUSED[name])(x)
    assert [note.partition(": ")[2].partition(":")[0] for note in ours_raised.value.__notes__] == [
        "a frame runs in eager"
    ]
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"strict": True}])
def test_where_nothing_may_run_in_eager_the_refusal_names_the_op_and_what_came(options: dict) -> None:
    with pytest.raises(RuntimeError, match=r"index_add.*dtype.*f32\[2, 3\]"):
        forge.jit(REFUSED["a source's dtype"], **options)(torch.ones(2, 3))


CAUGHT: dict[str, Callable] = {
    "shapes": lambda x: x + torch.ones(7),
    "a dim": lambda x: x.sum(7),
    "a keyword": lambda x: other_dtype(x, scale=2),
    "no argument": lambda x: other_dtype(),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_what_a_program_catches_is_eagers(name: str) -> None:
    """Since torch 2.15, Dynamo would go on with its own error, and with RuntimeError for any error of torch."""

    def program(x: torch.Tensor) -> tuple:
        try:
            return CAUGHT[name](x * 2), "returned"
        except RuntimeError as error:
            return x + 1, str(error)
        except (IndexError, TypeError) as error:
            return x + 2, str(error)

    x = torch.ones(2, 3)
    ours, eager = forge.jit(program)(x), program(x)
    assert ours[1] == eager[1]
    torch.testing.assert_close(ours[0], eager[0])


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.first(x) * scale)


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, torch.ones(2, 3))


LINE = r"test_torch_errors.py:\d+  "
WRONG_CALLS = {
    "shapes": (Layers, (torch.ones(2, 3),), {}, RuntimeError, rf"at {LINE}return self.*\n.*linear.*\[2, 4\], \[2, 5\]"),
    "a keyword": (
        Layers,
        (torch.ones(2, 3),),
        {"scal": 2},
        TypeError,
        rf"'scal'(?s:.*)call of forward, {LINE}def forward",
    ),
    "no argument": (Layers, (), {}, TypeError, rf"argument: x(?s:.*)call of forward, {LINE}def forward"),
    "no tensor": (Layers, (5,), {}, TypeError, rf"must be Tensor, not int\nat {LINE}return self.*\nin linear"),
    "a device": (
        Layers,
        (torch.ones(2, 3, device="meta"),),
        {},
        RuntimeError,
        rf"meta(?:, | and )cpu!?\nat {LINE}.*\nin linear",
    ),
    "a dtype": (lambda: other_dtype, (torch.ones(2, 3).double(),), {}, RuntimeError, rf"same dtype\nat {LINE}return F"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_under_fullgraph_a_wrong_call_is_one_error_with_the_op_and_the_users_line(name: str) -> None:
    make, args, kwargs, error, told = WRONG_CALLS[name]
    with pytest.raises(error) as raised:
        forge.jit(make(), fullgraph=True)(*args, **kwargs)
    lines = [str(raised.value), *raised.value.__notes__]
    assert re.search(told, "\n".join(lines)) and all("\n" not in line for line in lines)


def test_a_refused_call_that_torch_refuses_too_is_one_error_with_forges_line_and_the_weights_path() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    for function, told in (
        (other_dtype, rf"weight is ones: f32\[2, 3\].* must have the same dtype \({LINE}return F"),
        (linear, r"x: f64|input: f64.*weight is 0\.weight: f32\[4, 3\].* bias is 0\.bias: f32"),
        (Outer(), rf"weight is inner\.0\.weight: f32\[4, 3\].*bias is inner\.0\.bias: .*\({LINE}return self\.inner"),
    ):
        with warnings.catch_warnings(), pytest.raises(RuntimeError) as raised:
            warnings.simplefilter("error")
            forge.jit(function)(torch.ones(2, 3).double())
        (note,) = raised.value.__notes__
        assert note.startswith("forge: a frame runs in eager: linear: ") and re.search(told, note)


@pytest.mark.filterwarnings("error")
def test_an_error_after_a_refused_call_says_so_once() -> None:
    """A note about one call is not added to the error of the next."""
    jitted = forge.jit(other_dtype)
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            jitted(torch.ones(2, 3).double())
        assert len(raised.value.__notes__) == 1
    jitted(torch.ones(2, 3))


def test_a_graph_break_under_fullgraph_stays_dynamos_with_the_users_frames_alone() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching") as raised:
        forge.jit(lambda x: x * 2 if x.sum() > 0 else x, fullgraph=True)(torch.ones(2))
    _, _, frames = str(raised.value).partition("from user code:")
    assert re.findall(r'File ".*?(\w+\.py)"', frames) == ["test_torch_errors.py"]


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
