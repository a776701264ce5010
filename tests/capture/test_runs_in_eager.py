"""Code that runs in eager: one warning, with the reason and at the user's line; an error under strict."""

import asyncio
import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import forge
from forge import clang, torchlang
from forge.torch_internals import dynamo_calls

library = torch.library.Library("forge_in_eager", "DEF")
library.define("without_a_fake(Tensor x) -> Tensor")
library.impl("without_a_fake", lambda x: x * 2, "CPU")


@torch.library.custom_op("forge_in_eager::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("forge_in_eager::careless", mutates_args=())
def careless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@careless.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("this fake is wrong")


def calls_custom(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return custom(y) + 1


def calls_careless(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return careless(y) + 1


def loops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x.sin()
        torch._dynamo.graph_break()
    return x


@torch.compiler.disable
def kept_out(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def calls_what_is_kept_out(x: torch.Tensor) -> torch.Tensor:
    return kept_out(x)


# code that runs in eager: the line, and the warning
NOTHING = {
    "no fake": (
        calls_custom,
        "return custom(y) + 1",
        r"no fake impl registered.*register_fake.*, in forge_in_eager\.custom\.default of tensors of shapes \[2\]",
    ),
    "a wrong fake": (calls_careless, "return careless(y) + 1", "ValueError: this fake is wrong, in forge_in_eager"),
    "a break in a loop": (loops, "torch._dynamo.graph_break()", "User-inserted graph break"),
    "nothing but what is kept out": (calls_what_is_kept_out, "return kept_out(x)", "torch.compiler.disable"),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def line_of(function: Callable, text: str) -> int:
    path, first = function.__code__.co_filename, function.__code__.co_firstlineno
    with open(path) as file:
        lines = file.readlines()
    return next(number for number in range(first, len(lines)) if lines[number - 1].strip() == text)


@pytest.mark.parametrize("name", NOTHING)
def test_that_nothing_was_compiled_is_one_warning_with_the_reason_at_the_users_line(name: str) -> None:
    function, line, reason = NOTHING[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = forge.jit(function)(torch.ones(2))
    torch.testing.assert_close(result, function(torch.ones(2)))
    (warning,) = caught
    number = line_of(function, line)
    assert (warning.filename, warning.lineno) == (__file__, number)
    start = f"forge: nothing of {function.__name__} was compiled, it runs in eager: "
    text = str(warning.message)
    assert text.startswith(start) and re.search(reason, text)
    assert text.endswith(f"(test_runs_in_eager.py:{number}  {line})")


@pytest.mark.parametrize("name", ["no fake", "a wrong fake"])
def test_what_cannot_be_captured_is_told_once_and_not_captured_at_every_call(name: str) -> None:
    function = NOTHING[name][0]
    jitted = forge.jit(function)
    told, tries = [], []
    for _ in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(jitted(torch.ones(2)), function(torch.ones(2)))
        told.append(len(caught))
        tries.append(len(forge.explain(jitted).graph_breaks))
    assert told == [1, 0, 0, 0, 0, 0] and tries[1] == tries[-1] > 0


def test_an_error_inside_of_the_capture_is_told_once_and_other_frames_stay_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise KeyError("inside")

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return inner(y)

    monkeypatch.setattr(dynamo_calls._call_torch, "replacement", fails)
    jitted = forge.jit(outer)
    told, tries = [], []
    for _ in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(jitted(torch.ones(2)), outer(torch.ones(2)))
        told += [str(each.message) for each in caught]
        tries.append(len(forge.explain(jitted).graph_breaks))
    assert tries[1] == tries[-1] and forge.explain(jitted).graphs == 1
    assert len(told) == 1 and told[0].startswith("forge: a frame runs in eager: KeyError: inside")


def test_a_call_that_raises_is_captured_again() -> None:
    """The arguments were wrong, and those of the next call may be right."""
    jitted = forge.jit(lambda x, y: x @ y)
    for _ in range(4):
        with pytest.raises(RuntimeError):
            jitted(torch.ones(2, 3), torch.ones(2, 3))
    torch.testing.assert_close(jitted(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 3.0))
    assert forge.explain(jitted).graphs == 1


class Bounded(torch.nn.Module):
    """A module with a method that raises its own exception, and that notes when its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.python_runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.python_runs += 1
        if x.shape[0] > 4:
            self.refuse(x)
        return x.sin()

    def refuse(self, x: torch.Tensor) -> None:
        raise ValueError(f"{x.shape[0]} rows are too many")


def test_programs_run_after_a_call_in_which_the_user_s_code_raised() -> None:
    module = Bounded()
    jitted = forge.jit(module, dynamic=False)
    jitted(torch.ones(2))
    for _ in range(3):
        with pytest.raises(ValueError, match="8 rows are too many"):
            jitted(torch.ones(8))
        before = module.python_runs
        jitted(torch.ones(2))
        assert module.python_runs == before
    jitted(torch.ones(3))
    assert module.python_runs == before and forge.explain(jitted).graphs == 2


def test_where_no_line_is_known_the_warning_stands_at_the_call() -> None:
    for jitted in (forge.jit(kept_out), forge.jit(Kept())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jitted(torch.ones(2))
        (warning,) = caught
        assert warning.filename == __file__ and "was compiled, it runs in eager" in str(warning.message)


class Kept(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_a_graph_that_runs_in_eager_is_told_at_the_users_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone().set_(torch.zeros(3))

    with pytest.warns(UserWarning, match="a graph runs in eager") as caught:
        forge.jit(function)(torch.randn(3))
    told = [each for each in caught if "a graph runs in eager" in str(each.message)]
    number = line_of(function, "return x.clone().set_(torch.zeros(3))")
    assert [(each.filename, each.lineno) for each in told] == [(__file__, number)]
    with pytest.raises(forge.StrictError, match=r"forge cannot compile a graph: torch\.Tensor\.set_ .*return x\.clone"):
        forge.jit(function, strict=True)(torch.randn(3))


@pytest.mark.parametrize(
    ("result", "text"),
    [(lambda x: clang.unsqueeze(x, 0), "f32[1, 3]"), (lambda x: clang.to(x, torch.float64), "f64[3]")],
    ids=["shape", "dtype"],
)
def test_a_symbol_of_another_shape_or_dtype_than_torchs_runs_in_eager_by_name(
    result: Callable, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchlang.find(torch.tanh), "body", result)
    x = torch.randn(3)
    message = f"torch.tanh gives f32[3], but forge's symbol {text}"
    with pytest.warns(UserWarning, match=re.escape(message)):
        out = forge.jit(lambda x: torch.tanh(x) * 2)(x)
    torch.testing.assert_close(out, torch.tanh(x) * 2)
    with pytest.raises(forge.StrictError, match=f"{re.escape(message)}.*correct the symbol's meta function"):
        forge.jit(lambda x: torch.tanh(x) * 2, strict=True)(x)


async def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_generators_and_async_functions_run_when_they_are_asked_and_say_so() -> None:
    ran = []

    def parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for number in range(2):
            ran.append(number)
            yield x * number

    x = torch.ones(2)
    with pytest.warns(UserWarning, match="nothing of parts .*: a generator or an async function runs after"):
        found = forge.jit(parts)(x)
    assert inspect.isgenerator(found) and torch.equal(next(found), x * 0) and ran == [0]
    found.close()
    with pytest.warns(UserWarning, match="nothing of _doubled was compiled"):
        assert torch.equal(asyncio.run(forge.jit(_doubled)(x)), x * 2)
    compiled = forge.jit(lambda x: sum(parts(x)))
    assert torch.equal(compiled(x), x) and forge.explain(compiled).graphs == 1
    with pytest.raises(forge.StrictError, match="jit what it calls"):
        forge.jit(parts, strict=True)(x)


def test_what_ends_a_graph_is_told_by_explain_and_not_by_dynamo() -> None:
    program = """
import time, torch, forge
def breaks(x):
    return x * x.sum().item() + time.time() * 0
jitted = forge.jit(breaks)
jitted(torch.ones(3))
assert len(forge.explain(jitted).graph_breaks) > 1
"""
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_LOGS"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_an_operator_without_a_fake_is_a_graph_break_that_names_it() -> None:
    jitted = forge.jit(lambda x: torch.ops.forge_in_eager.without_a_fake(x.sin()) + 1)
    jitted(torch.ones(2))
    reason = forge.explain(jitted).graph_breaks[0]
    assert re.search(r"unsupported operator: forge_in_eager\.without_a_fake.*register_fake", reason)


def writes(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    x[(i, j), (j, j)] = 0.0
    return x + 1


def adds(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    x[:, (i, j)] += 3
    return x + 1


# torch reads the tensors of a sequence in C++, which fails only for fake tensors
BY_TENSORS: dict[str, Callable] = {
    "read": lambda x, i, j: x[:, (i, j)] + 1,
    "read by two": lambda x, i, j: x[(i, j), [j, i]] + 1,
    "read beside a number": lambda x, i, j: x[:, [i, 1]] + 1,
    "read in two dims": lambda x, i, j: x[[[i], [j]]] + 1,
    "written": writes,
    "added": adds,
}


class Indexed(torch.nn.Module):
    def __init__(self, index: Callable) -> None:
        super().__init__()
        self.index, self.linear = index, torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.index(self.linear(x), *rows).sum() * x)


@pytest.mark.parametrize("name", BY_TENSORS)
def test_tensors_in_a_sequence_as_an_index_break_the_graph_and_what_is_around_is_captured(name: str) -> None:
    model = Indexed(BY_TENSORS[name])
    x, rows = torch.randn(4, 5), torch.tensor([1, 3])
    expected = model(x, rows)
    wanted = torch.autograd.grad(expected.sum(), list(model.parameters()))
    jitted = forge.jit(model, executors=["torch"], cache=False)
    actual = jitted(x, rows)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), list(model.parameters())), wanted)
    told = forge.explain(jitted)
    linear = [row for row in told.rows if row.phase == "forward" and row.operation.endswith("linear")]
    assert len(linear) == 2 and told.eager == [] == told.skipped
    assert any("reads the value of a tensor" in each for each in told.graph_breaks)


def test_a_list_of_tensors_is_a_tensor_in_the_graph() -> None:
    jitted = forge.jit(lambda x: torch.as_tensor([x[0], x[1] * 2]) + 1, executors=["torch"])
    x = torch.randn(3)
    torch.testing.assert_close(jitted(x), torch.as_tensor([x[0], x[1] * 2]) + 1)
    assert forge.explain(jitted).graphs == 1 and forge.explain(jitted).graph_breaks == []


@pytest.mark.parametrize("name", NOTHING)
def test_strict_refuses_where_nothing_would_be_compiled(name: str) -> None:
    function, line, reason = NOTHING[name]
    jitted = forge.jit(function, strict=True)
    error = ValueError if name == "a wrong fake" else forge.StrictError  # the call's own error, which torch may raise
    for _ in range(2):  # it stays refused
        with pytest.raises(error) as raised:
            jitted(torch.ones(2))
        text = "\n".join([f"{type(raised.value).__name__}: {raised.value}", *getattr(raised.value, "__notes__", ())])
        assert re.search(reason.partition(", in")[0], text) and line in text


def test_strict_leaves_errors_of_the_program_their_types_and_what_is_compiled_alone() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as raised:
        forge.jit(lambda x: x + torch.ones(7), strict=True)(torch.ones(2))
    assert type(raised.value) is RuntimeError
    with pytest.raises(TypeError):
        forge.jit(lambda x: x.sum(nothing=1), strict=True)(torch.ones(2))

    def breaks(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.ones(2)
    torch.testing.assert_close(forge.jit(breaks, strict=True)(x), x.sin().cos())


def test_strict_refuses_a_function_that_dynamo_gives_up_on_beside_what_is_compiled() -> None:
    function = lambda x: loops(x.cos())
    with pytest.raises(forge.StrictError, match=r"a function runs in eager: loops .*User-inserted graph break"):
        forge.jit(function, strict=True)(torch.ones(2))


@pytest.mark.filterwarnings("ignore:forge")
def test_strict_refuses_a_frame_of_which_dynamo_compiles_no_more() -> None:
    function = lambda x, n: x * n
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        jitted = forge.jit(function, strict=True, dynamic=False)
        x = torch.ones(2)
        for n in (2, 3):
            torch.testing.assert_close(jitted(x, n), x * n)
        for n in (4, 5):
            with pytest.raises(forge.StrictError, match="recompile limit"):
                jitted(x, n)
        torch.testing.assert_close(jitted(x, 3), x * 3)


def test_where_dynamo_is_disabled_a_jitted_model_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    for target in (model, loops):
        jitted = forge.jit(target, fullgraph=True, strict=True)
        assert torch.equal(jitted(x), target(x))
        assert forge.explain(jitted).graph_breaks == ["Dynamo is disabled (TORCHDYNAMO_DISABLE=1)"]
        assert "nothing was compiled, it runs in eager" in str(forge.explain(jitted))
