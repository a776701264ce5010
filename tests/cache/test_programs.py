"""A compiled program is found on disk at its next capture, and has the same results."""

import functools
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import from_disk, is_cached
from torch import nn

import forge
from forge.capture.handles import handle_of
from forge.runtime.autograd import _UNPACKS_EACH
from tests.unknown_operator import rounded

X = torch.linspace(-1, 1, 24).view(6, 4)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(F.gelu(self.norm(self.first(x))), 0.5, self.training))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


def net(jit: Callable) -> Any:
    torch.manual_seed(1)
    model = Net()
    y = jit(model)(X)
    y.square().sum().backward()
    return y, [each.grad for each in model.parameters()], list(model.buffers())


def inference(jit: Callable) -> Any:
    torch.manual_seed(1)
    model = Net().eval()
    with torch.no_grad():
        return jit(model)(X)


def a_view_of_an_input(jit: Callable) -> Any:
    x = torch.arange(6.0).view(2, 3)
    y = jit(lambda x: x[0])(x)
    y.add_(1)
    return x, y


def a_result_changed_before_the_backward_of_a_loss(jit: Callable) -> Any:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    y, loss = jit(lambda x: ((x @ x.t()).tanh(), x.square().sum()))(x)
    if _UNPACKS_EACH:
        y.mul_(2)
    return torch.autograd.grad(loss, x)


def an_input_changed_in_place(jit: Callable) -> Any:
    x, total = torch.arange(6.0), torch.zeros(())

    @jit
    def run(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += x.sum()
        return x.mul_(2)[1:]

    return run(x, total), x, total


def inputs_that_overlap(jit: Callable) -> Any:
    base = torch.arange(6.0)
    result = jit(lambda x, y: x.mul_(2) + y)(base[:4], base[2:])
    return result, base


def an_epilogue_in_training(jit: Callable) -> Any:
    w, state = leaf(4), torch.zeros(4)

    @jit
    def run(w: torch.Tensor, state: torch.Tensor) -> tuple:
        y = w * 2
        state.add_(y.detach())
        return y, y[1:], state

    y, part, changed = run(w, state)
    (part.sum() + y.sum()).backward()
    return y, part, changed, state, w.grad


def randomness(jit: Callable) -> Any:
    torch.manual_seed(3)
    x = leaf(50)
    y = jit(lambda x: F.dropout(x, 0.5) + torch.randn(50))(x)
    y.sum().backward()
    return y, x.grad, torch.randn(2)


def an_opaque_call(jit: Callable) -> Any:
    a, b = torch.eye(3).mul(2).requires_grad_(), leaf(3)
    y = jit(lambda a, b: (rounded(a) @ b).sum())(a, b)
    y.backward()
    return y, a.grad, b.grad


def an_opaque_call_that_writes(jit: Callable) -> Any:
    table = leaf(5, 3)
    y = jit(lambda w, i: F.embedding(i, w.clone(), max_norm=0.5))(table, torch.tensor([1, 2, 1]))
    y.sum().backward()
    return y, table.grad


def an_autograd_function(jit: Callable) -> Any:
    x = leaf(3)
    jit(lambda x: Cube.apply(x).sum())(x).backward()
    return x.grad


def a_gradient_of_a_gradient(jit: Callable) -> Any:
    x = leaf(3)
    (g,) = torch.autograd.grad(jit(lambda x: (x**3).sum())(x), x, create_graph=True)
    g.sum().backward()
    return g, x.grad


def one_output_of_two(jit: Callable) -> Any:
    x = leaf(3)
    first, second = jit(lambda x: (x.exp(), x.sin()))(x)
    second.sum().backward()
    return x.grad, first, second


def constants(jit: Callable) -> Any:
    x = leaf(4, 4)
    held = torch.arange(4.0)

    def run(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4).tril() == 0
        rows = torch.arange(4, dtype=torch.float64).expand(4, 4)
        return (x.masked_fill(mask, float("-inf")).softmax(-1) * rows * held + torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()

    y = jit(run)(x)
    y.backward()
    return y, x.grad


def under_autocast(jit: Callable) -> Any:
    w = leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = jit(lambda x, w: torch.relu(x @ w))(X, w)
    y.float().sum().backward()
    return y, w.grad


def attention(jit: Callable) -> Any:
    q, k, v = (leaf(1, 2, 5, 8) for _ in range(3))
    y = jit(functools.partial(F.scaled_dot_product_attention, is_causal=True))(q, k, v)
    y.sum().backward()
    return y, q.grad, k.grad, v.grad


def a_checkpoint(jit: Callable) -> Any:
    x = leaf(4)
    run = lambda x: torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()
    y = jit(run)(x)
    y.backward()
    return y, x.grad


def without_grad_inside(jit: Callable) -> Any:
    x = leaf(3)

    @jit
    def run(x: torch.Tensor) -> tuple:
        with torch.no_grad():
            y = x * 2
        return y, x * y

    y, z = run(x)
    z.sum().backward()
    return y, z, x.grad


PROGRAMS = [
    net,
    inference,
    a_view_of_an_input,
    a_result_changed_before_the_backward_of_a_loss,
    an_input_changed_in_place,
    inputs_that_overlap,
    an_epilogue_in_training,
    randomness,
    an_opaque_call,
    an_opaque_call_that_writes,
    an_autograd_function,
    constants,
    under_autocast,
    attention,
    a_checkpoint,
    without_grad_inside,
]
LATER = [a_gradient_of_a_gradient, one_output_of_two]  # parts that an entry lacks are compiled when needed


class Jit:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[Any] = []

    def __call__(self, target: Any) -> Any:
        self.made.append(forge.jit(target, **self.options))
        return self.made[-1]


def run(program: Callable, jit: Callable) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return program(jit)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_from_disk_does_what_eager_does(program: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(program, lambda target: target)
    run(program, Jit())
    from_disk(monkeypatch)
    jit = Jit()
    torch.testing.assert_close(run(program, jit), expected)
    assert all(map(is_cached, jit.made))


@pytest.mark.parametrize("program", LATER)
def test_what_an_entry_does_not_have_is_compiled_from_the_graph(program: Callable) -> None:
    expected = run(program, lambda target: target)
    run(program, Jit())
    jit = Jit()
    torch.testing.assert_close(run(program, jit), expected)
    assert all(map(is_cached, jit.made))


@pytest.mark.parametrize("program", LATER)
def test_it_is_compiled_under_the_modes_of_the_capture(program: Callable) -> None:
    """The backward runs outside the autocast and the default dtype of the capture."""

    def under(jit: Callable) -> Any:
        def called(target: Callable) -> Callable:
            jitted = jit(target)

            def call(*args: Any) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return jitted(*args)

            return call

        return program(called)

    expected = run(under, lambda target: target)
    run(under, Jit())
    jit = Jit()
    torch.testing.assert_close(run(under, jit), expected)
    assert all(map(is_cached, jit.made))


def test_the_stages_are_compiled_when_they_are_asked_for() -> None:
    first, second = Jit(), Jit()
    run(net, first)
    run(net, second)
    assert is_cached(second.made[0])
    compiled, found = (forge.last_traces(each.made[0]) for each in (first, second))
    assert list(map(str, found)) == list(map(str, compiled))


def test_explain_tells_of_a_program_from_disk_what_it_told_before() -> None:
    first, second = Jit(), Jit()
    run(net, first)
    told = forge.explain(first.made[0])
    run(net, second)
    again = forge.explain(second.made[0])
    assert again.rows == told.rows
    assert (told.cached, again.cached) == (0, 1)
    assert list(again.seconds) == ["load"]
    assert "1 from disk" in str(again)


def test_lines_of_the_user_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\n{}def run(x):\n    return x.sin() + 1\n"
    rows = []
    for gap in ("", "\n\n\n"):
        torch._dynamo.reset()
        scope: dict[str, Any] = {}
        exec(compile(source.format(gap), "program.py", "exec"), scope)
        jitted = forge.jit(scope["run"])
        jitted(X)
        rows.append([row.source for row in forge.explain(jitted).rows])
    assert is_cached(jitted)
    assert ("program.py:3" in rows[0][0], "program.py:6" in rows[1][0]) == (True, True)


def test_one_graph_on_other_lines_is_another_program(capfd: pytest.CaptureFixture[str]) -> None:
    """A cached program has the lines of its calls by number: in a file with another layout, they may be missing or
    wrong."""
    told = []
    for body in ("(\nx.sin()\n.add(1)\n.exp()\n)", "(\nx.sin()\n.add(1).exp()\n)", "x.sin().add(1).exp()"):
        scope: dict[str, Any] = {}
        exec(compile(f"def run(x): return {body}\n", "program.py", "exec"), scope)
        jitted = forge.jit(scope["run"], executors=["torch"])
        jitted(X)
        assert not is_cached(jitted)
        told.append([row.source.strip() for row in forge.explain(jitted).rows])
    two, three, four = "program.py:2", "program.py:3", "program.py:4"
    assert told == [[two, three, four], [two, three, three], ["program.py:1"] * 3]
    assert "program cache" not in capfd.readouterr().err


def test_two_models_of_one_structure_share_an_entry(programs: Any) -> None:
    torch.manual_seed(0)
    models = [Net().eval() for _ in range(2)]
    jitted = [forge.jit(model) for model in models]
    for model, each in zip(models, jitted, strict=True):
        torch.testing.assert_close(each(X), model(X))
    assert [is_cached(each) for each in jitted] == [False, True]
    assert len(os.listdir(programs)) == 1


def test_steps_of_an_optimizer_follow_eager() -> None:
    def losses(jit: Callable) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
        step, optimizer, found = jit(model), torch.optim.Adam(model.parameters(), 0.1), []
        for _ in range(5):
            loss = step(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = run(losses, lambda target: target)
    run(losses, Jit())
    jit = Jit()
    torch.testing.assert_close(run(losses, jit), expected)
    assert is_cached(jit.made[0])


def test_nothing_outlives_a_program_from_disk() -> None:
    for _ in range(2):
        model = Net()
        jitted = forge.jit(model)
        jitted(X).sum().backward()
    assert is_cached(jitted)
    gone = weakref.ref(model)
    del model, jitted
    gc.collect()
    assert gone() is None


def test_a_program_that_was_kept_is_in_the_record() -> None:
    for _ in range(2):
        jitted = forge.jit(Net())
        jitted(X)
    assert [compiled.cached for compiled in handle_of(jitted).reports] == [True]
