"""Sizes that change from call to call: the number of graphs, and results equal to eager's."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import forge
from forge.capture.handles import handle_of
from forge.torch_internals.versions import TORCH
from tests.markers import in_both_modes
from tests.models import zoo
from tests.unknown_operator import rounded

# 20 sizes and 1; widths of the models below are among them: 8 and 16, and the vocabulary's 13
SIZES = (8, 5, 2, 21, 13, 1, 9, 3, 16, 4, 7, 11, 20, 6, 10, 12, 14, 15, 17, 18, 19)
FEW = (8, 5, 2, 16, 1, 13, 3)


@pytest.fixture(autouse=True)
def _nothing_learnt_before() -> Iterator[None]:
    """Forget the sizes that Dynamo marked as dynamic, by source."""
    torch._dynamo.reset()
    yield


class Attention(nn.Module):
    """An attention whose scores are a matrix, with a mask made from the length."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(16, 48), nn.Linear(16, 16), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.reshape(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length).tril() == 0
            mixed = (q @ k.mT / 2).masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), target)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, _ = zoo.causal("Llama", vocab_size=13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


Make = tuple[Callable[[], nn.Module], Callable[[int], tuple]]
MODELS: dict[str, Make] = {
    "an MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), lambda n: (torch.randn(n, 8),)),
    "a loss": (Classifier, lambda n: (torch.randn(n, 8), torch.randint(0, 8, (n,)))),
    "attention": (lambda: Attention(fused=False), lambda n: (torch.randn(n, 8, 16),)),
    "attention, its length": (lambda: Attention(fused=False), lambda n: (torch.randn(2, n, 16),)),
    "fused attention": (lambda: Attention(fused=True), lambda n: (torch.randn(n, 8, 16),)),
    "fused attention, its length": (lambda: Attention(fused=True), lambda n: (torch.randn(2, n, 16),)),
    "both sizes, equal at times": (
        lambda: Attention(fused=False),
        lambda n: (torch.randn(n, n + n % 2, 16),),
    ),
    "a Llama": (Logits, lambda n: (torch.randint(0, 13, (n, 10)),)),
    "a Llama, its length": (Logits, lambda n: (torch.randint(0, 13, (2, n)),)),
}


@pytest.mark.parametrize(
    ("name", "training"),
    in_both_modes(MODELS, {"an MLP", "a loss", "fused attention", "a Llama, its length"}, {"an MLP", "attention"}),
)
@pytest.mark.one_in(2)
def test_twenty_sizes_take_three_graphs(name: str, training: bool) -> None:
    """The first size, any size, and size 1, which broadcasts."""
    make, inputs = MODELS[name]
    net = make().train(training)
    sizes = FEW if "Llama" in name else SIZES
    assert graphs_of(net, [inputs(size) for size in sizes], training) <= 3


def graphs_of(net: nn.Module, calls: Sequence[tuple], training: bool) -> int:
    """Return the number of graphs that the calls take; compare each call with eager, including gradients."""
    ours = copy.deepcopy(net)
    jitted = forge.jit(ours)
    for inputs in calls:
        with torch.set_grad_enabled(training):
            actual, expected = jitted(*inputs), net(*inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if training:
            assert_same_gradients(actual, expected, list(ours.parameters()), list(net.parameters()))
    assert not handle_of(jitted).eager
    return forge.explain(jitted).graphs


def assert_same_gradients(actual: torch.Tensor, expected: torch.Tensor, ours: list, theirs: list) -> None:
    found = torch.autograd.grad(actual.square().sum(), ours)
    wanted = torch.autograd.grad(expected.square().sum(), theirs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


BROADCASTS: dict[str, Callable] = {
    "add": lambda x, bias: x + bias,
    "where": lambda x, bias: torch.where(x > 0, x, bias),
    "lerp": lambda x, bias: torch.lerp(x, bias, 0.5),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_a_row_that_broadcasts_along_a_changing_size_is_not_compared_with_it(name: str) -> None:
    """The row has length 16 along the dim in which the other has its changing size."""
    function, row = BROADCASTS[name], torch.randn(16, 1, requires_grad=True)
    jitted = forge.jit(function, dynamic=True)
    for size in (5, 16, 9):
        x = torch.randn(size, 16, 3, requires_grad=True)
        actual, expected = jitted(x, row), function(x, row)
        torch.testing.assert_close(actual, expected)
        assert_same_gradients(actual, expected, [x, row], [x, row])
    assert forge.explain(jitted).graphs == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: (x.unsqueeze(1) * y).relu(), id="an outer product"),
        pytest.param(lambda x, y: torch.cat([x.sin(), y], 0), id="cat"),
        pytest.param(lambda x, y: x.sum(0) * y.shape[0] + y.mean(0) * x.shape[0], id="arithmetic"),
    ],
)
def test_two_sizes_that_are_equal_by_chance_are_two(function: Callable, dynamic: bool | None) -> None:
    jitted = forge.jit(function, dynamic=dynamic)
    for rows, columns in ((4, 4), (3, 3), (5, 7), (6, 2), (2, 2), (4, 9)):
        x, y = torch.randn(rows, 3, requires_grad=True), torch.randn(columns, 3, requires_grad=True)
        actual, expected = jitted(x, y), function(x, y)
        torch.testing.assert_close(actual, expected)
        assert_same_gradients(actual, expected, [x, y], [x, y])
    assert forge.explain(jitted).graphs == (1 if dynamic else 2)


def test_the_setting_of_equal_sizes_is_the_users_outside_of_forge() -> None:
    before = torch.fx.experimental._config.use_duck_shape
    forge.jit(lambda x: x * 2, dynamic=True)(torch.ones(3, 3))
    assert torch.fx.experimental._config.use_duck_shape is before


EXPANDED: dict[str, Callable] = {
    "expand_as": lambda x, y: (x * 2).expand_as(y) * y,
    "expand": lambda x, y: x.expand(y.shape[0], -1).sin() + y,
    "the result flat": lambda x, y: (x.expand_as(y).reshape(-1) * y.flatten()).view_as(y),
    "joined": lambda x, y: torch.cat([x.expand_as(y), y]).exp(),
    "its ratio": lambda x, y: x.expand_as(y) * y * (y.shape[0] / x.shape[0]),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.one_in(2)
def test_a_size_may_become_one_and_back(name: str, dynamic: bool | None) -> None:
    function = EXPANDED[name]
    jitted = forge.jit(function, dynamic=dynamic)
    for rows, wanted in ((4, 4), (3, 3), (1, 5), (5, 5), (1, 1), (1, 7), (6, 6), (1, 2)):
        x, y = torch.randn(rows, 2, requires_grad=True), torch.randn(wanted, 2, requires_grad=True)
        actual, expected = jitted(x, y), function(x, y)
        torch.testing.assert_close(actual, expected)
        assert_same_gradients(actual, expected, [x, y], [x, y])
    assert forge.explain(jitted).graphs <= 4 and not handle_of(jitted).eager


# the prompt and a token; the cache has fixed sizes, whatever the caller requests
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.slow
def test_generation_compiles_for_the_prompt_and_for_a_token(cache: str) -> None:
    model, jitted = generator()
    prompt = torch.randint(3, zoo.VOCAB, (2, 5))
    options = {"do_sample": False, "disable_compile": True, "cache_implementation": cache, "max_new_tokens": 12}
    for _ in range(2):
        assert torch.equal(jitted.generate(prompt, **options), model.generate(prompt, **options))
        assert forge.explain(jitted).graphs == 2


@pytest.mark.slow
def test_text_of_growing_length_takes_two_graphs() -> None:
    model, jitted = generator()
    ours = theirs = torch.randint(3, zoo.VOCAB, (2, 4))
    with torch.no_grad():
        for _ in range(10):
            ours = torch.cat([ours, jitted(input_ids=ours, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            theirs = torch.cat([theirs, model(input_ids=theirs, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours, theirs)
    assert forge.explain(jitted).graphs == 2


def generator() -> tuple[nn.Module, nn.Module]:
    """Return a language model that never ends its text, and the compiled model."""
    model, _ = zoo.causal("Llama", use_cache=True)
    model.eval().generation_config.eos_token_id = None
    return model, forge.jit(copy.deepcopy(model))


LENGTHS_FROM_VALUES: dict[str, Callable] = {
    "a mask": lambda x, y: (x[x > 0] * 2).expand_as(y[y > 0]) * y[y > 0],
    "nonzero": lambda x, y: (x.nonzero() * 2).sum() + y,
    "a length from a mask": lambda x, y: torch.arange(x[x > 0].shape[0]).expand_as(y[y > 0]) * y[y > 0],
    "a length that only the backward needs": lambda x, y: (x[x > 0] ** 2).sum() + y,
    "views": lambda x, y: (x[x > 0][1:], y[y > 0].view(-1, 1).t()),
    "joined": lambda x, y: torch.cat([x[x > 0], y]).relu(),
    "masked_select": lambda x, y: torch.masked_select(x, y > 0).sin() * y.sum(),
    "repeat_interleave": lambda x, y: torch.repeat_interleave(x, y.long().abs() + 1),
    "index_put": lambda x, y: x.index_put((y.nonzero()[:, 0],), torch.ones(())),
    "unique": lambda x, y: torch.unique(x.detach().round(), return_counts=True)[1] * y.sum(),
    "a number": lambda x, y: (x + y, x[x > 0].shape[0] + 1),
}


@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]], ids=lambda names: names[0])
@pytest.mark.parametrize("name", LENGTHS_FROM_VALUES)
@pytest.mark.one_in(3)
def test_a_length_that_values_decide_is_a_number_of_the_program(name: str, executors: list[str]) -> None:
    if name == "unique" and TORCH < (2, 13):
        pytest.skip("torch's fake counts are of the elements' dtype, under torch.compile too")
    function = LENGTHS_FROM_VALUES[name]
    jitted = forge.jit(function, fullgraph=True, executors=executors)
    for count in (3, 2, 4):
        found = []
        for run in (jitted, function):
            x = torch.tensor([1.0] * count + [-1.0] * (5 - count), requires_grad=True)
            y = x.detach().flip(0).requires_grad_()
            results = run(x, y)
            flowing = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
            gradients = torch.autograd.grad([each.sum() for each in flowing], (x, y), allow_unused=True)
            found.append((results, gradients))
        torch.testing.assert_close(*found)
    assert forge.explain(jitted).graphs == 1 and not forge.explain(jitted).eager


@pytest.mark.filterwarnings("ignore:forge. a graph runs in eager")
def test_a_length_that_cannot_be_read_of_a_result_runs_in_eager_and_says_so() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tensor_split(x * 2, torch.tensor([1, 3]))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        jitted = forge.jit(parts)
        torch.testing.assert_close(jitted(torch.arange(5.0)), parts(torch.arange(5.0)))
        assert all("depends on the values" in reason for reason in forge.explain(jitted).eager)
        assert forge.explain(jitted).eager


def test_an_opaque_call_is_given_a_length_that_values_decide() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return rounded(torch.full((3, int(x.sum())), 0.5)) * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        jitted = forge.jit(function)
        for count in (3, 2, 4):
            torch.testing.assert_close(jitted(torch.ones(count)), function(torch.ones(count)))
        assert forge.explain(jitted).opaque_calls and not forge.explain(jitted).eager


def test_a_bool_that_values_decide_is_no_input_of_a_region() -> None:
    def function(x: torch.Tensor, flag: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return (x * 2 + flag.item()) * (count.item() > 3) - 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        jitted = forge.jit(function, fullgraph=True, executors=["inductor", "torch"], check="regions")
        for flag, count in ((True, 5), (False, 5), (True, 2)):
            inputs = torch.randn(6), torch.tensor(flag), torch.tensor(count)
            torch.testing.assert_close(jitted(*inputs), function(*inputs))


@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo makes no symbol of a length that is a tensor")
def test_the_sizes_of_as_strided_in_tensors() -> None:
    """LED's encoder has such sizes: torch.div of a length is a tensor."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[0], 2, rounding_mode="trunc")
        return x.as_strided(size=(count, 3), stride=(x.stride(0), 1)) * 2

    jitted = forge.jit(halves)
    for length in (6, 8, 10):
        x = torch.randn(length, 4)
        torch.testing.assert_close(jitted(x), halves(x))
    assert not forge.explain(jitted).eager and not forge.explain(jitted).opaque_calls


@pytest.mark.parametrize(
    "spread",
    [
        lambda x: (x + x).as_strided((2,), (1,)),
        lambda x: (x + x[:, :1]).as_strided((2, 2), (1, 2), 1),
        lambda x: (x.unsqueeze(-1) * torch.ones(2)).as_strided((2, 3), (3, 1)),
        lambda x: (x.double() * 2)[1:].as_strided((2,), (1,)),
    ],
    ids=["flat", "overlapping", "three dims", "from the second row"],
)
def test_a_region_shows_memory_of_a_value_of_several_lengths(spread: Callable) -> None:
    jitted = forge.jit(lambda x: spread(x) * 2, strict=True)
    for size in ((2, 3), (4, 6), (6, 5)):
        x, y = (torch.arange(math.prod(size)).view(size).float().requires_grad_() for _ in range(2))
        expected, actual = spread(x) * 2, jitted(y)
        torch.testing.assert_close(actual, expected)
        if expected.requires_grad:
            wanted, grad = (torch.autograd.grad(out.sum(), of)[0] for out, of in ((expected, x), (actual, y)))
            torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize(
    "length",
    [
        lambda size: math.ceil(size / 2) * 2,
        lambda size: math.floor(size / 3) + 1,
        lambda size: round(size / 2) + 1,
        lambda size: int(size * 0.75) + 1,
        lambda size: int(size**0.5),
        lambda size: -(-size // 2),
    ],
    ids=["ceil", "floor", "round", "int of a product", "int of a root", "ceil of whole numbers"],
)
def test_a_region_computes_lengths_by_way_of_fractions(length: Callable) -> None:
    """MobileViT and Swin pad images to whole patches in this way."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(length(x.shape[0])) + (x * 2).sum()

    jitted = forge.jit(function, strict=True)
    for size in (4, 6, 9):
        x = torch.randn(size)
        torch.testing.assert_close(jitted(x), function(x))
    assert not forge.explain(jitted).eager and forge.explain(jitted).graphs <= 2


def test_a_region_of_a_length_that_values_decide_is_compiled_for_the_lengths_that_it_may_have() -> None:
    """Inductor's cache does not check the bounds, which Inductor asserts: at most the number of elements."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().float() * 2

    jitted = forge.jit(function, fullgraph=True, executors=["inductor", "torch"])
    for length in (5, 9, 3, 12):
        x = torch.ones(length)
        assert torch.equal(jitted(x), function(x))


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, torch.randperm])
def test_random_numbers_of_a_symbolic_length_are_drawn_in_the_order_of_the_program(draw: Callable) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return draw(x.shape[0]), torch.rand(2)

    jitted = forge.jit(program)
    for length in (3, 4, 6):
        drawn = []
        for function in (program, jitted):
            torch.manual_seed(0)
            drawn.append(function(torch.ones(length)))
        for actual, expected in zip(*reversed(drawn), strict=True):
            assert torch.equal(actual, expected)


# whose C++ kernels specialize sizes of fake tensors
WITH_KERNELS_IN_CPP = {
    "pad": lambda x: F.pad(x, (1, 1)) * 2,
    "unfold": lambda x: F.unfold(x, 2) * 2,
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "group_norm": lambda x: F.group_norm(x, 3).relu(),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") * 2,
    "fft": lambda x: torch.fft.fft(x).abs(),
    "rfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2),
    "stft": lambda x: torch.stft(x[:, 0, 0], 4, return_complex=True, window=torch.ones(4)).abs(),
    "polar": lambda x: torch.polar(x.abs(), x).real,
    "complex": lambda x: torch.complex(x, x).imag * 2,
    "prod": lambda x: x.prod(0),
}


@pytest.mark.parametrize("name", WITH_KERNELS_IN_CPP)
@pytest.mark.one_in(4)
def test_a_program_is_compiled_once_for_all_sizes(name: str) -> None:
    jitted = forge.jit(WITH_KERNELS_IN_CPP[name])
    for batch, side in ((2, 4), (3, 6), (4, 8), (5, 10)):
        x = torch.rand(batch, 3, side, side, requires_grad=True)
        expected, actual = WITH_KERNELS_IN_CPP[name](x), jitted(x)
        torch.testing.assert_close(actual, expected)
        (wanted,), (found,) = (torch.autograd.grad(each.sum(), x) for each in (expected, actual))
        torch.testing.assert_close(found, wanted)
    assert forge.explain(jitted).graphs == 2  # for the first sizes, and for all others


@pytest.mark.parametrize("more", [1, -1], ids=["padded", "cut"])
@pytest.mark.parametrize("shape", [(2, 3), (1, 4, 2)], ids=str)
@pytest.mark.one_in(2)
def test_what_is_padded_or_cut_as_the_length_decides(shape: tuple[int, ...], more: int) -> None:
    """torch's kernel clones the input at some sizes, and changes its layout at others."""

    def evened(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x.sin().movedim(-1, 1), (*[0, 0] * len(shape[1:]), 0, more * (x.shape[-1] % 2))).cos()

    jitted = forge.jit(evened)
    for length in (4, 5, 6, 7, 8):
        x = torch.rand(*shape, length, requires_grad=True)
        expected, actual = evened(x), jitted(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (actual, expected)))
