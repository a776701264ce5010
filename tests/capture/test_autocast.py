"""forge.jit under torch.autocast, outside and inside the program."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.torchlang import autocast_casts
from tests.markers import slow_except
from tests.models.zoo import MODELS
from tests.unknown_operator import rounded

BF16 = torch.bfloat16


def same(function: Callable, *args: torch.Tensor, **options: object) -> forge.Explanation:
    """Check that results, dtypes and gradients are eager's."""
    jitted = forge.jit(function, **options)
    actual, expected = jitted(*args), function(*args)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)
    wanted = [each for each in args if each.requires_grad]
    if wanted:
        ours, theirs = (torch.autograd.grad(each.float().square().sum(), wanted) for each in (actual, expected))
        for mine, eager in zip(ours, theirs, strict=True):
            assert mine.dtype == eager.dtype
            torch.testing.assert_close(mine, eager, rtol=2e-2, atol=2e-2)
    return forge.explain(jitted)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def test_a_region_of_the_program() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = x @ w
            y = y @ w
        return (y + z) @ w

    explained = same(program, *inputs())
    assert explained.eager == [] and explained.opaque_calls == []


def test_a_region_around_the_program() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.softmax(x @ w, -1) + torch.exp(x @ w).sum()

    with torch.autocast("cpu", BF16):
        explained = same(program, *inputs())
    assert explained.eager == [] and explained.opaque_calls == []


def test_it_is_guarded() -> None:
    jitted = forge.jit(torch.matmul)
    x, w = inputs()
    found = [jitted(x, w).dtype]
    with torch.autocast("cpu", BF16):
        found.append(jitted(x, w).dtype)
        with torch.autocast("cpu", enabled=False):
            found.append(jitted(x, w).dtype)
        with torch.autocast("cpu", torch.float16):
            found.append(jitted(x, w).dtype)
    found.append(jitted(x, w).dtype)
    assert found == [torch.float32, BF16, torch.float32, torch.float16, torch.float32]


def test_what_runs_in_eager_for_inputs_that_share_memory_runs_under_it() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x @ w

    jitted = forge.jit(program)
    x, w = (each.detach() for each in inputs())
    with torch.autocast("cpu", BF16):
        jitted(x.clone(), w)
        shared, shared_too = w.clone(), w.clone()
        actual, expected = jitted(shared[:4], shared), program(shared_too[:4], shared_too)
    assert actual.dtype == expected.dtype == BF16
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(shared, shared_too)


def test_a_program_compiled_without_autocast_runs_without_it_in_the_backward() -> None:
    x, w = inputs()
    out = forge.jit(torch.matmul)(x, w)
    with torch.autocast("cpu", BF16):
        gradients = torch.autograd.grad(out.sum(), (x, w))
    for ours, eager in zip(gradients, torch.autograd.grad((x @ w).sum(), (x, w)), strict=True):
        torch.testing.assert_close(ours, eager)


def test_the_state_is_as_before_after_an_error() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return rounded(x)

    with pytest.raises(forge.StrictError):
        forge.jit(program, strict=True)(torch.eye(3))
    assert not torch.is_autocast_enabled("cpu")


WEIGHT = torch.randn(5, 6)
# converting a slice changes its layout, and torch then multiplies it in another way
OF_SLICES: dict[str, Callable] = {
    "linear": lambda x: F.linear(x[:, -2:], WEIGHT),
    "linear with a bias": lambda x: F.linear(x[:, -2:], WEIGHT, WEIGHT[:, 0]),
    "linear of columns": lambda x: F.linear(x[..., :3], WEIGHT[:, :3]),
    "matmul": lambda x: x[:, 1:3] @ WEIGHT.t(),
    "matmul by a slice": lambda x: WEIGHT[:2, :3] @ x[:, :3],
    "einsum": lambda x: torch.einsum("btc,dc->btd", x[:, ::2], WEIGHT),
    "conv1d": lambda x: F.conv1d(x[:, 1:3].transpose(1, 2), WEIGHT[:, :, None]),
}


@pytest.mark.parametrize("name", OF_SLICES)
def test_products_of_slices_are_no_opaque_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_casts, "_memo", {})
    function = OF_SLICES[name]
    jitted = forge.jit(function, executors=["torch"])
    for batch in (2, 3):
        x = torch.randn(batch, 4, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            ours, eager = jitted(x), function(x)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(*[torch.autograd.grad(y.float().square().sum(), x) for y in (ours, eager)])
    assert forge.explain(jitted).opaque_calls == []
    torch._dynamo.reset()


def test_what_no_conversion_reproduces_is_an_opaque_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo decomposes torch's functions in Python, so no function of torch is known to need this here."""
    monkeypatch.setattr(autocast_casts, "_memo", {})
    monkeypatch.setattr(autocast_casts, "_find", lambda *args: None)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            y = x @ w
        return y.float() @ w

    assert same(program, *inputs()).opaque_calls == ["operator.matmul under torch.autocast"]


@pytest.mark.parametrize("need_weights", [False, True])
def test_functions_written_in_python_have_their_calls_converted(need_weights: bool) -> None:
    """F.multi_head_attention_forward multiplies in lower precision, and takes softmax in float32."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)

    def program(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return layer(x, memory, memory, need_weights=need_weights)[0]

    x, memory = (torch.randn(2, length, 8, requires_grad=True) for length in (3, 5))
    explained = same(program, x, memory, executors=["torch"])
    assert explained.eager == [] and explained.opaque_calls == []


def test_what_reaches_inside_of_a_kernel_runs_in_eager() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return F.affine_grid(x, [2, 1, 3, 3], align_corners=False)

    jitted, x = forge.jit(program), torch.randn(2, 2, 3)
    with pytest.warns(UserWarning, match="affine_grid.* under torch.autocast"):
        out = jitted(x)
    assert out.dtype == program(x).dtype
    torch.testing.assert_close(out, program(x))


@pytest.mark.parametrize("name", slow_except(["llama", "gpt2", "vit", "bert", "t5"], "llama", "vit"))
def test_models_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    eager = copy.deepcopy(model)
    jitted = forge.jit(model)

    def step(run: nn.Module, owner: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", BF16):
            result = run(**arguments)
        loss = getattr(result, "loss", None)
        (loss if loss is not None else result[0].float().square().mean()).backward()
        return [result[0].detach(), *[each.grad for each in owner.parameters() if each.grad is not None]]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours, theirs = step(jitted, model), step(eager, eager)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype
        scale = max(wanted.abs().max().item(), 1e-3)
        assert (mine - wanted).abs().max().item() <= 3e-2 * scale
    assert forge.explain(jitted).eager == []


def test_norms_are_found_in_mixed_precision(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(
            torch.promote_types(weight.dtype, x.dtype)
        )

    kernel = forge.kernel("pattern:rms_norm", rms, name="rms", grad="composite")
    gated = forge.kernel("pattern:swiglu", lambda gate, up: F.silu(gate) * up, name="gated", grad="composite")
    model, arguments = MODELS["llama"]()
    jitted = forge.jit(model, kernels=[kernel, gated])
    with torch.autocast("cpu", BF16):
        jitted(**arguments).loss.backward()
    ran = [row.executor for row in forge.explain(jitted).rows if row.phase == "forward"]
    assert (ran.count("rms"), ran.count("gated")) == (5, 2)
