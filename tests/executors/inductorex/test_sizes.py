"""Programs of symbolic sizes in the default configuration: sizes and strides are numbers when a region runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import from_disk, is_cached
from torch import nn

import forge
from forge.executors.inductorex import inductorex, lower
from forge.torch_internals.versions import TORCH
from tests.markers import slow_except

pytestmark = pytest.mark.skipif(not inductorex.is_available(), reason="Inductor cannot be used here")

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Record the errors of regions that Inductor failed to compile, whose calls torch runs."""
    torch._dynamo.reset()
    found: list[Exception] = []
    monkeypatch.setattr(lower.compile_wait, "notice", found.append)
    return found


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def heads(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return keys as a decoder's cache takes them."""
    keys = (x @ w).view(*x.shape[:2], 2, 4).transpose(1, 2)
    angles = torch.arange(x.shape[1])[:, None] * torch.ones(4)
    return keys * angles.cos() + rotated(keys) * angles.sin(), (x @ w).relu()


def joined(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return a tensor with the sum of two lengths in its strides."""
    both = torch.cat((x @ w, x.flip(1) @ w, (x @ w)[:, :1]), 1).transpose(1, 2)
    return both * 2 + rotated(both.transpose(1, 2)).transpose(1, 2).sin(), both.tanh().sum(1)


def halved(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return a tensor with a quotient of a length in its strides."""
    half = x.shape[1] // 2
    part = (x @ w)[:, :half].reshape(x.shape[0], half, 2, 4).transpose(1, 2)
    return part.sin() + rotated(part), part.cos() * rotated(part)


def flattened(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return a tensor with the product of two lengths in its strides."""
    flat = (x @ w).reshape(-1, 2, 4).transpose(0, 1)
    return flat.sin() + rotated(flat), flat.transpose(0, 1).reshape(x.shape[0], -1).cos() + 1


def pooled(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return an image whose height and width change."""
    image = (x @ w)[:, None].expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
    image = F.conv2d(image, torch.ones(4, 3, 3, 3) / 9, padding=1, stride=(2, 1))
    return F.avg_pool2d(image.relu() + 1, 2), image.sigmoid() * torch.cat((image[:, 2:], image[:, :2]), 1)


def clipped(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Return tensors whose lengths are the maximum and minimum of others, like a sliding window's."""
    most, least = torch.sym_max(x.shape[1], 8), torch.sym_min(x.shape[1], torch.sym_min(x.shape[0] + 3, 10))
    window = torch.arange(most)[:, None] - torch.arange(least)
    return (window < 3).float().mul(2).t().cumsum(1) + 1, (x @ w)[:, -least:].sin().transpose(1, 2).mul(3)


PROGRAMS = [heads, joined, halved, flattened, pooled, clipped]
SHAPES = [(2, 6), (2, 9), (4, 12)]


def of(batch: int, length: int) -> Tensors:
    torch.manual_seed(batch * length)
    return torch.randn(batch, length, 8) / 3, torch.randn(8, 8) / 3


def assert_as_eager(jitted: Callable, function: Callable, given: Tensors, *, training: bool) -> None:
    """Compare results, their strides, and gradients."""
    ours, theirs = ([each.clone().requires_grad_(training) for each in given] for _ in range(2))
    results, expected = jitted(*ours), function(*theirs)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    if training:
        for given, made in ((ours, results), (theirs, expected)):
            sum(each.sin().sum() for each in made).backward(inputs=given)
        torch.testing.assert_close(*([x.grad for x in given] for given in (ours, theirs)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function,training",
    [
        pytest.param(
            function,
            training,
            id=f"{function.__name__}-{'training' if training else 'inference'}",
            marks=[] if training and function is joined else [pytest.mark.slow],
        )
        for function in PROGRAMS
        for training in (False, True)
    ],
)
def test_results_have_eagers_strides_at_every_size(
    function: Callable, training: bool, failures: list[Exception]
) -> None:
    jitted = forge.jit(function)
    for shape in SHAPES:
        assert_as_eager(jitted, function, of(*shape), training=training)
    if function is clipped and training and TORCH < (2, 13):
        pytest.skip("before torch 2.13, torch runs a region whose lengths are a Piecewise of others")
    assert not failures and not forge.explain(jitted).eager


@pytest.mark.parametrize("function", [heads, flattened])
@pytest.mark.one_in(2)
def test_so_they_have_where_the_first_call_is_symbolic(function: Callable, failures: list[Exception]) -> None:
    jitted = forge.jit(function, dynamic=True)
    for shape in SHAPES:
        assert_as_eager(jitted, function, of(*shape), training=True)
    assert not failures and len(forge.explain(jitted).recompiles) == 0


@pytest.mark.parametrize("function", [pytest.param(heads, marks=pytest.mark.slow), joined])
def test_symbolic_strides_are_read_from_disk(
    function: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    for last in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(function)
        for shape in SHAPES:
            assert_as_eager(jitted, function, of(*shape), training=True)
        assert is_cached(jitted) == last and not forge.explain(jitted).uncached
        from_disk(monkeypatch)


def test_a_backward_knows_the_lengths_of_which_only_strides_are_made(failures: list[Exception]) -> None:
    def weighed(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        y = torch.bmm(x, x.transpose(1, 2)[..., :5])[:, :3]  # of strides (5 * length, 5, 1)
        return (y * w.sin() * w.cos()).sum(), y

    jitted = forge.jit(weighed, memory="speed")
    for length in (6, 8, 9):
        x, w, other = torch.randn(2, length, 4), *(torch.ones(2, 3, 5, requires_grad=True) for _ in range(2))
        jitted(x, w)[0].backward()
        weighed(x, other)[0].backward()
        torch.testing.assert_close(w.grad, other.grad)
    assert not failures


def test_calls_that_read_a_length_are_in_regions() -> None:
    def sized(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return (
            x.view(-1, 2).sin().reshape(n, 4).expand(2, n, 4).cos() + torch.arange(n)[:, None] + torch.full((n, 4), 2)
        )

    jitted = forge.jit(sized, dynamic=True)
    for length in (6, 8):
        x = torch.randn(length, 4)
        torch.testing.assert_close(jitted(x), sized(x))
    assert {row.executor for row in forge.explain(jitted).rows} == {"inductor"}


# two lengths that turn out to be equal


def met(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    both = y + x
    wide = z.expand(x.shape[0], -1)
    steps = torch.diff(wide, prepend=wide[:, :1] - 1, dim=-1)
    return both @ both.t(), steps.float() * 2 + 1, torch.arange(x.shape[0]).float() + 1


def met_late(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    wide = z.expand(x.shape[0], -1).cumsum(-1).sin() + torch.arange(x.shape[0])[:, None]
    other = torch.arange(y.shape[0])[:, None].expand(-1, z.shape[1]).float().cos() + z
    return wide @ other.t(), torch.cat((wide, wide * 2), 1), (y + x).mul(2).tanh()


def met_in_a_join(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    both = torch.cat((y, x * 2), 1)
    return both.t() @ both, z.expand(y.shape[0], -1).sin() + torch.arange(x.shape[0])[:, None], both.tanh().sum(0)


def met_in_a_loss(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
    target = torch.arange(y.shape[0]) % 3
    loss = F.cross_entropy(x, target, reduction="none")
    return loss.sin() + 1, torch.eye(x.shape[0]).mul(2).add(y.shape[0]), z.expand(y.shape[0], -1).cumsum(0).cos() + 1


@pytest.mark.parametrize(
    "training", [pytest.param(False, marks=pytest.mark.slow, id="inference"), pytest.param(True, id="training")]
)
@pytest.mark.parametrize(
    "function",
    [
        met,
        pytest.param(met_late, marks=pytest.mark.slow),
        pytest.param(met_in_a_join, marks=pytest.mark.slow),
        met_in_a_loss,
    ],
)
@pytest.mark.one_in(2)
def test_lengths_that_turn_out_to_be_one_are_defined_in_a_region(
    function: Callable, training: bool, failures: list[Exception]
) -> None:
    jitted = forge.jit(function)
    for length in (4, 5, 7, 2):
        torch.manual_seed(length)
        given = torch.randn(length, 3), torch.randn(length, 3), torch.arange(6.0)[None]
        assert_as_eager(jitted, function, given, training=training)
    assert not failures


class Decoder(nn.Module):
    """A decoder layer that returns its cache, like a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: torch.Tensor, past: tuple | None = None) -> Tensors:
        x = self.embedding(ids)
        q, k, v = (each(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for each in (self.query, self.key, self.value))
        start = past[0].shape[2] if past is not None else 0
        angles = torch.arange(start, start + x.shape[1])[:, None] * torch.ones(4)
        q, k = (each * angles.cos() + rotated(each) * angles.sin() for each in (q, k))
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(attended.transpose(1, 2).reshape(x.shape)), k, v


@pytest.mark.slow
def test_a_decoder_goes_on_from_its_cache_at_every_length(failures: list[Exception]) -> None:
    model = Decoder().eval()
    jitted = forge.jit(model)
    for batch, length in ((2, 5), (2, 8), (3, 7)):
        ids, past, expected = torch.randint(16, (batch, length)), None, None
        for _ in range(3):
            with torch.no_grad():
                logits, *past = jitted(ids, past)
                wanted, *expected = model(ids, expected)
            torch.testing.assert_close((logits, *past), (wanted, *expected))
            assert [each.stride() for each in past] == [each.stride() for each in expected]
            ids = wanted[:, -1:].argmax(-1)
    assert not failures


@pytest.mark.slow
def test_a_smaller_last_batch_and_evaluation_follow_eager(failures: list[Exception]) -> None:
    def epochs(call: Callable, model: nn.Module) -> list[Any]:
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        torch.manual_seed(0)
        rows = torch.randint(16, (18, 6))
        for _ in range(2):
            for batch in rows.split(4):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = call(batch)[0]
                F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                losses += [F.cross_entropy(call(batch)[0].flatten(0, 1), batch.flatten()) for batch in rows.split(4)]
        return losses

    torch.manual_seed(0)
    models = [Decoder(), Decoder()]
    models[1].load_state_dict(models[0].state_dict())
    found, expected = epochs(forge.jit(models[0]), models[0]), epochs(models[1], models[1])
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # bfloat16 rounds once where eager rounds often
    assert not failures


INDEXED: dict[str, tuple[Callable, tuple[int, ...]]] = {  # whose gradients index, and all lengths but the last
    "one length": (lambda x: F.pad(x, (2, 2), mode="reflect"), (1, 1)),
    "a volume's last": (lambda x: F.pad(x, (2, 2, 1, 1, 1, 1), mode="reflect"), (1, 1, 3, 2)),
    "an image's width": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (1, 1, 3)),
}


@pytest.mark.parametrize("name", slow_except(INDEXED, "one length"))
@pytest.mark.slow
def test_indices_of_known_lengths_are_expanded_to_a_symbolic_one(name: str, failures: list[Exception]) -> None:
    function, shape = INDEXED[name]
    jitted = forge.jit(lambda x: function(x).exp(), strict=True)
    for length in (9, 10, 12):
        x = torch.randn(*shape, length, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        jitted(x).sum().backward()
        function(same).exp().sum().backward()
        torch.testing.assert_close(x.grad, same.grad)
    assert not failures


def test_what_a_program_knows_of_lengths_is_no_guard_of_another() -> None:
    """Inductor's cache guards on all facts known when a region was compiled, even if the region does not need them."""

    def below_20(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 20 and x.shape[0] % 3 == 0:
            return x.sin() * 2 + x.cos()
        return x

    def of_any_length(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2 + x.cos()

    for function, lengths in ((below_20, (6, 9)), (of_any_length, (6, 9, 10, 30))):
        jitted = forge.jit(function, dynamic=True, cache=False)
        for length in lengths:
            x = torch.randn(length, 70)
            torch.testing.assert_close(jitted(x), function(x))
        assert forge.explain(jitted).recompiles == []


def test_a_sum_of_a_symbolic_length_that_is_no_loop_of_vectors_is_in_a_region(failures: list[Exception]) -> None:
    """Inductor checks whether the length is above 4096."""
    jitted = forge.jit(lambda x: (x.norm(), x.std(0)), cache=False)
    for length in (4, 7, 5000):
        x = torch.randn(length, 6, requires_grad=True)
        torch.stack([each.sum() for each in jitted(x)]).sum().backward()
        same = x.detach().clone().requires_grad_()
        (same.norm() + same.std(0).sum()).backward()
        torch.testing.assert_close(x.grad, same.grad)
    assert not failures


def test_a_sum_of_a_symbolic_length_is_compiled_once(failures: list[Exception]) -> None:
    """Inductor asks whether there are more than 4096 summands, which would be a guard."""
    jitted = forge.jit(lambda x: (x * 2).abs().mean() + x.exp().sum(), cache=False)
    for length in (2, 3, 4, 40):
        x = torch.randn(length, 1104)
        torch.testing.assert_close(jitted(x), (x * 2).abs().mean() + x.exp().sum())
    assert not failures and forge.explain(jitted).graphs == 2


def test_pooling_to_one_element_of_images_whose_channels_lie_beside_each_other(failures: list[Exception]) -> None:
    """BiT ends so: the layout of a convolution's result, and in-place pooling, depend on the number of images."""

    def pooled(x: torch.Tensor, kernel: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kernel = F.batch_norm(kernel.reshape(1, 32, -1), None, None, training=True).reshape_as(kernel)
        images = F.conv2d(x, kernel) * 2
        return F.adaptive_avg_pool2d(F.group_norm(images, 4, weight, weight).relu(), 1)

    jitted = forge.jit(pooled, cache=False)
    for images in (2, 3, 5):
        given = torch.randn(images, 32, 2, 2), torch.randn(32, 32, 1, 1), torch.randn(32)
        torch.testing.assert_close(jitted(*given), pooled(*given))
    assert failures == [] and forge.explain(jitted).graphs == 2
