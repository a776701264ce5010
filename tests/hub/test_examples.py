"""The kernel repositories in examples/kernels, and the one that comes with forge: built, and compared with torch in
values, gradients and errors.

Triton's interpreter needs its variable set before Triton is imported anywhere. Without a GPU, the Triton repository is
therefore tested in a separate process, which runs this file.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "examples" / "kernels"
SHIPPED = ROOT / "forge" / "_builtin_kernels"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_CUDA = torch.cuda.is_available()
NATIVE = ["norms-cpu", *(["norms-cuda"] if HAS_CUDA else [])]
TRITON = ["forge-triton"] if HAS_CUDA or INTERPRETED else []
EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
HIDDEN = (1, 7, 16, 17, 100, 4096)


@dataclass(frozen=True)
class Example:
    """A repository's module, and the device of its tensors."""

    name: str
    module: ModuleType
    device: torch.device

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape).to(self.device, dtype)


def compiler_is_missing(name: str) -> str | None:
    """Return the reason why a repository cannot be built here, or None."""
    tool = {"norms-cpu": os.environ.get("CXX", "g++"), "norms-cuda": os.environ.get("NVCC", "nvcc")}[name]
    return None if shutil.which(tool) else f"there is no {tool} to build {name} with"


def triton_is_missing() -> str | None:
    """Return the reason why Triton's kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    numbers = [tuple(map(int, version(package).split(".")[:2])) for package in ("triton", "numpy")]
    if not HAS_CUDA and numbers[0] < (3, 7) and numbers[1] >= (2, 4):
        return f"the interpreter of Triton {version('triton')} does not run with numpy {version('numpy')}"
    return None


def built(name: str) -> Path:
    """Return the variant's folder, built if necessary."""
    if name == "forge-triton":
        return SHIPPED / name / "build" / "torch-universal"
    done = subprocess.run([sys.executable, KERNELS / name / "build.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name.replace('-', '_')}", built(name) / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def examples() -> Callable[[str], Example]:
    """Return a function that returns an example by its name, and skips the test if it cannot run. A process registers
    an example's operators only once, even if it runs another module's tests in between."""
    known: dict[str, Example] = {}

    def get(name: str) -> Example:
        missing = triton_is_missing() if name == "forge-triton" else compiler_is_missing(name)
        if missing:
            pytest.skip(missing)
        if name not in known:
            on_cpu = name == "norms-cpu" or (name == "forge-triton" and not HAS_CUDA)
            known[name] = Example(name, imported(name), torch.device("cpu" if on_cpu else "cuda"))
        return known[name]

    return get


@pytest.fixture(params=[*NATIVE, *TRITON])
def example(request: pytest.FixtureRequest, examples: Callable[[str], Example]) -> Example:
    return examples(request.param)


@pytest.fixture(params=NATIVE)
def native(request: pytest.FixtureRequest, examples: Callable[[str], Example]) -> Example:
    return examples(request.param)


@pytest.fixture(params=TRITON or ["forge-triton"])
def triton(request: pytest.FixtureRequest, examples: Callable[[str], Example]) -> Example:
    if not TRITON:
        pytest.skip("runs in a process of its own, with TRITON_INTERPRET=1")
    return examples(request.param)


# references, in float64: each kernel rounds once


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def leaf(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a leaf with the same values and strides that requires a gradient."""
    return tensor.detach().to(dtype or tensor.dtype).requires_grad_()


def assert_near(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that a result is near `exact` in float64, rounded once to dtype; float32 errors are relative to the largest
    value."""
    assert actual.dtype == dtype
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (8e-3, 1e-5)}[dtype]
    largest = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    torch.testing.assert_close(
        actual.detach().double(), exact.detach(), rtol=rtol, atol=atol * largest, equal_nan=True, check_dtype=False
    )


def compare(function: Callable, reference: Callable, *args: torch.Tensor, grad: torch.Tensor | None = None) -> None:
    """Check that values and gradients are the reference's, and that no argument was changed."""
    copies = [each.clone() for each in args]
    exact_args = [leaf(each, torch.float64) for each in args]
    exact = reference(*exact_args)
    dtype = args[0].dtype
    assert_near(function(*args), exact, dtype)
    ours = [leaf(each) for each in args]
    out = function(*ours)
    assert_near(out, exact, dtype)
    grad = torch.randn(exact.shape).to(exact.device, dtype) if grad is None else grad
    found = torch.autograd.grad(out, ours, grad)
    for one, other in zip(found, torch.autograd.grad(exact, exact_args, grad.double()), strict=True):
        assert_near(one, other, dtype)
    for each, copy in zip(args, copies, strict=True):
        assert torch.equal(each, copy)


# RMSNorm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm_has_torchs_values_and_gradients(example: Example, hidden: int, dtype: torch.dtype) -> None:
    x, weight = example.randn(2, 3, hidden, dtype=dtype), example.randn(hidden, dtype=dtype)
    compare(lambda x, w: example.module.rms_norm(x, w, EPS), rms_norm, x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(3001, 24), (3001, 17), (2001, 264), (3, 20000), (3, 20001)])
def test_rms_norm_of_more_rows_or_longer_ones_than_are_held_at_once(
    example: Example, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    x, weight = example.randn(rows, hidden, dtype=dtype), example.randn(hidden, dtype=dtype)
    compare(lambda x, w: example.module.rms_norm(x, w, EPS), rms_norm, x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_takes_any_layout(example: Example, dtype: torch.dtype) -> None:
    """The layouts are unaligned, strided rows, strided columns, transposed and expanded inputs, and an expanded
    gradient."""
    wide, weight = example.randn(6, 40, dtype=dtype), example.randn(20, dtype=dtype)
    flat = example.randn(4 * 20 + 1, dtype=dtype)
    unaligned = flat[1:].view(4, 20)
    layouts = [
        unaligned,
        wide[:, 3:23],
        wide[::2, :20],
        wide[:, ::2],
        example.randn(20, 6, dtype=dtype).t(),
        example.randn(2, 3, 5, 20, dtype=dtype).transpose(0, 2),
        example.randn(1, 20, dtype=dtype).expand(3, 20),
        example.randn(3, 1, dtype=dtype).expand(3, 20),
    ]
    for x in layouts:
        compare(lambda x, w: example.module.rms_norm(x, w, EPS), rms_norm, x, weight)
        compare(lambda x, w: example.module.rms_norm(x, w, EPS), rms_norm, x, flat[1:21])
    grad = example.randn(1, dtype=dtype).expand(4, 20)
    compare(lambda x, w: example.module.rms_norm(x, w, EPS), rms_norm, unaligned, weight, grad=grad)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)])
def test_rms_norm_of_nothing(example: Example, shape: tuple[int, ...]) -> None:
    x, weight = leaf(example.randn(*shape)), leaf(example.randn(shape[-1]))
    out = example.module.rms_norm(x, weight, EPS)
    grads = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert out.shape == shape and grads[0].shape == shape
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_rms_norm_gives_one_gradient_where_one_is_wanted(example: Example) -> None:
    x, weight = example.randn(3, 8), leaf(example.randn(8))
    (grad,) = torch.autograd.grad(example.module.rms_norm(x, weight, EPS).sum(), weight)
    (wanted,) = torch.autograd.grad(rms_norm(x, weight).sum(), weight)
    torch.testing.assert_close(grad, wanted)


def test_rms_norm_backward_finds_rstd_again(native: Example) -> None:
    x, weight, grad = native.randn(5, 33), native.randn(33), native.randn(5, 33)
    out, rstd = native.module.rms_norm_forward(x, weight, EPS)
    assert torch.equal(out, native.module.rms_norm(x, weight, EPS))
    torch.testing.assert_close(rstd, (x.pow(2).mean(-1) + EPS).rsqrt())
    for one, other in zip(
        native.module.rms_norm_backward(grad, x, weight, EPS, rstd),
        native.module.rms_norm_backward(grad, x, weight, EPS),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_rms_norm_says_what_does_not_fit(example: Example) -> None:
    run = example.module.rms_norm
    x, weight = example.randn(2, 8), example.randn(8)
    for text, args in {
        r"weight is \[7\], but must be \[8\], the last dim of x": (x, example.randn(7)),
        "x must have at least 1 dim": (example.randn(), weight),
        "weight must have the dtype": (x, weight.bfloat16()),
        "x .*must be .*float32": (x.double(), weight.double()),
        "x .*must be .*bfloat16": (x.to(torch.int64), weight),
    }.items():
        with pytest.raises(RuntimeError, match=text):
            run(*args, EPS)
    with pytest.raises(RuntimeError, match=r"grad_output is \[2, 7\], but must have the shape of x, \[2, 8\]"):
        example.module.rms_norm_backward(example.randn(2, 7), x, weight, EPS)


# SwiGLU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_swiglu_has_torchs_values_and_gradients(example: Example, hidden: int, dtype: torch.dtype) -> None:
    gate, up = (example.randn(2, 3, hidden, dtype=dtype) * 4 for _ in range(2))
    compare(example.module.swiglu, swiglu, gate, up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_takes_any_layout(example: Example, dtype: torch.dtype) -> None:
    """The layouts are the halves of a fused projection, unaligned, strided, transposed, expanded and 0-d inputs."""
    fused = example.randn(2, 5, 26, dtype=dtype)
    square = example.randn(13, 13, dtype=dtype)
    flat = example.randn(79, dtype=dtype)
    for gate, up in [
        fused.chunk(2, -1),
        (flat[1:], flat[:-1]),
        (fused[..., ::2], fused[..., 1::2]),
        (square, square.t()),
        (square[:1].expand(13, 13), square[:, :1].expand(13, 13)),
        (fused.transpose(0, 1), fused.transpose(0, 1).clone()),
        (flat[0], flat[1]),
    ]:
        compare(example.module.swiglu, swiglu, gate, up)
    compare(example.module.swiglu, swiglu, square, square.t(), grad=square[0, 0].expand(13, 13))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_swiglu_of_nothing(example: Example, shape: tuple[int, ...]) -> None:
    gate, up = leaf(example.randn(*shape)), leaf(example.randn(*shape))
    out = example.module.swiglu(gate, up)
    assert [each.shape for each in torch.autograd.grad(out, (gate, up), out)] == [shape, shape]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_of_infinities_and_nan_is_torchs(example: Example, dtype: torch.dtype) -> None:
    values = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e30, -1e30, 88.5, -88.5, 104.0, -104.0, 1e-30]
    gate = torch.tensor(values, dtype=dtype, device=example.device)
    up = torch.ones_like(gate)
    torch.testing.assert_close(example.module.swiglu(gate, up), swiglu(gate, up), equal_nan=True)


def test_swiglu_is_exact_over_the_whole_range(example: Example) -> None:
    """Triton's exp on a GPU is that of a rounded multiple of x, so its relative error grows with x."""
    gate = torch.linspace(-100, 100, 4001).to(example.device)
    exact = swiglu(gate.double(), torch.ones_like(gate).double())
    rtol = 2e-5 if example.name == "forge-triton" else 1e-6
    found = example.module.swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-30)


def test_swiglu_says_what_does_not_fit(example: Example) -> None:
    run, gate = example.module.swiglu, example.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"up is \[8\], but must have the shape of gate, \[2, 8\]"):
        run(gate, example.randn(8))
    with pytest.raises(RuntimeError, match=r"gate .*must be .*float32"):
        run(gate.double(), gate.double())
    with pytest.raises(RuntimeError, match=r"up .*dtype|up is torch\.bfloat16"):
        run(gate, gate.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_silu_and_mul_writes_to_out(native: Example, hidden: int, dtype: torch.dtype) -> None:
    fused = native.randn(3, 2 * hidden + 3, dtype=dtype)[:, 3:]
    out = torch.full((3, hidden), float("nan"), dtype=dtype, device=native.device)
    assert native.module.silu_and_mul(out, fused) is out
    assert_near(out, swiglu(*fused.double().chunk(2, -1)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 24, 1000])
def test_silu_and_mul_of_many_rows(native: Example, hidden: int, dtype: torch.dtype) -> None:
    fused = native.randn(301, 2 * hidden, dtype=dtype)
    out = torch.full((301, hidden), float("nan"), dtype=dtype, device=native.device)
    native.module.silu_and_mul(out, fused)
    assert_near(out, swiglu(*fused.double().chunk(2, -1)), dtype)


def test_silu_and_mul_says_what_does_not_fit(native: Example) -> None:
    run, x, out = native.module.silu_and_mul, native.randn(2, 8), native.randn(2, 4)
    for text, args in {
        r"x is \[2, 7\], but its last dim must be even": (out, native.randn(2, 7)),
        r"out is \[2, 8\], but must have the shape of x with a last dim of 4": (x.clone(), x),
        "out must have the device and dtype of x": (out.bfloat16(), x),
        "out must be contiguous": (native.randn(4, 2).t(), x),
        "has no gradient; use swiglu": (out, leaf(x)),
    }.items():
        with pytest.raises(RuntimeError, match=text):
            run(*args)


# kernels of the Triton repository alone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((2, 3, 5, 8), (2, 1, 5, 8)),
        ((2, 3, 5, 14), (5, 14)),
        ((1, 1, 1, 2), (1, 1, 1, 2)),
        ((5, 6), (5, 6)),
        ((6,), (6,)),
        ((2, 2, 3, 2, 64), (3, 1, 64)),
        ((2, 0, 5, 8), (2, 1, 5, 8)),
    ],
)
def test_rotary_has_torchs_values_and_gradients(
    triton: Example, shape: tuple[int, ...], table: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, cos, sin = (
        triton.randn(*shape, dtype=dtype),
        triton.randn(*table, dtype=dtype),
        triton.randn(*table, dtype=dtype),
    )
    compare(triton.module.rotary, rotary, x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_takes_any_layout(triton: Example, dtype: torch.dtype) -> None:
    x = triton.randn(2, 5, 3, 16, dtype=dtype)
    cos, sin = triton.randn(2, 5, 16, dtype=dtype)
    for view in (x.transpose(1, 2), x[..., ::2].transpose(1, 2), x[:, :, 1:, 2:10].transpose(1, 2)):
        width = view.shape[-1]
        compare(triton.module.rotary, rotary, view, cos[:, :width], sin[:, :width])


def test_rotary_keeps_the_dtype_of_x(triton: Example) -> None:
    x, cos, sin = triton.randn(2, 3, 8, dtype=torch.bfloat16), triton.randn(3, 8), triton.randn(3, 8)
    assert_near(triton.module.rotary(x, cos, sin), rotary(x.double(), cos.double(), sin.double()), torch.bfloat16)


def test_rotary_says_what_does_not_fit(triton: Example) -> None:
    run, x = triton.module.rotary, triton.randn(2, 4, 8)
    with pytest.raises(RuntimeError, match="its last dim must be even"):
        run(x[..., :7], x[..., :7], x[..., :7])
    with pytest.raises(RuntimeError, match=r"sin is \[3, 8\], which does not broadcast to x, \[2, 4, 8\]"):
        run(x, x, triton.randn(3, 8))
    with pytest.raises(RuntimeError, match=r"cos is \[1, 2, 4, 8\], which does not broadcast"):
        run(x, x[None], x)


def rotary_pair(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rotary(q, cos, sin), rotary(k, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q", "k", "table"),
    [
        ((2, 6, 5, 8), (2, 2, 5, 8), (2, 1, 5, 8)),
        ((2, 3, 37, 14), (2, 1, 37, 14), (37, 14)),
        ((5, 6), (5, 6), (5, 6)),
        ((2, 2, 3, 4, 64), (2, 2, 3, 1, 64), (3, 1, 64)),
        ((2, 0, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8)),
        ((2, 3, 5, 8), (2, 0, 5, 8), (2, 1, 5, 8)),
        ((0, 3, 5, 8), (0, 1, 5, 8), (5, 8)),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_rotary_of_queries_and_keys_has_torchs_values_and_gradients(
    triton: Example, q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, ...], dtype: torch.dtype, strided: bool
) -> None:
    """Each has its own number of heads; strided: transposed, as a projection leaves them."""

    def made(*shape: int) -> torch.Tensor:
        if not strided or len(shape) < 3:
            return triton.randn(*shape, dtype=dtype)
        return triton.randn(*shape[:-3], *shape[-3:-1][::-1], shape[-1], dtype=dtype).transpose(-2, -3)[..., :]

    args = made(*q), made(*k), triton.randn(*table, dtype=dtype), triton.randn(*table, dtype=dtype)
    ours, exact_args = [leaf(each) for each in args], [leaf(each, torch.float64) for each in args]
    found, exact = triton.module.rotary_pair(*ours), rotary_pair(*exact_args)
    with torch.no_grad():
        alone = triton.module.rotary_pair(*args)
    grads = [torch.randn_like(each) for each in found]
    for one, other, plain, x in zip(found, exact, alone, (q, k), strict=True):
        assert one.shape == x
        assert_near(one, other, dtype)
        assert torch.equal(one, plain)
    of_found = torch.autograd.grad(found, ours, grads)
    for one, other in zip(of_found, torch.autograd.grad(exact, exact_args, [g.double() for g in grads]), strict=True):
        assert_near(one, other, dtype)
    for one, other in zip(of_found, triton.module.rotary_pair_backward(*grads, *args[2:]), strict=False):
        assert torch.equal(one, other)


def test_rotary_of_queries_and_keys_gives_the_gradient_of_either_alone(triton: Example) -> None:
    cos, sin = triton.randn(2, 5, 8)
    q, k = triton.randn(2, 4, 5, 8), triton.randn(2, 2, 5, 8)
    for wanted in (0, 1):
        args = [q, k]
        args[wanted] = leaf(args[wanted])
        (found,) = torch.autograd.grad(
            sum(each.sum() for each in triton.module.rotary_pair(*args, cos, sin)), args[wanted]
        )
        (exact,) = torch.autograd.grad(rotary(args[wanted], cos, sin).sum(), args[wanted])
        torch.testing.assert_close(found, exact)


def test_rotary_of_queries_and_keys_is_one_launch_forward_and_one_backward(
    triton: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = sys.modules[f"{triton.module.__name__}.rope"]
    launched = []
    launch = rope.launch
    monkeypatch.setattr(rope, "launch", lambda *args, **kwargs: [launched.append(args[0]), launch(*args, **kwargs)])
    q, k, cos, sin = leaf(triton.randn(2, 4, 5, 8)), leaf(triton.randn(2, 2, 5, 8)), *triton.randn(2, 5, 8)
    found = triton.module.rotary_pair(q, k, cos, sin)
    assert len(launched) == 1
    torch.autograd.grad(found, (q, k), found)
    assert len(launched) == 2


def test_rotary_of_queries_and_keys_keeps_the_dtype_of_each(triton: Example) -> None:
    q, k, cos, sin = triton.randn(2, 3, 8, dtype=torch.bfloat16), triton.randn(3, 8), *triton.randn(2, 3, 8)
    found = triton.module.rotary_pair(q, k, cos, sin)
    for one, x in zip(found, (q, k), strict=True):
        assert_near(one, rotary(x.double(), cos.double(), sin.double()), x.dtype)


def test_rotary_of_queries_and_keys_says_what_does_not_fit(triton: Example) -> None:
    run, q = triton.module.rotary_pair, triton.randn(2, 4, 8)
    with pytest.raises(RuntimeError, match=r"rotary_pair: k is \[2, 4, 7\], but its last dim must be even"):
        run(q, q[..., :7], q, q)
    with pytest.raises(
        RuntimeError, match=r"rotary_pair: cos is \[2, 4, 8\], which does not broadcast to k, \[1, 4, 8\]"
    ):
        run(q, q[:1], q, q)
    with pytest.raises(RuntimeError, match=r"rotary_pair_backward: grad_q is torch\.float64"):
        triton.module.rotary_pair_backward(q.double(), q, q, q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("classes", [1, 7, 100, 9000])
def test_cross_entropy_has_torchs_values_and_gradients(
    triton: Example, classes: int, reduction: str, dtype: torch.dtype
) -> None:
    logits = triton.randn(6, classes, dtype=dtype) * 3
    target = torch.randint(classes, (6,)).to(triton.device)
    target[1] = -100
    compare(
        lambda x: triton.module.cross_entropy(x, target, reduction=reduction),
        lambda x: F.cross_entropy(x, target, reduction=reduction),
        logits,
    )


def test_cross_entropy_backward_finds_its_sums_again(triton: Example) -> None:
    logits, target = leaf(triton.randn(4, 9)), torch.tensor([3, 7, 0, 8], device=triton.device)
    (wanted,) = torch.autograd.grad(F.cross_entropy(logits, target, ignore_index=7), logits)
    grad = torch.ones((), device=triton.device)
    torch.testing.assert_close(triton.module.cross_entropy_backward(grad, logits.detach(), target, 7), wanted)


def test_cross_entropy_takes_strided_rows_and_minus_infinity(triton: Example) -> None:
    logits, target = triton.randn(4, 40), torch.tensor([1, 0, 1, 0], device=triton.device)
    logits[:, 2:] = -float("inf")
    for view in (logits[:, :20], logits[::2], logits[:, ::20], logits[:, :4].t()[:2]):
        wanted = F.cross_entropy(view, target[: len(view)], reduction="none")
        found = triton.module.cross_entropy(view, target[: len(view)], reduction="none")
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_cross_entropy_of_ignored_targets_alone_is_torchs(triton: Example) -> None:
    logits, target = leaf(triton.randn(3, 5)), torch.full((3,), -100, device=triton.device)
    loss = triton.module.cross_entropy(logits, target)
    assert loss.isnan()
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros_like(logits))


def test_cross_entropy_of_a_target_out_of_range_is_nan_and_reads_nothing(triton: Example) -> None:
    target = torch.tensor([0, 5, -1], device=triton.device)
    found = triton.module.cross_entropy(triton.randn(3, 5), target, reduction="none")
    assert found.isnan().tolist() == [False, True, True]


def test_cross_entropy_says_what_does_not_fit(triton: Example) -> None:
    run, logits = triton.module.cross_entropy, triton.randn(3, 5)
    target = torch.zeros(3, dtype=torch.int64, device=triton.device)
    with pytest.raises(RuntimeError, match=r"they must be \[N, V\] and \[N\]"):
        run(logits, target[:2])
    with pytest.raises(RuntimeError, match=r"target is torch\.int32, but must be torch\.int64"):
        run(logits, target.int())
    with pytest.raises(ValueError, match="reduction is 'average', but must be 'none' or 'mean' or 'sum'"):
        run(logits, target, reduction="average")


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def geglu_exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [2, 7, 100, 4096])
def test_layer_norm_has_torchs_values_and_gradients(triton: Example, hidden: int, dtype: torch.dtype) -> None:
    x, weight, bias = (triton.randn(*shape, dtype=dtype) for shape in ((2, 3, hidden), (hidden,), (hidden,)))
    compare(lambda x, w, b: triton.module.layer_norm(x, w, b, EPS), layer_norm, x, weight, bias)


def test_layer_norm_of_values_far_from_zero_is_torchs(triton: Example) -> None:
    """The mean is subtracted before squares are summed."""
    x, weight, bias = triton.randn(4, 300) + 1000, triton.randn(300), triton.randn(300)
    exact = layer_norm(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(triton.module.layer_norm(x, weight, bias, EPS).double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(301, 24), (5, 20001), (1, 1), (0, 8)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_after_a_residual_gives_the_sum_and_its_norm(
    triton: Example, kind: str, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    x, residual = (triton.randn(rows, hidden + 1, dtype=dtype)[:, 1:] for _ in range(2))
    vectors = [triton.randn(hidden, dtype=dtype) for _ in range(1 if kind == "rms" else 2)]
    ours = triton.module.add_rms_norm if kind == "rms" else triton.module.add_layer_norm
    alone = triton.module.rms_norm if kind == "rms" else triton.module.layer_norm
    leaves = [leaf(each) for each in (x, residual, *vectors)]
    total, out = ours(*leaves, EPS)
    assert torch.equal(total, x + residual)
    again = [leaf(each) for each in (x, residual, *vectors)]
    sum_again = again[0] + again[1]
    out_again = alone(sum_again, *again[2:], EPS)
    assert torch.equal(out, out_again)
    grads = torch.randn_like(total), torch.randn_like(out)
    found = torch.autograd.grad((total, out), leaves, grads)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}  # which rounds a sum once, not twice
    for one, other in zip(found, torch.autograd.grad((sum_again, out_again), again, grads), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_norm_after_a_residual_says_what_does_not_fit(triton: Example) -> None:
    x, weight = triton.randn(2, 8), triton.randn(8)
    with pytest.raises(RuntimeError, match=r"residual is \[1, 8\], but must have the shape of x, \[2, 8\]"):
        triton.module.add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(RuntimeError, match=r"bias is \[7\], but must be \[8\], the last dim of x"):
        triton.module.add_layer_norm(x, x, weight, weight[:7], EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 100, 9000])
def test_softmax_has_torchs_values_and_gradients(triton: Example, length: int, dtype: torch.dtype) -> None:
    """The backward reads the rounded result, like torch's, which also rounds a product."""
    x = leaf((triton.randn(5, 3, length + 2, dtype=dtype) * 3)[..., 1:-1])
    grad = torch.randn_like(x)
    result = triton.module.softmax(x)
    torch.testing.assert_close(result, F.softmax(x, -1))
    (of_x,) = torch.autograd.grad(result, x, grad)
    weights, wide = result.detach().double(), grad.double()
    expected = weights * (wide - (weights * wide).sum(-1, keepdim=True))
    torch.testing.assert_close(of_x, expected.to(dtype))


def test_softmax_of_infinities_is_torchs(triton: Example) -> None:
    x = triton.randn(4, 5)
    x[0] = -float("inf")
    x[1, 2] = -float("inf")
    x[2, 3] = float("inf")
    torch.testing.assert_close(triton.module.softmax(x), F.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("approximate", "reference"), [("tanh", geglu), ("none", geglu_exact)])
def test_geglu_has_torchs_values_and_gradients(
    triton: Example, approximate: str, reference: Callable, dtype: torch.dtype
) -> None:
    gate, up = (triton.randn(3, 201, dtype=dtype) * 3 for _ in range(2))
    compare(lambda g, u: triton.module.geglu(g, u, approximate), reference, gate, up)


def test_a_kernel_that_was_compiled_runs_for_other_addresses_and_lengths(triton: Example) -> None:
    """Triton specializes a kernel for one call (aligned memory, a multiple of 16); the next one may differ."""
    flat, weight = triton.randn(4 * 64 + 1), triton.randn(64)
    for x in (flat[:-1].view(4, 64), flat[1:].view(4, 64), flat[:240].view(4, 60), flat[:-1].view(4, 64)):
        w = weight[: x.shape[-1]]
        torch.testing.assert_close(triton.module.rms_norm(x, w, EPS), rms_norm(x, w), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(triton.module.softmax(x), F.softmax(x, -1))


# the repositories


def test_a_built_kernel_is_not_compiled_again(examples: Callable[[str], Example]) -> None:
    examples("norms-cpu")
    before = {path: path.stat().st_mtime_ns for path in built("norms-cpu").iterdir() if path.is_file()}
    assert {path: path.stat().st_mtime_ns for path in built("norms-cpu").iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_the_cuda_repository_compiles_without_a_gpu() -> None:
    missing = compiler_is_missing("norms-cuda")
    if missing:
        pytest.skip(missing)
    assert list(built("norms-cuda").glob("_norms_cuda_*.abi3.so"))


@pytest.mark.parametrize("name", ["norms-cpu", "forge-triton"])
def test_the_kernels_library_loads_it(name: str) -> None:
    missing = triton_is_missing() if name == "forge-triton" else compiler_is_missing(name)
    if missing:
        pytest.skip(missing)
    folder = built(name).parents[1]
    run_python(f"""
        from pathlib import Path
        from kernels import get_local_kernel
        backend = {"cpu" if name == "norms-cpu" else None!r}  # else what torch was built for
        assert callable(get_local_kernel(Path({str(folder)!r}), backend=backend).rms_norm)
    """)


@pytest.mark.parametrize("name", ["norms-cpu", "norms-cuda", "forge-triton"])
def test_the_manifest_names_functions_that_there_are(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    package = next(((SHIPPED if name == "forge-triton" else KERNELS) / name).glob("*/*/__init__.py"))
    place = package.parent if name == "forge-triton" else KERNELS / name
    manifest, source = yaml.safe_load((place / "forge_kernels.yaml").read_text()), package.read_text()
    for op in manifest["ops"]:
        for kernel in op["kernels"]:
            names = [kernel["kernel_name"]]
            if isinstance(kernel["grad"], dict):
                names.append(kernel["grad"]["kernel_name"])
            assert all(f'"{each}"' in source for each in names), names


def test_its_operators_keep_what_they_say_of_themselves(native: Example) -> None:
    """The check is torch's own: schema, fake implementation, dynamic shapes."""
    ops = sys.modules[f"{native.module.__name__}._ops"].ops
    x, weight = native.randn(3, 8), native.randn(8)
    for op, args in {
        ops.rms_norm: (x, weight, EPS),
        ops.rms_norm_forward: (x, weight, EPS),
        ops.rms_norm_backward: (x, x, weight, EPS),
        ops.swiglu: (x, x.clone()),
        ops.swiglu_backward: (x, x.clone(), x),
        ops.silu_and_mul: (native.randn(3, 4), x),
    }.items():
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("threads", [1, 2])
def test_large_inputs_use_torchs_threads(examples: Callable[[str], Example], threads: int) -> None:
    cpu = examples("norms-cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = cpu.randn(300, 513), cpu.randn(513)
        compare(lambda x, w: cpu.module.rms_norm(x, w, EPS), rms_norm, x, weight)
        compare(cpu.module.swiglu, swiglu, cpu.randn(70_001), cpu.randn(70_001))
    finally:
        torch.set_num_threads(before)


SWEEP = """
    import ctypes, mmap, sys
    import torch
    import torch.nn.functional as F
    import importlib.util
    spec = importlib.util.spec_from_file_location("kernel", {init!r})
    kernel = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = kernel
    spec.loader.exec_module(kernel)

    def at_the_end_of_memory(tensor):
        # a page that may be read, with the tensor's last byte at its end, then one that may not
        pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        keep.append(pages)
        offset = mmap.PAGESIZE - tensor.nbytes
        return torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=offset).copy_(tensor)

    keep = []
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for n in range(1, 70):
            x, weight, up, grad = (at_the_end_of_memory(torch.randn(n).to(dtype)) for _ in range(4))
            out = at_the_end_of_memory(torch.zeros(n).to(dtype))
            close = lambda a, b: torch.testing.assert_close(a.float(), b, rtol=rtol, atol=1e-5)
            close(kernel.rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), (n,), weight.float(), 1e-5))
            close(kernel.swiglu(x, up), F.silu(x.float()) * up.float())
            kernel.rms_norm_backward(grad, x, weight, 1e-5)
            kernel.swiglu_backward(grad, x, up)
            fused = at_the_end_of_memory(torch.randn(2 * n).to(dtype))
            kernel.silu_and_mul(out, fused)
            close(out, F.silu(fused.float()[:n]) * fused.float()[n:])
    print("done")
"""


@pytest.mark.parametrize("instructions", ["baseline", "v3", "v4"])
@pytest.mark.one_in(3)
def test_no_instruction_set_touches_memory_past_the_end(examples: Callable[[str], Example], instructions: str) -> None:
    """The lengths are those up to 69, with the last element before an unreadable page; values are checked, too."""
    examples("norms-cpu")
    init = built("norms-cpu") / "__init__.py"
    text = SWEEP.format(init=str(init))
    assert "done" in run_python(text, NORMS_CPU_ISA=instructions)


@pytest.mark.skipif(bool(TRITON), reason="Triton's tests run in this very process")
def test_triton_in_its_interpreter() -> None:
    missing = triton_is_missing()
    if missing:
        pytest.skip(missing)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "triton"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def run_python(text: str, **environment: str) -> str:
    """Return the output of a program in a separate process, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
