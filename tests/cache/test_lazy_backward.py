"""Parts of a program from disk that are compiled on first use."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import forge
from tests.cache.test_processes import EXECUTORS, printed, start

PROGRAMS: dict[str, tuple[Callable, Callable]] = {
    "sinh": (lambda x: (x.sum(), x.sinh()), torch.cosh),
    "a length": (lambda x: (x.sum(), x.sin() * x.shape[0]), lambda x: x.cos() * x.shape[0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_backwards_of_a_program_with_symbolic_sizes_are_right_at_every_size(name: str) -> None:
    function, slope = PROGRAMS[name]
    for turn in range(2):
        torch._dynamo.reset()
        jitted = forge.jit(function, executors=["torch"], dynamic=True)
        for size in (8, 9):
            x = torch.randn(size, requires_grad=True)
            torch.testing.assert_close(torch.autograd.grad(jitted(x)[1].sum(), x)[0], slope(x))
            (again,) = torch.autograd.grad(jitted(x)[1].sum(), x, create_graph=True)
            torch.testing.assert_close(again, slope(x))
        assert forge.explain(jitted).cached == turn


class Lists(nn.Module):
    """A module with weights in nested lists, only some of which are torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))]
        self.listed = nn.ParameterList(self.plain[:1])
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for weight, layer in zip(self.plain, self.layers, strict=True):
            x = layer(x @ weight @ self.listed[0])
        return x.sum(), x


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.randn(8, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        x = self.layer(x) @ self.scale * self.calls
        return x.sum(), x


class Two(nn.Module):
    """A module of layers with two outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(x)
        return x.sum(), x


def tied() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return Two(first, nn.GELU(), second)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.einsum("ij,jk,kl->il", x, self.first, self.second)
        return x.sum(), x


class Transformed(nn.Module):
    """A module with a transform of torch.func, constants, and a product of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.vmap(lambda row: self.layer(row).softmax(0))(x)
        x = torch.einsum("ij,kj,kl->il", x, self.layer.weight, x.new_ones(8, 2)) * torch.arange(2).softmax(
            0, torch.float
        )
        return x.sum(), x.sin()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Two(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)),
    "buffers": Buffers,
    "frozen weights": lambda: Two(nn.Linear(8, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 8)),
    "batch norm": lambda: Two(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)),
    "tied weights": tied,
    "lists": Lists,
    "constants": lambda: Two(nn.Linear(8, 8), nn.Dropout(0.1), nn.Softmax(-1)),
    "einsum": Product,
    "transforms": Transformed,
}


def modes(autocast: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


def compiled(name: str, *, autocast: bool) -> Any:
    """Return a model of MODELS, jitted and called once. Its backward recomputes as much as possible, including
    weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    jitted = forge.jit(MODELS[name](), executors=["torch"], memory="smallest")
    with modes(autocast):
        jitted(torch.ones(4, 8))
    return jitted


def stages(jitted: Any) -> list[str]:
    """Return every stage of the compiled programs, without the numbers of constants, which differ between programs."""
    traces = [*forge.last_traces(jitted), *forge.last_backward_traces(jitted)]
    return [re.sub(r"printed_object\(\d+\)", "printed_object", str(trace)) for trace in traces]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_later_is_what_was_compiled_at_once(name: str, autocast: bool) -> None:
    at_once, later = (compiled(name, autocast=autocast) for _ in range(2))
    assert forge.explain(at_once).cached == 0
    assert forge.explain(later).cached == 1
    assert stages(later) == stages(at_once)


class Seeing(TorchDispatchMode):
    """A mode that sees operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@contextmanager
def setting(get: Callable, set: Callable, value: Any) -> Iterator[None]:
    before = get()
    set(value)
    try:
        yield
    finally:
        set(before)


AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "a dispatch mode": Seeing,
    "hooks for modules": lambda: FlopCounterMode(display=False),
    "saved-tensor hooks": torch.autograd.graph.save_on_cpu,
    "no saved-tensor hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none"),
    "a default device": lambda: torch.device("meta"),
    "a default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "no order of products": lambda: torch.backends.opt_einsum.flags(enabled=False),
    "another order of products": lambda: torch.backends.opt_einsum.flags(enabled=True, strategy="greedy"),
    "deterministic algorithms": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.one_in(3)
def test_what_is_around_a_later_compilation_does_not_change_it(around: str) -> None:
    at_once, later = (compiled("transforms", autocast=False) for _ in range(2))
    with AROUND[around]() as mode:
        found = stages(later)
    assert forge.explain(later).cached == 1
    assert found == stages(at_once)
    if isinstance(mode, Seeing):
        assert not mode.seen


@pytest.mark.parametrize("around", ["a dispatch mode", "hooks for modules", "saved-tensor hooks"])
def test_a_backward_that_is_compiled_later_may_be_under_a_mode(around: str) -> None:
    found = []
    for _ in range(2):
        jitted = compiled("transforms", autocast=False)
        x = torch.ones(4, 8, requires_grad=True)
        output = jitted(x)[1]
        with AROUND[around]():
            found.append(torch.autograd.grad(output.sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_hooks_around_a_compilation_are_not_part_of_what_is_kept() -> None:
    with torch.autograd.graph.save_on_cpu():
        under = stages(compiled("transforms", autocast=False))
    assert stages(compiled("transforms", autocast=False)) == under


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the first": lambda first, second: first,
    "the second": lambda first, second: second.float().square().mean(),
    "both": lambda first, second: first + second.float().square().mean(),
}


def gradients(jitted: Any, *, autocast: bool) -> list[Tensor | None]:
    """Return the gradients of each loss."""
    found: list[Tensor | None] = []
    for loss in LOSSES.values():
        jitted.zero_grad()
        torch.manual_seed(1)
        with modes(autocast):
            outputs = jitted(torch.ones(4, 8))
        loss(*outputs).backward()
        found += [each.grad for each in jitted.parameters()]
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_set_of_outputs_are_those_of_the_process_that_compiled(name: str, autocast: bool) -> None:
    found = []
    for turn in range(2):
        jitted = compiled(name, autocast=autocast)
        found.append(gradients(jitted, autocast=autocast))
        assert forge.explain(jitted).cached == turn
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


TWO_OUTPUTS = """
import torch, forge
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)

    def forward(self, x, target):
        logits = self.b(self.a(x))
        return F.cross_entropy(logits.float(), target), logits

torch.manual_seed(0)
model = Model()
jitted = forge.jit(model)
for weights in [(1, 0), (0, 1), (1, 1)]:
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = jitted(torch.ones(4, 8), torch.tensor([0, 1, 2, 3]))
        losses = loss, logits.float().square().mean()
    model.zero_grad()
    sum(loss for loss, weight in zip(losses, weights) if weight).backward()
    print([each.grad.tolist() for each in model.parameters()])
print("cached", forge.explain(jitted).cached)
"""


@pytest.mark.parametrize("executors", EXECUTORS)
@pytest.mark.slow
def test_gradients_of_every_set_of_outputs_in_a_second_process(executors: str) -> None:
    first, second = (printed(start(executors, program=TWO_OUTPUTS)) for _ in range(2))
    assert first.endswith("cached 0\n")
    assert second == first.replace("cached 0", "cached 1")


# the first process requests the gradient of another output than the second; an LSTM is an opaque call of a builtin
RECURRENT = """
import sys
import torch
import forge

torch.manual_seed(0)
model = torch.nn.LSTM(4, 3)
jitted = forge.jit(model)
jitted(torch.randn(5, 4))[0 if sys.argv[1] == "first" else 1][0].sum().backward()
print(forge.explain(jitted).cached, model.weight_ih_l0.grad.abs().sum().item() > 0)
"""


@pytest.mark.slow
def test_another_process_compiles_another_backward_of_a_builtin() -> None:
    """A builtin is printed with its address, which differs between processes."""
    assert printed(start("torch", "first", program=RECURRENT)).split() == ["0", "True"]
    assert printed(start("torch", "second", program=RECURRENT)).split() == ["1", "True"]
