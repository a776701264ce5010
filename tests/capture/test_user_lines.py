"""Errors while a compiled program runs name the user's line, and tracebacks have the generated one."""

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors import FusionExecutor
from forge.ir import printing
from forge.runtime.buckets import bucket_bytes_at


class Switch:
    """A switch: calls of `fails` fail while it is on."""

    on = False


@torch.library.custom_op("forge_user_lines::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    if Switch.on:
        raise LookupError("now")
    return x.clone()


fails.register_fake(torch.empty_like)
fails.register_autograd(lambda ctx, gradient: fails(gradient))


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    Switch.on = False
    yield
    Switch.on = False
    torch._dynamo.reset()


class Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found = self.table(index)
        return found.exp() * 2


def opaque(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return fails(y).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return fails(gradient) * 2


def with_a_backward(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x * 3).sum()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    x.add_(1)
    return y


def notes_of(call: Callable, error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == 1
    return notes[0]


def told(line: str, call: str) -> str:
    return rf"^at test_user_lines\.py:\d+  {re.escape(line)}, in .*{call}"


@pytest.mark.parametrize("grad", [False, True])
def test_an_error_of_a_forward_has_the_users_line_and_the_call(grad: bool) -> None:
    jitted = forge.jit(Embedded().requires_grad_(grad))
    jitted(torch.tensor([1]))
    note = notes_of(lambda: jitted(torch.tensor([7])), IndexError)
    assert re.search(told("found = self.table(index)", "embedding"), note)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("function", [opaque, with_a_backward])
def test_an_error_of_a_backward_has_the_users_line(function: Callable, create_graph: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    loss = forge.jit(function)(x)
    Switch.on = True
    note = notes_of(lambda: torch.autograd.grad(loss, x, create_graph=create_graph), LookupError)
    line = "return fails(y).sum()" if function is opaque else "return fails(gradient) * 2"
    assert re.search(told(line, "(opaque|fails)"), note)


def test_an_error_of_a_part_of_a_backward_has_the_users_line() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (Doubled.apply(x @ w) @ v).sum()

    x, w, v = [torch.ones(3, 3, requires_grad=True) for _ in range(3)]
    with bucket_bytes_at(1):  # as under DistributedDataParallel
        loss = forge.jit(function)(x, w, v)
    Switch.on = True
    note = notes_of(loss.backward, LookupError)
    assert re.search(told("return fails(gradient) * 2", "fails"), note)


@pytest.mark.parametrize("grad", [False, True])
def test_an_error_of_what_is_written_back_has_the_users_line(grad: bool) -> None:
    shared = torch.ones(1).expand(3)
    weight = torch.ones(3, requires_grad=grad)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = weight * 3
        x.add_(1)
        return y

    note = notes_of(lambda: forge.jit(function)(shared, weight), RuntimeError)
    assert re.search(told("x.add_(1)", "add_"), note)  # an expanded tensor is written to in eager


class Failing(FusionExecutor):
    """An executor that takes all calls, and whose functions raise."""

    def can_fuse(self, bound: Any) -> bool:
        return True

    def fuse(self, region: Any) -> Callable:
        def fail(*given: torch.Tensor) -> None:
            raise RuntimeError("no such kernel")

        return fail


def test_an_error_of_a_region_has_the_lines_of_its_calls() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        y = y.exp()
        return y.cos() + 1

    jitted = forge.jit(function, executors=[Failing("failing"), "torch"], strict=True)
    note = notes_of(lambda: jitted(torch.ones(64)), RuntimeError)
    *lines, last = [line.partition("  ")[2] for line in note.splitlines()]
    assert lines == ["y = x.sin() * 2", "y = y.exp()"]
    assert last.startswith("return y.cos() + 1, in ")


def test_of_a_region_of_many_lines_the_first_ones_are_told() -> None:
    lines = "".join(f"    x = x.sin() + {number}\n" for number in range(12))
    sources = [printing.Source(f"{__file__}:{number}") for number in range(1, 13)]
    code = printing.Code([f"def function(x):  # {lines!r}", "    return 1 / x"], {}, {2: sources})
    function = printing.compile_function("function", code)
    with pytest.raises(ZeroDivisionError) as raised:
        function(0)
    printing.note_location(raised.value)
    printing.note_location(raised.value)  # the second time nothing is new
    (note,) = raised.value.__notes__
    assert len(note.splitlines()) == 9 and note.endswith("or one of 4 other lines, in return 1 / x")


def test_a_program_from_disk_has_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(Embedded())
        jitted(torch.tensor([1])).sum().backward()
        assert forge.explain(jitted).cached == int(cached)
        note = notes_of(lambda jitted=jitted: jitted(torch.tensor([7])), IndexError)
        assert re.search(told("found = self.table(index)", "embedding"), note)


def test_the_note_is_told_once_where_jitted_functions_call_each_other() -> None:
    inner = forge.jit(lambda table, index: F.embedding(index, table))
    outer = forge.jit(torch.compiler.disable(lambda table, index: inner(table, index)))
    table = torch.ones(3, 4)
    outer(table, torch.tensor([1]))
    assert "F.embedding(index, table)" in notes_of(lambda: outer(table, torch.tensor([7])), IndexError)


def test_an_error_outside_of_generated_code_has_no_note() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        raise LookupError("mine")
        return y

    with pytest.raises(LookupError) as raised:
        forge.jit(function)(torch.ones(2))
    assert not hasattr(raised.value, "__notes__")


def test_tracebacks_quote_the_generated_line_and_nothing_outlives_the_program() -> None:
    jitted = forge.jit(Embedded())
    jitted(torch.tensor([1]))
    with pytest.raises(IndexError) as raised:
        jitted(torch.tensor([7]))
    text = "".join(traceback.format_exception(raised.value))
    assert re.search(r'File "<forge forward \d+>", line \d+, in forward\n    found = call_embedding\(', text)
    path = re.search(r"<forge forward \d+>", text)[0]
    assert path in printing._sources
    del jitted, raised
    torch._dynamo.reset()
    gc.collect()
    assert path not in printing._sources
