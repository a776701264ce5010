"""A language model's head and loss in chunks of rows: memory, and correctness at the edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forge
from forge.executors.torchex import linear_cross_entropy as runs
from forge.ir.pytree import tree_map
from forge.transforms import linear_cross_entropy

ROWS, VOCABULARY, WIDTH = 512, 300, 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 0)
    monkeypatch.setattr(runs, "CPU_CHUNK_BYTES", 4 * VOCABULARY * 64)
    monkeypatch.setattr(runs, "SOFTMAX_BYTES", 4 * VOCABULARY * 10)  # 10 rows of float32


class Largest(TorchDispatchMode):
    """A mode that records the largest number of elements of any tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.elements = max(self.elements, x.numel())
        return result


def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().view(-1, VOCABULARY), labels.view(-1))


def loss_and_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple:
    logits = F.linear(hidden, weight)
    shifted = logits[:, :-1].float().contiguous()
    return F.cross_entropy(shifted.view(-1, VOCABULARY), labels[:, 1:].reshape(-1)), logits


def arguments(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    hidden = torch.randn(4, ROWS // 4, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    return [hidden, weight, torch.randint(0, VOCABULARY, (4, ROWS // 4))]


def largest(function: Callable, *args: torch.Tensor) -> tuple[int, int]:
    """Return the number of elements of the largest tensor in the compiled forward, and in the backward of the first
    output."""
    jitted = forge.jit(function, executors=["torch"])
    jitted(*args)
    with torch.no_grad():
        forward = forge.last_traces(jitted)[-1].python_callable()
        with Largest() as first:
            _, saved, numbers = forward(*args)
        backward = forge.last_backward_traces(jitted)[-1].python_callable()
        with Largest() as second:
            backward([*saved, *numbers, torch.ones(())])
    return first.elements, second.elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_pass_holds_all_logits(dtype: torch.dtype) -> None:
    """Without the chunked head, both hold ROWS * VOCABULARY elements."""
    forward, backward = largest(loss, *arguments(dtype))
    assert forward <= 64 * VOCABULARY
    assert backward <= max(VOCABULARY, ROWS) * WIDTH


def test_unfused_both_passes_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart of the test above: without fusion, it would measure all logits."""
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 1 << 40)
    assert largest(loss, *arguments()) == (ROWS * VOCABULARY, ROWS * VOCABULARY)


def test_logits_that_are_returned_are_all_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, torch.dtype]] = []

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tree_map(lambda x: made.append((x.numel(), x.dtype)) if isinstance(x, torch.Tensor) else x, result)
            return result

    args = arguments(torch.bfloat16)
    jitted = forge.jit(loss_and_logits, executors=["torch"])
    jitted(*args)
    forward = forge.last_traces(jitted)[-1].python_callable()
    with torch.no_grad(), Wide():
        forward(*args)
    assert max(count for count, dtype in made if dtype == torch.float32) <= 64 * VOCABULARY
    assert max(count for count, _ in made) == ROWS * VOCABULARY


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    """Otherwise they are scaled in the memory in which they were saved."""
    hidden, weight, labels = arguments()
    out = forge.jit(loss, executors=["torch"])(hidden, weight, labels)
    found = [torch.autograd.grad(out, (hidden, weight), torch.tensor(3.0), retain_graph=True) for _ in range(2)]
    found.append(torch.autograd.grad(out, (hidden, weight), torch.tensor(3.0)))
    for first, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(first, other)


@pytest.mark.parametrize("kept", [False, True])
def test_the_weights_gradient_is_scaled_in_its_own_memory_unless_the_graph_is_kept(kept: bool) -> None:
    saved = torch.ones(3)
    scaled: list[torch.Tensor] = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            scaled.append(runs._scale(saved, g))
            return g

    Backward.apply(torch.ones((), requires_grad=True)).backward(torch.tensor(2.0), retain_graph=kept)
    assert scaled[0].tolist() == [2.0] * 3
    assert (scaled[0] is saved) == (not kept)


def test_all_labels_ignored_is_nan_with_gradients_of_zero_as_in_eager() -> None:
    hidden, weight, labels = arguments()
    labels.fill_(-100)
    out = forge.jit(loss, executors=["torch"])(hidden, weight, labels)
    assert out.isnan()
    assert all(not each.any() for each in torch.autograd.grad(out, (hidden, weight)))


def test_no_rows_give_what_eager_gives() -> None:
    hidden, weight = torch.randn(0, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    for function in (loss, forge.jit(loss, executors=["torch"])):
        out = function(hidden, weight, labels)
        assert out.isnan()
        of_hidden, of_weight = torch.autograd.grad(out, (hidden, weight))
        assert of_hidden.shape == (0, WIDTH)
        assert not of_weight.any()


def test_a_label_out_of_range_is_torchs_error() -> None:
    hidden, weight, labels = arguments()
    jitted = forge.jit(loss, executors=["torch"])
    jitted(hidden, weight, labels)
    labels[2, 3] = VOCABULARY
    with pytest.raises(IndexError, match="out of bounds"):
        loss(hidden, weight, labels)
    with pytest.raises(IndexError, match="out of bounds"):
        jitted(hidden, weight, labels)


def test_many_chunks_of_half_precision_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 512 chunks of one row each: sums in bfloat16 would lose most of each."""
    monkeypatch.setattr(runs, "CPU_CHUNK_BYTES", 1)
    args = arguments(torch.bfloat16)
    exact = [arg.detach().double().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    gradients = [
        torch.autograd.grad(function(*given), given[:2])
        for function, given in ((forge.jit(loss, executors=["torch"]), args), (loss, args), (loss, exact))
    ]
    for ours, eager, true in zip(*gradients, strict=True):
        error, allowed = [(each.double() - true).norm() / true.norm() for each in (ours, eager)]
        assert error < 1.5 * allowed


def test_twenty_steps_follow_eager() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY))
        model[1].weight = model[0].weight
        tokens = torch.randint(0, VOCABULARY, (4, 33))

        def step(tokens: torch.Tensor, model: torch.nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], label_smoothing=0.05)

        function = forge.jit(step, executors=["torch"]) if compiled else step
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            out = function(tokens)
            out.backward()
            optimizer.step()
            losses.append(out.item())
    torch.testing.assert_close(losses[20:], losses[:20], rtol=1e-4, atol=0)
    assert losses[19] < 0.8 * losses[0]
