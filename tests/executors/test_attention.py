"""GPU attention kernels on fake tensors: the saved tensors have the metadata that programs promise."""

import struct

import pytest
import torch

import forge
from forge.executors.torchex import attention
from forge.executors.torchex.attention import Attention
from forge.torch_internals.fake_tensors import FakeTensorMode

CUDA = {each[0].__name__: each for (device, _), each in attention._KERNELS.items() if device == "cuda"}


def given(length=40):
    return [torch.empty(2, 4, length, 64, dtype=torch.bfloat16, device="meta") for _ in range(3)]


@pytest.mark.parametrize("length", [1, 40, 64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("kernel", CUDA)
def test_every_kernel_keeps_logsumexp_as_the_program_has_it(kernel, dropout_p, length):
    forward, _ = CUDA[kernel]
    query, key, value = given(length=length)
    call = Attention(dropout_p, False, None, False, (True, True, True, False))
    out, logsumexp, _ = forward(call, query, key, value, None)
    assert out.shape == query.shape
    assert (logsumexp.shape, logsumexp.dtype) == ((2, 4, length), torch.float32)


@pytest.mark.parametrize("length", [40, 64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("kernel", CUDA)
def test_a_kernels_backward_is_given_what_its_forward_keeps(monkeypatch, kernel, dropout_p, length):
    forward, backward = CUDA[kernel]
    calls = []
    monkeypatch.setattr(attention, "aten", Recording(calls))
    query, key, value = given(length=length)
    call = Attention(dropout_p, False, None, False, (True, True, True, False))
    out, logsumexp, rest = forward(call, query, key, value, None)
    gradients = backward(call, torch.empty_like(out), query, key, value, None, out, logsumexp, rest)
    (_, made), (read, _) = calls
    kept = {(tuple(each.shape), each.stride(), each.dtype) for each in read if isinstance(each, torch.Tensor)}
    assert (tuple(made[1].shape), made[1].stride(), made[1].dtype) in kept
    seeds = [each for each in made if isinstance(each, torch.Tensor) and each.dtype in (torch.int64, torch.uint64)]
    assert {each.dtype for each in seeds} == {dtype for _, _, dtype in kept} & {torch.int64, torch.uint64}
    if dropout_p:
        assert all(any(each is one for one in read) for each in seeds)
    assert [each.shape for each in gradients] == [query.shape, key.shape, value.shape]


class Recording:
    """A torch.ops.aten that records the arguments and results of its operators."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        def call(*args, **kwargs):
            result = getattr(torch.ops.aten, name)(*args, **kwargs)
            self.calls.append((args, result))
            return result

        return call


def test_cudnn_is_given_a_gradient_of_its_results_strides(monkeypatch):
    """torch looks up cuDNN's plan by the strides of other tensors."""
    calls = []
    monkeypatch.setattr(attention, "aten", Recording(calls))
    query, key, value = given()
    call = Attention(0.0, False, None, False, (True, True, True, False))
    out, logsumexp, rest = attention._cudnn(call, query, key, value, None)
    for gradient in (torch.empty_like(out.mT).mT, torch.empty((), dtype=out.dtype, device="meta").expand_as(out)):
        attention._cudnn_backward(call, gradient, query, key, value, None, out, logsumexp, rest)
    assert [args[0].stride() for args, _ in calls[1:]] == [out.stride()] * 2


def test_a_composition_is_given_a_gradient_of_its_results_strides():
    """It may be one call of cuDNN if a mask is given."""
    query = torch.randn(2, 40, 4, 64).transpose(1, 2).requires_grad_()
    out, read = query * 2, []
    out.register_hook(lambda g: read.append(g.stride()))
    state = attention.Composition([query], out)
    for g in (torch.ones(2, 4, 40, 64), torch.ones(()).expand(2, 4, 40, 64), torch.ones_like(out)):
        wanted = (True, False, False, False)
        found, *_ = attention.attend_backward(g, query, query, query, None, out.detach(), None, state, wanted)
        torch.testing.assert_close(found, torch.full_like(query, 2.0))
    assert read == [out.stride()] * 3


@pytest.mark.parametrize("dropout_p", [0, 0.0, 0.5])
def test_plans_of_cudnn_are_not_those_of_the_programs_own_calls(dropout_p):
    """torch compares the bytes of the options when it looks up a plan."""
    call = Attention(dropout_p, False, None, False, (True, True, True, False))
    assert call.dropout_p == dropout_p
    assert (struct.pack("d", call.dropout_p) == struct.pack("d", dropout_p)) == (dropout_p > 0)


def masks(length):
    """Return masks of (2, 4, 24, length) in several layouts, by name."""
    bias = torch.randn(4, 24, length)
    wide = torch.randn(4, 24, length + 5)[..., :length]
    turned = torch.randn(24, length, 4).permute(2, 0, 1)
    for each in (wide, turned):
        each.copy_(bias)
    column = torch.randn(1, 4, 24, 1)
    return {
        "rows": bias[None],
        "a part of rows": wide[None],
        "heads innermost": turned[None],
        "expanded": turned.expand(2, -1, -1, -1),
        "a column": column,
        "one row": torch.randn(1, 1, 1, length),
    }


@pytest.mark.parametrize("length", [32, 35])
@pytest.mark.parametrize("name", masks(32))
def test_rows_of_a_mask_begin_at_multiples_of_16_elements(name, length):
    mask = masks(length)[name]
    query, key = torch.empty(2, 4, 24, 8), torch.empty(2, 4, length, 8)
    found = attention._additive_mask(mask, OnAGpu(query), key)
    assert torch.equal(found, mask.expand(2, 4, 24, length))
    assert attention._is_aligned(found)
    assert found.stride(0) == 0  # expanded dims stay expanded
    assert attention._additive_mask(found, OnAGpu(query), key).data_ptr() == found.data_ptr()  # it is copied once


class OnAGpu:
    """A tensor that claims to be on a GPU."""

    def __init__(self, x):
        self.shape, self.dtype, self.is_cuda = x.shape, x.dtype, True


@pytest.mark.parametrize("length", [32, 35])
def test_the_memory_efficient_kernel_reads_aligned_rows_of_any_length(monkeypatch, length):
    """torch pads the mask in its own composition, which keeps a copy of it."""
    efficient = ("cuda", torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION.value)
    monkeypatch.setattr(attention, "_choice", lambda call, leaves: efficient[1])
    wanted = (True, True, True, False)
    call = Attention(0.0, False, None, False, wanted)
    with FakeTensorMode():
        q, k = [torch.empty(2, 4, each, 64, device="cuda") for each in (24, length)]
        apart, aligned = [
            torch.empty_strided((2, 4, 24, length), (96 * row, 24 * row, row, 1), device="cuda") for row in (35, 48)
        ]
        assert attention._choose(call, (q, k, k, aligned)) == attention._KERNELS[efficient]
        chosen = attention._choose(call, (q, k, k, apart))
    assert chosen == (attention._KERNELS[efficient] if length == 32 else None)


def test_the_mask_of_an_empty_batch_has_a_gradient_of_zeros():
    q, mask = torch.randn(0, 3, 19, 4, requires_grad=True), torch.randn(3, 19, 19, requires_grad=True)
    jitted = forge.jit(
        lambda q, mask: torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask * 2),
        executors=["torch"],
        cache=False,
    )
    jitted(q, mask).sum().backward()
    assert q.grad.shape == q.shape and (mask.grad is None or not mask.grad.any())


def test_a_composition_is_what_the_program_was_made_for(monkeypatch):
    """With symbolic sizes, a kernel may take a call for which that was not known before it ran."""
    monkeypatch.setattr(attention, "_choose", lambda call, leaves: (attention._efficient_forward, None))
    function = torch.nn.functional.scaled_dot_product_attention
    jitted = forge.jit(function, dynamic=True, executors=["torch"], cache=False)
    for length in (5, 7):
        q, k, v, mask = (torch.randn(2, 3, length, each, requires_grad=True) for each in (8, 8, 8, length))
        for each in (jitted, function):
            each(q, k, v, mask).square().sum().backward()
        theirs, ours = mask.grad / 2, torch.autograd.grad(function(q, k, v, mask).square().sum(), mask)[0]
        torch.testing.assert_close(theirs, ours)


BIASED = {
    "one batch, heads and width": ((2, 4, 24, 64), (2, 4, 32, 64), True),
    "one batch of keys": ((2, 4, 24, 64), (1, 4, 32, 64), False),
    "one head of keys": ((2, 4, 24, 64), (2, 1, 32, 64), False),
    "no batch": ((0, 4, 24, 64), (0, 4, 32, 64), False),
    "no keys": ((2, 4, 24, 64), (2, 4, 0, 64), False),
    "an odd width": ((2, 4, 24, 60), (2, 4, 32, 60), False),
}


@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("name", BIASED)
def test_the_memory_efficient_kernel_gives_the_gradient_of_a_bias_where_it_takes_the_call(name, in_rows):
    """Torch does not use the kernel here: it composes attention."""
    of_query, of_key, fits = BIASED[name]
    call = Attention(0.0, False, None, False, (True,) * 4)
    with FakeTensorMode():
        shapes = of_query, of_key, of_key, (*of_query[:3], of_key[2])
        q, *others = [torch.empty(each, dtype=torch.bfloat16, device="cuda") for each in shapes]
        strides = q.stride() if in_rows else [2 * step for step in q.stride()]
        q = torch.empty_strided(q.shape, strides, dtype=torch.bfloat16, device="cuda")
        chosen = attention._choose(call, (q, *others))
    assert chosen == ((attention._efficient_forward, attention._efficient_backward) if fits and in_rows else None)


def test_gradients_on_a_cpu_are_right_whatever_the_strides_of_the_output_that_is_computed_again():
    call = Attention(0.0, True, None, False, (True, True, True, False))
    q, k, v, g = (torch.randn(2, 4, 8, 16) for _ in range(4))
    out, logsumexp, _ = attention._flash_cpu(call, q, k, v, None)
    expected = attention._flash_cpu_backward(call, g, q, k, v, None, out, logsumexp, None)
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (g, q, k, v, out)]
    g, q, k, v, out = strided
    assert out.stride(-1) != 1
    actual = attention._flash_cpu_backward(call, g, q, k, v, None, out, logsumexp, None)
    torch.testing.assert_close(actual, expected)
