"""Training with Inductor's regions: twenty steps of an optimizer go as in eager."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forge
from tests.markers import slow_except

EXECUTORS = ["inductor", "torch"]
STEPS = 20
VOCABULARY = 29


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Language(nn.Module):
    """A small language model and its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(12, width)
        self.blocks = nn.Sequential(*[Block(width, heads=2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))[:, :-1]
        return F.cross_entropy(exact(logits.reshape(-1, VOCABULARY)), ids[:, 1:].reshape(-1))


class Pictures(nn.Module):
    """A small convolutional classifier with batch norm, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        # no bias: before a norm its gradient is only rounding error, from which AdamW makes steps of full length
        self.first, self.second = (nn.Conv2d(width, 8, 3, padding=1, bias=False) for width in (3, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.first(x))), 2)
        x = F.silu(self.norms[1](self.second(x)) + x)
        return F.cross_entropy(exact(self.head(x.mean((2, 3)))), target)


def exact(logits: torch.Tensor) -> torch.Tensor:
    """Convert logits to float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def texts(dtype: torch.dtype) -> Iterator[tuple]:
    """Yield batches of text with a pattern to learn."""
    while True:
        start = torch.randint(0, VOCABULARY, (4, 1))
        yield ((start + 3 * torch.arange(10)) % VOCABULARY,)


def pictures(dtype: torch.dtype) -> Iterator[tuple]:
    """Yield batches of pictures, where each class has its own mean."""
    while True:
        target = torch.randint(0, 5, (6,))
        yield torch.randn(6, 3, 8, 8).add(target.view(-1, 1, 1, 1) / 2).to(dtype), target


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "a language model": (Language, texts),
    "a convolutional net": (Pictures, pictures),
}
autocast = partial(torch.autocast, "cpu", torch.bfloat16)

# (dtype of the weights, mode, how far a loss may be from eager's): sums are rounded in another order, and the optimizer
# carries that on; in bfloat16 a region rounds once where eager rounds after each call, by 2**-8
PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager], float]] = {
    "float32": (torch.float32, nullcontext, 1e-4),
    "float64": (torch.float64, nullcontext, 1e-9),
    "bfloat16": (torch.bfloat16, nullcontext, 4e-2),
    "autocast": (torch.float32, autocast, 2e-2),
}


def losses(model: nn.Module, run: Callable, batches: list[tuple], mode: Callable) -> torch.Tensor:
    """Return the losses of a training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    found = []
    for batch in batches:
        with mode():
            loss = run(*batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach().double())
    return torch.stack(found)


@pytest.mark.parametrize("precision", slow_except(PRECISIONS, "float32"))
@pytest.mark.parametrize("name", slow_except(MODELS, next(iter(MODELS))))
def test_twenty_steps_follow_eagers_losses(name: str, precision: str) -> None:
    (make, data), (dtype, mode, tolerance) = MODELS[name], PRECISIONS[precision]
    theirs = make().to(dtype)
    ours = copy.deepcopy(theirs)
    stream = data(dtype)
    batches = [next(stream) for _ in range(STEPS)]
    jitted = forge.jit(ours, executors=EXECUTORS)
    expected, actual = losses(theirs, theirs, batches, mode), losses(ours, jitted, batches, mode)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
    assert expected[-5:].mean() < expected[:5].mean() - 0.1  # it learns something
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=10 * tolerance, atol=10 * tolerance)
    rows = forge.explain(jitted).rows
    assert {row.phase for row in rows if row.executor == "inductor"} == {"forward", "backward"}


@pytest.mark.slow
def test_a_training_in_float64_never_meets_the_artifacts_of_float32() -> None:
    """One model changes the dtype of its weights: float64's losses agree to far more digits than float32 has."""
    ours, theirs = (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)) for _ in range(2))
    jitted = forge.jit(ours, executors=EXECUTORS)
    for dtype in (torch.float32, torch.float64, torch.float32):
        theirs.load_state_dict(ours.to(dtype).state_dict())
        theirs.to(dtype).load_state_dict(ours.state_dict())
        x = torch.randn(5, 4, dtype=dtype)
        found = [
            torch.autograd.grad(run(x).square().mean(), list(net.parameters()))
            for run, net in ((jitted, ours), (theirs, theirs))
        ]
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        for one, other in zip(*found, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "batch norm of nothing but the batch": lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(5),
    "layer norm without weights": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "group norm": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("wide", [False, True], ids=["weights in bfloat16", "weights in float32"])
@pytest.mark.parametrize("name", slow_except(NORMS, "batch norm"))
@pytest.mark.one_in(4)
def test_gradients_of_a_norm_in_half_precision_are_eagers(name: str, wide: bool) -> None:
    """Its statistics are in half precision if its weights are, unlike in torch's fake tensors."""
    theirs = NORMS[name]().to(torch.float32 if wide else torch.bfloat16)
    ours = copy.deepcopy(theirs)
    x = torch.randn(3, 4, 5, 5).to(torch.bfloat16)
    jitted = forge.jit(lambda x: ours(x * 2).tanh() + 1, executors=EXECUTORS)
    found = []
    for run, norm in ((jitted, ours), (lambda x: theirs(x * 2).tanh() + 1, theirs)):
        given = x.clone().requires_grad_()
        out = run(given)
        found.append(torch.autograd.grad(out, [given, *norm.parameters()], torch.ones_like(out) * out.detach()))
    for one, other in zip(*found, strict=True):
        scale = other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=3e-2 * scale)  # roundings of bfloat16


OF_ANOTHER_LAYOUT: dict[str, Callable] = {
    "a product with a transpose": lambda x, w: (x @ w).t() * x,
    "a function of a transpose": lambda x, w: (x @ w).t().exp(),
    "a product with a permutation": lambda x, w: (x @ w).view(2, 2, 4).permute(2, 0, 1) * x.view(4, 2, 2),
    "a negated transpose": lambda x, w: -(x @ w).t() * 2,
    "heads": lambda x, w: (x @ w).view(4, 2, 2).transpose(0, 1) * x.view(2, 4, 2),
}


@pytest.mark.parametrize("name", OF_ANOTHER_LAYOUT)
def test_a_gradient_may_have_other_strides_than_its_result(name: str) -> None:
    """A backward call that is in no region passes its strides on to its result."""
    function = OF_ANOTHER_LAYOUT[name]
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    found, expected = forge.jit(function, executors=EXECUTORS)(x, w), function(x, w)
    given = torch.randn(expected.shape)
    for g in (given, given.transpose(0, -1).contiguous().transpose(0, -1), given[:1, ..., :1].expand(expected.shape)):
        wanted = torch.autograd.grad(expected, w, g, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(found, w, g, retain_graph=True), wanted)
