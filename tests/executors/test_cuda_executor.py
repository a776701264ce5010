"""The executor of CUDA GPUs: its decisions, its functions on any device, and its kernels in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge import torchlang
from forge.executors.cudaex import attention, availability, cudaex, decoding, head, products
from forge.executors.executor import Declined
from forge.executors.torchex.attention import with_rows
from forge.ir import Symbol, TensorProxy
from forge.torchlang import linear_cross_entropy


def _proxy(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> TensorProxy:
    return TensorProxy("x", shape, dtype, torch.device(device))


@pytest.mark.parametrize(
    ("steps", "formula"),
    [
        ((), (1.0, False, 1.0)),
        ((("to", torch.float32),), (1.0, False, 1.0)),
        ((("mul", 2.0), ("div", 8.0)), (1.0, False, 0.25)),
        ((("div", 30.0), ("tanh",), ("mul", 30.0), ("to", torch.float32)), (1 / 30, True, 30.0)),
        ((("tanh",), ("tanh",)), None),
        ((("mul", 0.0),), None),
    ],
)
def test_steps_are_one_formula(steps: tuple, formula: tuple | None) -> None:
    assert head.as_formula(steps) == formula


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((8192, 768, 50257), torch.bfloat16, None),
        ((8192, 50257, 768), torch.float16, None),
        ((8192, 768, 50264), torch.bfloat16, "each row of the product is a multiple of 16 bytes"),
        ((8192, 768, 50257), torch.float32, "a product of torch.float32 is left to torch"),
        ((16, 100, 33), torch.bfloat16, "the product gains less than the copies of its operands cost"),
    ],
)
def test_a_product_is_padded_where_that_pays(
    sizes: tuple[int, int, int], dtype: torch.dtype, reason: str | None
) -> None:
    m, k, n = sizes
    checker = cudaex.candidates(torchlang.mm)[0].checker
    assert checker is not None
    decision = checker(_proxy(m, k, dtype=dtype), _proxy(k, n, dtype=dtype))
    if reason is None:
        assert decision is True
    else:
        assert isinstance(decision, Declined)
        assert decision.reason == reason
    on_cpu = checker(_proxy(m, k, dtype=dtype, device="cpu"), _proxy(k, n, dtype=dtype, device="cpu"))
    assert isinstance(on_cpu, Declined)


@pytest.mark.parametrize("transposed", ["neither", "first", "second"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 8, 9), (6, 7, 16), (7, 13, 3)])
def test_a_padded_product_is_the_product(batch: tuple[int, ...], m: int, k: int, n: int, transposed: str) -> None:
    a, b = torch.randn(*batch, m, k), torch.randn(*batch, k, n)
    a = a.mT.contiguous().mT if transposed == "first" else a
    b = b.mT.contiguous().mT if transposed == "second" else b
    product = products._product(a, b)
    torch.testing.assert_close(product, a @ b)
    assert product.stride(-2) % 4 == 0  # rows of 16 bytes


def test_a_padded_linear_layer_is_the_layer() -> None:
    x, weight, bias = torch.randn(2, 5, 7), torch.randn(11, 7), torch.randn(11)
    torch.testing.assert_close(products._linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(products._linear(x, weight), F.linear(x, weight))


def run_kernel(program: str) -> None:
    """Run a program of Triton kernels in a separate process: on the GPU, or in the interpreter."""
    environment, device = ({}, "cuda") if torch.cuda.is_available() else ({"TRITON_INTERPRET": "1"}, "cpu")
    program = f"import torch\ntorch.set_default_device('{device}')\n{textwrap.dedent(program)}"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}, check=True)


_KERNEL = """
    import torch, torch.nn.functional as F
    from forge.executors.cudaex.kernels import cross_entropy, scale_

    torch.manual_seed(0)
    for before, has_tanh, after in ((1.0, False, 1.0), (1 / 30, True, 30.0), (1.0, False, 0.5)):
        for smoothing in (0.0, 0.1):
            x, target, counts = 4 * torch.randn(5, 5001), torch.randint(5001, (5,)), torch.rand(5)
            target[2] = -100
            leaf = x.clone().requires_grad_()
            scores = after * (torch.tanh(before * leaf) if has_tanh else leaf)
            expected = F.cross_entropy(scores, target, reduction="none", label_smoothing=smoothing)
            (gradient,) = torch.autograd.grad((expected * counts).sum(), leaf)
            gradient = F.pad(gradient, (0, 3))
            for is_scored, given in ((False, x), (True, scores.detach())):
                options = (5001, (before, has_tanh, after), is_scored, -100, smoothing)
                logits = F.pad(given, (0, 3), value=99.0)
                assert torch.allclose(cross_entropy(logits, target, counts, None, *options), expected, atol=1e-5)
                losses = cross_entropy(logits, target, counts, logits, *options)
                assert torch.allclose(losses, expected, atol=1e-5)
                assert torch.allclose(logits, gradient, atol=1e-6), (logits - gradient).abs().max()
    x = torch.randn(5000)
    assert torch.equal(scale_(x.clone(), torch.tensor(1.0)), x)
    assert torch.equal(scale_(x.clone(), torch.tensor(3.0)), 3 * x)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_of_the_head() -> None:
    run_kernel(_KERNEL)


@pytest.mark.parametrize("symbol", [torchlang.linear, torchlang.matmul, torchlang.mm, torchlang.bmm])
def test_heads_of_language_models_take_precedence_over_padded_products(symbol: Symbol) -> None:
    (implementation,) = cudaex.candidates(symbol)
    assert implementation.low_priority


def test_scores_are_rounded_step_by_step_under_eager_numerics() -> None:
    exact = cudaex.with_eager_numerics()
    assert cudaex.candidates(linear_cross_entropy)
    assert not exact.candidates(linear_cross_entropy)
    assert exact.candidates(torchlang.linear)
    assert exact.name == cudaex.name


@pytest.mark.parametrize(("steps", "taken"), [((("to", torch.float32),), True), ((("to", torch.float64),), False)])
def test_a_loss_in_float64_is_left_to_torch(steps: tuple, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: object())
    given = (
        _proxy(64, 32),
        _proxy(100, 32),
        None,
        None,
        _proxy(64, dtype=torch.int64),
        None,
        steps,
        0,
        -100,
        "mean",
        0.0,
    )
    assert (head._checker(*given) is True) == taken


def _relative_bias(batch: int | None = None) -> torch.Tensor:
    """Return a bias of (1 or batch, heads, queries, keys) whose heads are innermost in memory."""
    bias = torch.randn(5, 6, 4).permute(2, 0, 1).unsqueeze(0)
    return bias if batch is None else bias.expand(batch, -1, -1, -1)


@pytest.mark.parametrize("batch", [None, 3])
def test_a_mask_is_laid_out_in_rows(batch: int | None) -> None:
    mask = _relative_bias(batch)
    rows = with_rows(mask)
    assert torch.equal(rows, mask)
    assert rows.stride()[1:] == (30, 6, 1)
    assert batch is None or rows.stride(0) == 0  # expanded dims stay expanded
    plain = torch.randn(1, 1, 5, 6).expand(3, 4, 5, 6)
    assert with_rows(plain) is plain
    row = torch.randn(5, 1).expand(5, 6)
    assert with_rows(row) is row


def test_attention_with_a_mask_is_given_rows() -> None:
    (candidate,) = cudaex.candidates(torchlang.scaled_dot_product_attention)
    assert candidate.low_priority  # for example, of repeated keys
    query, mask = _proxy(2, 4, 5, 8), _proxy(1, 4, 5, 6)
    assert candidate.checker is not None
    assert candidate.checker(query, query, query, mask) is True
    assert isinstance(candidate.checker(query, query, query), Declined)
    assert candidate.checker(query, query, query, mask, 0.5) is True
    assert isinstance(candidate.checker(_proxy(2, 4, 5, 8, device="cpu"), query, query, mask), Declined)
    q, k, v, bias = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), _relative_bias()
    found = attention._attention(q, k, v, bias, scale=1.0)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, bias, scale=1.0))
    assert not cudaex.with_eager_numerics().candidates(torchlang.scaled_dot_product_attention)


_DECODING_KERNEL = """
    import itertools, torch, torch.nn.functional as F
    from forge.executors.cudaex.decoding_kernels import attend

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,)
    shapes = ((2, 8, 2, 1, 70, 64), (1, 4, 4, 3, 300, 16), (1, 2, 1, 1, 1000, 32), (3, 6, 2, 2, 515, 128))
    cases = itertools.product(shapes, ("none", "bools", "added", "hidden"), dtypes, (False, True))
    for (batch, heads, of_keys, queries, length, width), kind, dtype, writes in cases:
        new = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)
        query = new(batch, queries, heads, width).transpose(1, 2)
        key, value = new(batch, of_keys, length, width), new(batch, length, of_keys, width).transpose(1, 2)
        expected_key, expected_value, update = key.clone(), value.clone(), None
        if writes:
            position = torch.randperm(length, device=device)[: 2 * queries : 2]
            update = position, new(batch, queries, of_keys, width).transpose(1, 2), new(batch, of_keys, queries, width)
            expected_key.index_copy_(2, position, update[1])
            expected_value.index_copy_(2, position, update[2])
        mask = None
        if kind == "bools":
            mask = torch.rand(batch, 1, queries, length, device=device) < 0.5
        if kind == "added":
            mask = new(1, heads, queries, length)
        if kind == "hidden":  # whole tiles, and one row whole
            mask = (torch.arange(length, device=device) < 20).expand(1, 1, queries, length).clone()
            mask[..., 0, :] = False
        out = attend(query, key, value, mask, 0.1, update)
        as_float = mask.float() if kind == "added" else mask
        inputs = query.float(), expected_key.float(), expected_value.float(), as_float
        expected = F.scaled_dot_product_attention(*inputs, scale=0.1, enable_gqa=True)
        torch.testing.assert_close(out.float(), expected, atol=2e-3 if dtype == torch.float16 else 2e-2, rtol=1e-2)
        assert torch.equal(key, expected_key) and torch.equal(value, expected_value)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_of_few_queries() -> None:
    run_kernel(_DECODING_KERNEL)


def test_attention_of_few_queries_is_a_kind_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: object())
    checker = cudaex.candidates(torchlang.decoding_attention)[0].checker
    given = _proxy(2, 8, 1, 64), _proxy(2, 1, 640, 64), _proxy(2, 1, 640, 64)
    assert checker is not None
    with sdpa_kernel(SDPBackend.MATH):
        decision = checker(*given)
    assert isinstance(decision, Declined)
    assert "no flash attention" in decision.reason
    assert checker(*given) is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"query": _proxy(2, 8, 9, 64)}, "more than 64 queries share a head of keys"),
        (dict.fromkeys(("query", "key", "value"), _proxy(16, 8, 1, 64)), "there are many heads of keys and no mask"),
        ({"query": _proxy(2, 8, 1, 48)}, "the kernel takes queries and values of one width, of"),
        ({"query": _proxy(2, 8, 1, 64, dtype=torch.float32)}, "the kernel takes four dims of bfloat16 or float16"),
        ({"value": _proxy(2, 3, 640, 64)}, "query, key and value have other than one batch, or heads that do not fit"),
        ({"attn_mask": _proxy(64, dtype=torch.float16)}, "the mask is torch.float16"),
        ({"query": _proxy(2, 8, 1, 64, device="cpu")}, "query is on cpu, and its kernel runs on CUDA GPUs"),
    ],
)
def test_attention_of_few_queries_has_a_kernel(
    change: dict[str, TensorProxy], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: object())
    (implementation,) = cudaex.candidates(torchlang.decoding_attention)
    given = {"query": _proxy(2, 8, 1, 64), "key": _proxy(2, 1, 640, 64), "value": _proxy(2, 1, 640, 64)} | change
    assert implementation.checker is not None
    decision = implementation.checker(**given)
    if reason is None:
        assert decision is True
    else:
        assert isinstance(decision, Declined)
        assert decision.reason.startswith(reason)
