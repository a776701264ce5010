"""Half precision regions under forge.jit(numerics="eager") are bitwise equal to torch's functions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import is_hit
from torch import nn

import forge
from forge.executors import FusionExecutor
from forge.torch_internals.versions import TORCH

EXECUTORS = ["inductor", "torch"]
ROUNDS = TORCH >= (2, 13)  # for Inductor's C++; in earlier versions, torch runs all of it
HALVES = [torch.bfloat16, torch.float16]


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


PROGRAMS: dict[str, Callable] = {
    "sums": lambda x, y, w: ((x + y) + w) * 0.3 + x,
    "curves": lambda x, y, w: (x.exp() + y.cos().sin() + w.erf()) * x / 3,
    "gated": lambda x, y, w: F.silu(x) * y * w + F.gelu(x, approximate="tanh"),
    "rotated": lambda x, y, w: rotated(x * w, y, w),
    "normed": lambda x, y, w: normed(x + y, w) + x,
    "softmax": lambda x, y, w: (x * y).softmax(-1) * w,
    "centred": lambda x, y, w: (x - (x * y).sum(-1, keepdim=True)) * w,
    "largest": lambda x, y, w: (x * y).amax(-1, keepdim=True) * w + x,
    "wide in between": lambda x, y, w: ((x * w).float() * y.float()).to(x.dtype) * w + x,
    "chosen": lambda x, y, w: torch.where(x > 0, x * 1.7, y * w) + x.clamp(-1, 1) * w,
    "compared": lambda x, y, w: torch.where(x.clamp(0.1, 0.9) > 0.1, y * w, x) * w + (x.clamp(min=0.3) == 0.3) * y,
    "chosen numbers": lambda x, y, w: torch.where(x > 0, 0.1, y * w) * 3 + torch.where(y > 0, x, 0.7) * w,
    "filled": lambda x, y, w: (torch.full_like(x, 0.1) * 3 + x) * w + x.new_full(x.shape, 0.7) * 1.3 * y,
    # torch's kernels round once, while Inductor's loops would round more often, or not at all
    "powers": lambda x, y, w: ((x.abs() + 0.1) ** 1.7 * y + x**3) * w,
    "scaled": lambda x, y, w: torch.add(x, y, alpha=0.7) * w - x,
    "halves": lambda x, y, w: F.glu(torch.cat((x * w, y), -1)) * x,
    "interpolated": lambda x, y, w: torch.lerp(x * w, y, 0.3) * w + torch.addcmul(x, y, w, value=0.7),
    "log_softmax": lambda x, y, w: (x * y).log_softmax(-1) * w,
    "remainders": lambda x, y, w: (x * w) % 0.3 + torch.fmod(y * w, 0.7) * x,
    "entropies": lambda x, y, w: torch.special.entr(x.abs() + w.abs()) * y + torch.logit(y * w, eps=0.1),
    "losses": lambda x, y, w: (
        F.mse_loss(x, y * w, reduction="none") * w
        + F.huber_loss(x, y, reduction="none", delta=0.3) * y
        + F.smooth_l1_loss(x * w, y, reduction="none") * x
    ),
    "margins": lambda x, y, w: F.soft_margin_loss(x.clamp(-1, 1), y.detach(), reduction="none") * w,
    "products": lambda x, y, w: (
        torch.addr(x, y[:, 0].detach(), w.detach(), beta=0.3) * y
        + torch.linalg.cross(x[:, :63].unflatten(1, (21, 3)), y[:, :63].unflatten(1, (21, 3)))
        .flatten(1)
        .sum(1, keepdim=True)
    ),
    "overlaps": lambda x, y, w: (
        F.fold((x * w).flatten()[:2016].view(48, 42), (6, 6), (2, 3), padding=1) * 3
        + torch.special.xlog1py(y, x.abs()).flatten()[:288].view(8, 6, 6)
    ),
    "0-d tensors of float32": lambda x, y, w: (x * torch.tensor(0.1) + y) / torch.tensor(0.3) - w + torch.tensor(0.7),
    "cross entropies": lambda x, y, w: (
        F.binary_cross_entropy(x.clamp(0.1, 0.9), (y * w).detach().clamp(0, 1), reduction="none") * w + y
    ),
}

EXPONENTIALS = {
    "softmax",
    "log_softmax",
}  # whose approximation differs in the last place, and rarely where it is rounded


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((33, 64), (33, 64), (64,))]


def flow(function: Callable, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result and the gradients."""
    result = function(*given)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, given, gradient, allow_unused=True)]


def differences(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    pairs = [(one, other) for one, other in zip(actual, expected, strict=True) if not one is other is None]
    return [int((one != other).sum()) for one, other in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(8)
def test_a_region_gives_what_torchs_functions_give(name: str, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    jitted = forge.jit(PROGRAMS[name], executors=EXECUTORS, numerics="eager", cache=False)
    unfused = forge.jit(PROGRAMS[name], executors=["torch"], cache=False)
    found = flow(jitted, given)
    few = 3 if name in EXPONENTIALS else 0
    assert max(differences(found, flow(unfused, given))) <= few
    assert differences(found[:1], [PROGRAMS[name](*given)])[0] <= few
    # a part of normed is in float32, which is not rounded
    assert ("inductor" in forge.explain(jitted).executors) is (ROUNDS or name == "normed")
    assert "numerics: eager" in str(forge.explain(jitted))


# functions whose derivative is a formula or a kernel in torch; each gradient rounds where that does
FORMULAS: dict[str, Callable] = {
    "addcdiv": lambda x, y, z: torch.addcdiv(x * y, y, z, value=0.3) * z,
    "addcdiv_": lambda x, y, z: (x * y).addcdiv_(y, z, value=0.3) * z,
    "addcmul_": lambda x, y, z: (x * y).addcmul_(y, z, value=0.3) * z,
    "atan2": lambda x, y, z: torch.atan2(x * z, y) * z,
    "binary_cross_entropy": lambda x, y, z: F.binary_cross_entropy(
        x.clamp(0.1, 0.9), y.clamp(0.1, 0.9), z.detach().abs()
    ),
    "binary_cross_entropy_with_logits": lambda x, y, z: F.binary_cross_entropy_with_logits(
        x, y.clamp(0.1, 0.9), z.detach().abs(), pos_weight=z.detach().abs()
    ),
    "cosine_embedding_loss": lambda x, y, z: F.cosine_embedding_loss(x, y, z[:, 0].detach().sign()),
    "cosine_similarity": lambda x, y, z: F.cosine_similarity(x, y)[:, None] * z,
    "dist": lambda x, y, z: torch.dist(x, y) * z,
    "gru_cell": lambda x, y, z: torch.gru_cell(x, y[:, :11], z, z[:, :11]) * 3,
    "hypot": lambda x, y, z: torch.hypot(x, y * z) * z,
    "kl_div": lambda x, y, z: F.kl_div(x, y.abs() + 0.1, reduction="sum") * z,
    "ldexp": lambda x, y, z: torch.ldexp(x, y) * z,
    "logsigmoid": lambda x, y, z: F.logsigmoid(x * y) * z,
    "lstm_cell": lambda x, y, z: torch.cat(torch.lstm_cell(x, (y[:, :8], y[:, 8:16]), z[:32], z[:32, :8]), 1) * 3,
    "ndtr": lambda x, y, z: torch.special.ndtr(x * y) * z,
    "norm": lambda x, y, z: (x * y).norm(dim=1, keepdim=True) * z,
    "norms of other orders": lambda x, y, z: torch.linalg.vector_norm(x, 0.5, 1, True) * y * z,
    "normalize": lambda x, y, z: F.normalize(x * y) * z,
    "rnn_tanh_cell": lambda x, y, z: torch.rnn_tanh_cell(x, y[:, :33], z, z[:, :33]) * 3,
    "rsqrt": lambda x, y, z: torch.rsqrt(x.abs() + 0.1) * y * z,
    "soft_margin_loss": lambda x, y, z: F.soft_margin_loss(x * y, z.detach()) * z,
    "xlog1py": lambda x, y, z: torch.special.xlog1py(x, y.abs()) * z,
    "xlogy": lambda x, y, z: torch.xlogy(x, y.abs() + 0.1) * z,
}


IN_REGIONS = {"lstm_cell", "norm", "cosine_similarity", "atan2"}  # the other formulas are slow there


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "executors"),
    [
        pytest.param(
            name,
            executors,
            id=f"{name}-{executors[0]}",
            marks=[] if executors == ["torch"] or name in IN_REGIONS else [pytest.mark.slow],
        )
        for name in FORMULAS
        for executors in (["torch"], EXECUTORS)
    ],
)
@pytest.mark.one_in(2)
def test_a_gradient_is_eagers(name: str, dtype: torch.dtype, executors: list[str]) -> None:
    given = [torch.randn(33, 64).to(dtype).requires_grad_() for _ in range(3)]
    jitted = forge.jit(FORMULAS[name], executors=executors, numerics="eager", cache=False)
    found = flow(jitted, given)
    assert not any(differences(found, flow(FORMULAS[name], given)))


@pytest.mark.parametrize("name", ["soft_margin_loss", "xlog1py", "xlogy"])
def test_an_unfused_gradient_in_float32_is_eagers(name: str) -> None:
    given = [torch.randn(33, 64).requires_grad_() for _ in range(3)]
    found = flow(forge.jit(FORMULAS[name], executors=["torch"]), given)
    assert not any(differences(found, flow(FORMULAS[name], given)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.clamp(0.1, 0.9) == torch.full_like(x, 0.1)) * 2 + 1,
        lambda x: torch.isclose(x.clamp(min=0.3), x.new_tensor(0.3), rtol=0, atol=0) * 2 + 1,
        lambda x: (x.clamp(0.1, 0.9) > 0.1) * 2 + 1,
        lambda x: torch.full_like(x, 0.1) * 3 + x,
        lambda x: torch.empty_like(x).fill_(0.7) * 1.3 + x,
        lambda x: torch.nextafter(-x, x) * 2 + 1,
    ],
    ids=["equal", "close", "greater", "full", "filled", "next"],
)
@pytest.mark.one_in(2)
def test_numbers_are_of_half_precision_where_torchs_are(function: Callable, dtype: torch.dtype) -> None:
    x = torch.randn(33, 64).to(dtype)
    jitted = forge.jit(function, cache=False)
    assert torch.equal(jitted(x), function(x))
    assert "inductor" in forge.explain(jitted).executors


def test_fast_numerics_round_results_alone() -> None:
    given = inputs(torch.bfloat16)
    jitted = forge.jit(PROGRAMS["sums"], executors=EXECUTORS, cache=False)
    assert differences(flow(jitted, given), flow(PROGRAMS["sums"], given))[0] > 100
    assert "numerics:" not in str(forge.explain(jitted))


@pytest.mark.skipif(not ROUNDS, reason="before torch 2.13, no region on a CPU rounds so")
def test_an_artifact_that_rounds_is_another_one() -> None:
    """The graph is the same, but one artifact requests roundings for its conversions."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return ((x * 3 + 1) * x).bfloat16().float() * 2 + (x.bfloat16() * 1.1 + 0.5).float()

    x = torch.randn(33, 64)
    for numerics in ("fast", "eager", "fast", "eager"):
        torch._dynamo.reset()
        found = forge.jit(program, executors=EXECUTORS, numerics=numerics, cache=False)(x)
        assert torch.equal(found, program(x)) is (numerics == "eager")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.7 + x
        return x


@pytest.mark.skipif(not ROUNDS, reason="before torch 2.13, no region on a CPU rounds so")
@pytest.mark.slow
def test_larger_regions_round_too() -> None:
    module, x = Chain().bfloat16(), torch.randn(64, 8, dtype=torch.bfloat16)
    jitted = forge.jit(module, executors=EXECUTORS, numerics="eager", cache=False)
    with torch.no_grad():
        jitted(x)
        assert forge.finish_compiling(jitted, timeout=300.0)
        assert set(forge.explain(jitted).executors) == {"inductor-whole"}
        assert torch.equal(jitted(x), module(x))


def test_a_program_on_disk_is_of_its_numerics(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    module = Chain().bfloat16()

    def use(jitted: Callable) -> None:
        with torch.no_grad():
            x = torch.linspace(-1, 1, 512).view(64, 8).bfloat16()
            assert torch.equal(jitted(x), module(x)) is (forge.explain(jitted).numerics == "eager")

    for numerics in ("eager", "fast"):
        options = {"executors": EXECUTORS, "numerics": numerics}
        assert not is_hit(lambda: copy.deepcopy(module), use, **options)
        assert is_hit(lambda: copy.deepcopy(module), use, **options)


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ValueError, match="numerics is 'exact', but must be one of fast, eager"):
        forge.jit(torch.sin, numerics="exact")


def test_an_executor_whose_regions_cannot_round_is_refused() -> None:
    class Fuser(FusionExecutor):
        pass

    with pytest.raises(ValueError, match="mine has no regions that round as eager does: its with_eager_numerics"):
        forge.jit(torch.sin, executors=[Fuser("mine"), "torch"], numerics="eager")


def test_torch_compile_takes_the_option() -> None:
    given = inputs(torch.bfloat16)
    options = {"executors": EXECUTORS, "numerics": "eager", "cache": False}
    compiled = torch.compile(PROGRAMS["sums"], backend="forge", options=options)
    assert torch.equal(compiled(*given), PROGRAMS["sums"](*given))
