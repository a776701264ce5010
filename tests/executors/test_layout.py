"""Strides of a claimed program: functions that run on fake tensors to find them, and those that do not."""

import contextlib
import ctypes
import functools
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import chosen_opinfos, main_dtype, map_tensors, samples, tensors_in
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import forge
from forge.api.functional import Direct
from forge.compiler import layout, unspecified_strides
from forge.compiler.layout import Layout, Layouts, pair_leaves
from forge.executors.hubex import kernel_executor
from forge.executors.torchex import attention
from forge.ir import Proxy, TensorProxy, Trace
from forge.ir.printing import DEL
from forge.ir.pytree import rename
from forge.testing import OpInfo

given: list[Any] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        chosen = chosen_opinfos(metafunc.config)
        metafunc.parametrize("info", [pytest.param(info, id=info.name) for info in chosen])


def by_address(input: torch.Tensor) -> torch.Tensor:
    """Stand in for a kernel that is launched on addresses, which a fake tensor does not have."""
    given.append(input)
    out = torch.empty_like(input)
    ctypes.memmove(out.data_ptr(), input.data_ptr(), input.nbytes)
    return out.mul_(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return F.relu6(torch.sin(x).exp() + 1) * 3 - torch.cos(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_kernel_is_never_called_with_tensors_without_values(training: bool) -> None:
    given.clear()
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, by_address, **options)], verify=False)
    jitted = forge.jit(doubled, executors=[by_kernel, "inductor", "torch"], cache=False)
    x = torch.randn(6, 5, requires_grad=training)
    found = jitted(x.t())
    torch.testing.assert_close(found, 2 * (torch.sin(x.t()).exp() + 1) * 3 - torch.cos(x.t()))
    assert given and not any(isinstance(each, FakeTensor) for each in given)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        (torch.relu, True),
        (torch.ops.aten.relu.default, True),
        (torch.Tensor.contiguous, True),
        (functools.partial(torch.sum, dim=0), True),
        (by_address, False),
        (functools.partial(by_address), False),
        (lambda x: x, False),
        (ctypes.CDLL(None).abs, False),
    ],
)
def test_whose_functions_are(function: Callable, runs: bool) -> None:
    assert layout.is_own(function) is runs


def column_major(input: torch.Tensor) -> torch.Tensor:
    """Stand in for a kernel whose result is not contiguous."""
    return F.relu6(input).mT.contiguous().mT


def _mixed(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a region's result that reads a separate call's result on `value`."""
    alone = value * 2
    return ((alone @ weight) + alone).sin().exp() * alone


def test_a_call_alone_follows_the_strides_of_a_kernels_result() -> None:
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, column_major, **options)], verify=False)
    x, weight = torch.randn(5, 6), torch.randn(6, 6)
    jitted = forge.jit(lambda x, w: _mixed(F.relu6(x), w), executors=[by_kernel, "inductor", "torch"], cache=False)
    torch.testing.assert_close(jitted(x, weight), _mixed(F.relu6(x), weight))
    assert "alone_restrided" in str(forge.last_traces(jitted)[-1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda input: F.relu6(input).double(), r"float64 and shape \[5, 6\], where .*float32 and shape \[5, 6\]"),
        (lambda input: F.relu6(input)[:3], r"float32 and shape \[3, 6\], where its meta .* shape \[5, 6\]"),
        (lambda input: F.relu6(input)[:3].mT, r"shape \[6, 3\], where its meta .* shape \[5, 6\]"),
        (lambda input: F.relu6(input)[None], r"shape \[1, 5, 6\], where its meta .* shape \[5, 6\]"),
    ],
)
def test_a_region_does_not_read_a_result_of_other_metadata_than_the_meta_functions(
    wrong: Callable, message: str
) -> None:
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, wrong, **options)], verify=False)
    jitted = forge.jit(lambda x: F.relu6(x).exp() + 1, executors=[by_kernel, "inductor", "torch"], cache=False)
    with pytest.raises(RuntimeError, match="hub.* returns a tensor of .*" + message):
        jitted(torch.randn(5, 6))


@pytest.mark.parametrize("turned", [False, True])
def test_a_call_alone_follows_the_strides_of_a_gradient(turned: bool) -> None:
    x, weight = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)

    def function(x: torch.Tensor) -> torch.Tensor:
        wave = x.sin().exp()
        return (wave @ weight + wave) * 2

    gradient = torch.randn(6, 6)
    gradient = gradient.t() if turned else gradient
    jitted = forge.jit(function, executors=["inductor", "torch"], cache=False)
    (found,) = torch.autograd.grad(jitted(x), x, gradient)
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    torch.testing.assert_close(found, expected)


def test_a_call_alone_follows_the_strides_that_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention kernel is chosen at run time, and with it its result's strides."""
    query, weight = torch.randn(2, 3, 4, 8), torch.randn(8, 8)
    jitted = forge.jit(
        lambda q, w: _mixed(F.scaled_dot_product_attention(q, q, q), w), executors=["inductor", "torch"], cache=False
    )
    forward, backward = attention._KERNELS["cpu", attention.SDPBackend.FLASH_ATTENTION.value]

    def transposed(call: Any, *inputs: Any) -> tuple:
        out, *rest = forward(call, *inputs)
        return (out if isinstance(out, FakeTensor) else out.mT.contiguous().mT, *rest)

    monkeypatch.setitem(attention._KERNELS, ("cpu", attention.SDPBackend.FLASH_ATTENTION.value), (transposed, backward))
    query.requires_grad_()
    torch.testing.assert_close(
        jitted(query, weight), _mixed(F.scaled_dot_product_attention(query, query, query), weight)
    )


def test_a_product_has_its_strides_whatever_it_is_given() -> None:
    """Strides that cannot differ are not checked at run time."""
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, column_major, **options)], verify=False)
    x, weight = torch.randn(5, 6), torch.randn(6, 6)
    function = lambda x, w: ((F.relu6(x) @ w).sin() + 1).exp()
    jitted = forge.jit(function, executors=[by_kernel, "inductor", "torch"], cache=False)
    torch.testing.assert_close(jitted(x, weight), function(x, weight))
    assert "restrided" not in str(forge.last_traces(jitted)[-1]) and "in_row_major" not in str(
        forge.last_traces(jitted)[-1]
    )


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "reversed": lambda x: x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim))),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.ndim > 2 else x,
    "every other": lambda x: torch.stack([x, x], -1)[..., 1],
    "every other, reversed": lambda x: LAYOUTS["reversed"](torch.stack([x, x], 0))[1],
}


@pytest.mark.one_in(6)
def test_strides_that_are_no_promise_are_those_that_torch_gives(info: OpInfo) -> None:
    """A region that reads a call's result is compiled for them."""
    for sample in list(samples(info, "cpu", main_dtype(info)))[:3]:
        for change in LAYOUTS.values():
            args, kwargs = map_tensors(
                lambda x, change=change: change(x) if x.ndim else x, (sample.args, sample.kwargs)
            )
            trace = Direct(info.op, executors=["torch"]).compile(args, kwargs)[1].traces[-1]
            values = dict(zip(trace.input_names, tensors_in((args, kwargs)), strict=True)) | trace.constants
            with contextlib.suppress(RuntimeError, ValueError):  # eager refuses the layout
                _assert_strides(trace, values)


@pytest.mark.one_in(3)
def test_strides_that_follow_a_promise_are_one(info: OpInfo) -> None:
    """The strides of arguments are a broken promise: the result of a call on certain strides has these."""
    for sample in list(samples(info, "cpu", main_dtype(info)))[:2]:
        trace = Direct(info.op, executors=["torch"]).compile(sample.args, sample.kwargs)[1].traces[-1]
        for change in LAYOUTS.values():
            given = [change(x) if x.ndim else x for x in tensors_in((sample.args, sample.kwargs))]
            values = dict(zip(trace.input_names, given, strict=True))
            with contextlib.suppress(RuntimeError, ValueError):  # eager refuses the layout
                _assert_strides(trace, values | trace.constants, uncertain=values)


def _assert_strides(trace: Trace, values: dict[str, Any], uncertain: Collection[str] = ()) -> None:
    layouts = Layouts(trace.inputs)
    layouts.values |= {name: Layout.of(value) for name, value in values.items() if name not in uncertain}
    layouts.uncertain |= set(uncertain)
    for call in (call for call in trace.bound_symbols if call.symbol is not DEL):
        result = call.symbol.op(*rename(call.args, values), **rename(call.kwargs, values))
        layouts.run(call)
        layouts.settle(call)
        for leaf, value in pair_leaves(call.output, result):
            if isinstance(leaf, Proxy):
                values[leaf.name] = value
            if isinstance(leaf, TensorProxy) and leaf.name not in layouts.uncertain and value.numel():
                steps = zip(value.shape, layouts.values[leaf.name].strides, value.stride(), strict=True)
                assert all(one == other for length, one, other in steps if length > 1), call


@pytest.mark.parametrize("training", [False, True])
def test_a_region_reads_the_norm_of_a_transposed_value(training: bool) -> None:
    """torch's kernel returns row-major order; on fake tensors it keeps the order of its argument."""
    norm = torch.nn.BatchNorm1d(16)

    def function(x: torch.Tensor) -> torch.Tensor:
        wide = x * 2 + 1
        return (norm(wide.transpose(1, 2)).transpose(1, 2) + wide).relu() * 2

    x = torch.randn(6, 4, 16, requires_grad=training)
    torch.testing.assert_close(forge.jit(function)(x), function(x))


def test_a_call_alone_follows_an_image_whose_channels_lie_beside_each_other() -> None:
    """Resizing keeps the layout of a convolution's result, and that of a one-pixel image, too, which has several."""
    x, weight = torch.randn(2, 24, 1, 1), torch.randn(24, 24, 1, 1)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = F.interpolate(F.conv2d(x, weight), scale_factor=2, mode="bicubic")
        return wide.sin() + 1

    jitted = forge.jit(function, cache=False)
    torch.testing.assert_close(jitted(x, weight), function(x, weight))
    assert "restrided" in str(forge.last_traces(jitted)[-1])


def test_a_result_has_eagers_stride_in_a_dim_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checked program computes with gaps between elements, which its caller does not see."""
    spread = lambda x: torch.empty(2 * x.numel()).as_strided(x.shape, (2, 4)).copy_(x)
    monkeypatch.setattr(unspecified_strides, "randomly_strided", spread)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x * 2
        return wide + wide.sin(), wide.take_along_dim(torch.tensor([[0]]), 1) * 5

    x = torch.randn(2, 3, requires_grad=True)
    jitted = forge.jit(function, check="regions", cache=False)
    assert [each.stride() for each in jitted(x)] == [each.stride() for each in function(x)] == [(3, 1), (1, 1)]


def _row(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[-1]).half()


OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rrelu in training": lambda x: F.rrelu(x, 0.1, 0.3, True),
    "rrelu in evaluation": lambda x: F.rrelu(x, 0.1, 0.3, False),
    "poisson": torch.poisson,
    "isin": lambda x: torch.isin(x, torch.ones(2)),
    "isin of a number": lambda x: torch.isin(x, 1),
    "logsigmoid": F.logsigmoid,
    "normal of two tensors": lambda x: torch.normal(x, x),
    "normal of deviations": lambda x: torch.normal(0.0, x),
    "gamma": lambda x: torch._standard_gamma(x + 1),
    "native_dropout_backward": lambda x: torch.ops.aten.native_dropout_backward(x, torch.ones(x.shape) > 0, 2.0),
    "a product with a number": lambda x: x * 2,
    "a number as a tensor": lambda x: torch.atan2(x, torch.tensor(2.0)),
    "by a decomposition": lambda x: torch.copysign(x, torch.tensor(2.0)),
    "of two layouts": lambda x: torch.floor_divide(x, torch.ones(x.shape)),
    "of two layouts, the other way round": lambda x: torch.xlogy(torch.ones(x.shape), x),
    "of a row": lambda x: torch.div(torch.ones(x.shape[-1]), x, rounding_mode="floor"),
    "of an expanded row": lambda x: _row(x).expand(x.shape) * x.half(),
    "of an expanded number": lambda x: _row(x)[0].expand(x.shape) - x.half(),
    "of an expanded column": lambda x: torch.atan2(x.half(), x.half()[..., :1].expand(x.shape)),
    "of three, one expanded": lambda x: torch.addcmul(_row(x).expand(x.shape), x.half(), x.half()),
    "a choice": lambda x: torch.where((_row(x) > 0).expand(x.shape), x.half(), x.half() + 1),
}


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 3), (1, 4)), ((2, 3, 1), (3, 1, 3)), ((2, 3, 1), (3, 1, 7)), ((4, 1, 2), (2, 9, 1)), ((1, 1, 3), (1, 9, 1))],
)
@pytest.mark.parametrize("name", OTHERWISE)
def test_strides_are_those_of_kernels_that_compute_values(name: str, shape: tuple, strides: tuple) -> None:
    """torch's kernels for fake tensors return others."""

    def run() -> tuple[int, ...]:
        return OTHERWISE[name](torch.empty_strided(shape, strides).fill_(0)).stride()

    wanted = run()
    with torch.no_grad(), FakeTensorMode(), layout._Operators(counts=False):
        assert run() == wanted


def _laid_out_at_random(source: random.Random, shape: Sequence[int], high: int | None = None) -> torch.Tensor:
    """Return a tensor with its dims in random order in memory; if `high` is given, of integers below it, with some dims
    expanded."""
    order = source.sample(range(len(shape)), len(shape))
    lengths = [shape[dim] for dim in order]
    laid = torch.zeros(lengths) if high is None else torch.randint(0, high, lengths)
    laid = laid.permute([order.index(dim) for dim in range(len(shape))])
    return laid[..., :1].expand(laid.shape) if high is not None and source.random() < 0.2 else laid


def test_strides_of_what_tensors_index_are_those_of_the_kernel() -> None:
    """torch's function for fake tensors returns those of contiguous indices."""
    source = random.Random(0)
    for _ in range(200):
        shape = [source.randint(1, 4) for _ in range(source.randint(1, 4))]
        dims = sorted(source.sample(range(len(shape)), source.randint(1, len(shape))))
        of = [source.randint(1, 3) for _ in range(source.randint(1, 3))]
        indices: list[torch.Tensor | None] = [None] * (dims[-1] + 1)
        for dim in dims:
            lengths = [1 if source.random() < 0.2 else length for length in of]
            indices[dim] = _laid_out_at_random(source, lengths, shape[dim])
        x = _laid_out_at_random(source, shape)
        wanted = torch.ops.aten.index(x, indices).stride()
        with FakeTensorMode() as fake, layout._Operators(counts=False):
            x, *indices = [each if each is None else fake.from_tensor(each) for each in (x, *indices)]
            assert torch.ops.aten.index(x, indices).stride() == wanted


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_value_that_a_transposed_tensor_indexes_has_eagers_strides(grad: bool) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[index], (x * 2)[index] * 3, (x * 2)[:, index].sin()

    x, index = torch.randn(3, 2).t().requires_grad_(grad), torch.tensor([[0, 1], [1, 1], [0, 0]]).t()
    found, expected = forge.jit(function, check="regions", cache=False)(x, index), function(x, index)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert expected[0].stride() == (3, 6, 1)


@pytest.mark.parametrize(
    "read",
    [lambda x, index: x[index.t()], lambda x, index: x[:, index.t()], lambda x, index: x[index[:, :1].expand(-1, 3)]],
    ids=["rows", "columns", "expanded"],
)
def test_a_region_reads_what_a_turned_index_of_symbolic_sizes_gives(read: Callable) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (read(x, torch.arange(2 * len(x)).view(2, -1) % len(x)) * 2 + 1).sum(1)

    jitted = forge.jit(function)
    for size in (4, 7, 9):
        x = torch.randn(size, size)
        torch.testing.assert_close(jitted(x), function(x))


@pytest.mark.parametrize("by", ["view", "reshape", "unflatten"])
def test_padding_follows_the_strides_of_a_batch_of_one(by: str) -> None:
    """It keeps the channels of an image adjacent. The stride of a batch of one decides whether they are, and torch
    gives views of tensors without values other strides of such dims."""
    cut = {
        "view": lambda x: x.view(1, 7, 4, 8),
        "reshape": lambda x: x.reshape(1, 7, 4, 8),
        "unflatten": lambda x: x.unflatten(2, (4, 8)),
    }[by]
    x, scale = torch.randn(1, 48, 10), torch.randn(1, 7, 4)

    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = x[:, :, :7].transpose(1, 2).split([32, 16], -1)[0]
        return F.pad(cut(rows) * scale.unsqueeze(3), (0, 0, 0, 0, 0, 1))

    result, expected = forge.jit(function, check="regions")(x, scale), function(x, scale)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


def test_an_index_of_symbolic_numbers_is_of_the_programs_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch warns about an expression with symbols that its environment does not know."""
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)

    def function(cache: torch.Tensor, new: torch.Tensor, position: int) -> torch.Tensor:
        cache[:, position : position + 1] = new
        return cache[:, : position + 1] * 2

    jitted, cache = forge.jit(function, cache=False), torch.zeros(2, 8, 4)
    for position in (2, 3, 4):
        new = torch.randn(2, 1, 4)
        torch.testing.assert_close(jitted(cache, new, position), function(cache.clone(), new, position))
    assert not caplog.records
