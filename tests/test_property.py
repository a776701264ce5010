"""Shapes, strides, dtypes, broadcasting and keys drawn by hypothesis, against eager.

The elementwise operations are those of the OpInfos; the strategies for reductions and keys are defined here. Few
examples run by default, many under the `slow` marker; they are the same every time.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import assert_same, copied

from forge import torchlang
from forge.api.functional import Direct
from forge.testing import OpInfo, all_opinfos

FEW, MANY = 30, 1000
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
EXECUTORS = ("torch", "torch-prims")
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)

PROPERTIES: dict[str, tuple[st.SearchStrategy, Callable]] = {}


def prop(strategy: st.SearchStrategy) -> Callable:
    """Return a decorator that makes a function a property of everything that the strategy draws."""

    def register(function: Callable) -> Callable:
        PROPERTIES[function.__name__] = strategy, function
        return function

    return register


# tensors


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 4) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 4), max_size=max_dims)))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtypes: tuple = DTYPES) -> torch.Tensor:
    """Draw a tensor of the shape, in one of the layouts that callers may use: permuted, every other element."""
    dtype = draw(st.sampled_from(dtypes))
    torch.manual_seed(draw(st.integers(0, 3)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from((1, 1, 2))) for _ in shape]
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 4)}.get(dtype, (-3, 4))
    stored = [shape[dim] * steps[dim] for dim in order]
    base = torch.testing.make_tensor(stored, dtype=dtype, device="cpu", low=low, high=high)
    turned = base.permute([order.index(dim) for dim in range(len(shape))])
    return turned[tuple(slice(None, None, step) for step in steps)]


@st.composite
def broadcasting(draw: st.DrawFn, count: int, dtypes: tuple = DTYPES) -> list[torch.Tensor]:
    """Draw tensors whose shapes broadcast together: each drops leading dims and shrinks others to 1."""
    shape = draw(shapes())
    found = []
    for _ in range(count):
        kept = shape[draw(st.integers(0, len(shape))) :]
        found.append(draw(tensors(tuple(draw(st.sampled_from((length, length, 1))) for length in kept), dtypes)))
    return found


numbers = st.one_of(st.booleans(), st.integers(-4, 4), st.sampled_from((-2.5, -0.0, 0.5, 1.0, 3.75)))


# comparison


def own(args: tuple) -> list[Any]:
    """Return the arguments with copied tensors, including index tensors in keys."""
    return [
        copied(arg) if isinstance(arg, torch.Tensor) else tuple(own(arg)) if isinstance(arg, tuple) else arg
        for arg in args
    ]


def agrees(function: Callable, *args: Any) -> None:
    """Check that every executor has eager's results, changes and refusals."""
    theirs = own(args)
    try:
        expected, refused = function(*theirs), False
    except REFUSALS:
        expected, refused = None, True
    for executor in EXECUTORS:
        ours = own(args)
        if refused:
            with pytest.raises(REFUSALS):
                Direct(function, [executor])(*ours)
            continue
        assert_same(Direct(function, [executor])(*ours), expected)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


def agrees_in_gradient(function: Callable, x: torch.Tensor, *rest: Any) -> None:
    """Check that the gradient of a float64 tensor is eager's."""
    x = x.detach().requires_grad_()
    try:
        expected = function(x, *rest)
    except REFUSALS:
        return
    weights = torch.ones_like(expected).cumsum(0) if expected.ndim else torch.ones_like(expected)
    for executor in EXECUTORS:
        actual = Direct(function, [executor])(x, *rest)
        assert actual.requires_grad == expected.requires_grad
        if expected.requires_grad:
            (wanted,) = torch.autograd.grad(expected, x, weights, allow_unused=True, retain_graph=True)
            (found,) = torch.autograd.grad(actual, x, weights, allow_unused=True)
            assert_same(found, wanted)


# elementwise


ELEMENTWISE = ("elementwise", "limits", "special", "special_functions")  # families
STEPWISE = (
    "logaddexp",
    "logaddexp2",
    "logit",
    "sinc",
    "special_xlog1py",
    "xlogy",
)  # their steps round to half precision


def _is_elementwise(info: OpInfo) -> bool:
    """Return whether the operation's symbol is of an elementwise family; polynomials, which take few degrees, are
    excluded."""
    name = info.op.__name__
    functions = (info.op, getattr(torch, name, None), getattr(torch.Tensor, name, None))
    symbol = next(filter(None, map(torchlang.find, functions)), None)
    family = "" if symbol is None or symbol.body is None else symbol.body.__module__.removeprefix("forge.torchlang.")
    return family in ELEMENTWISE and name not in STEPWISE and "polynomial" not in name


@cache
def _elementwise() -> list[tuple[OpInfo, int]]:
    """Return the elementwise OpInfos that take one or two tensors and nothing else, with their number."""
    found = []
    for info in all_opinfos():
        if _is_elementwise(info) and not set(DTYPES).isdisjoint(info.dtypes):
            first = next(iter(info.samples(info, torch.device("cpu"), info.dtypes[0])))
            if len(first.args) <= 2 and not first.kwargs and all(isinstance(arg, torch.Tensor) for arg in first.args):
                found.append((info, len(first.args)))
    return found


@st.composite
def elementwise_calls(draw: st.DrawFn) -> tuple[OpInfo, list]:
    """Draw an operation and operands of its dtypes, which may differ; now and then one of two is a number."""
    info, count = draw(st.sampled_from(_elementwise()))
    operands: list[Any] = draw(broadcasting(count, tuple(dtype for dtype in DTYPES if dtype in info.dtypes)))
    if count == 2 and draw(st.integers(0, 3)) == 0:
        operands[draw(st.integers(0, 1))] = draw(numbers)
    return info, operands


@prop(elementwise_calls())
def elementwise(call: tuple[OpInfo, list]) -> None:
    info, operands = call
    agrees(info.op, *operands)


# reductions

REDUCTIONS = (torch.sum, torch.prod, torch.mean, torch.amax, torch.amin, torch.any, torch.all, torch.var, torch.std)
ALONG_A_DIM = (torch.argmax, torch.argmin, torch.cumsum, torch.cumprod, torch.softmax, torch.log_softmax)


@st.composite
def reductions(draw: st.DrawFn, dtypes: tuple = DTYPES) -> tuple[Callable, torch.Tensor]:
    """Draw a function of one tensor: a reduction with its dims and keepdim."""
    x = draw(tensors(draw(shapes()), dtypes))
    dims = st.integers(-x.ndim - (draw(st.integers(0, 9)) == 0), max(x.ndim - 1, 0))
    if draw(st.booleans()):
        function, dim = draw(st.sampled_from(ALONG_A_DIM)), draw(dims)
        assume(x.is_floating_point() or x.numel())  # eager takes the softmax of no integers only
        return lambda x: function(x, dim), x
    function, keepdim = draw(st.sampled_from(REDUCTIONS)), draw(st.booleans())
    if function is torch.prod:
        dim: Any = draw(dims)
    else:
        dim = draw(st.one_of(dims, st.lists(dims, min_size=1, max_size=3, unique=True).map(tuple)))
    return lambda x: function(x, dim, keepdim=keepdim), x


@prop(reductions())
def reduction(call: tuple[Callable, torch.Tensor]) -> None:
    function, x = call
    agrees(function, x)


@prop(reductions((torch.float64,)))
def gradient_of_a_reduction(call: tuple[Callable, torch.Tensor]) -> None:
    function, x = call
    agrees_in_gradient(lambda x: function(x) * 1.0, x)


# keys


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...], masks: bool = False) -> tuple:
    """Draw a key for a tensor of this shape: ints, slices, None, one Ellipsis, index tensors that broadcast, masks."""
    index_shape = draw(shapes(2).filter(lambda lengths: 0 not in lengths))
    front = draw(st.integers(0, len(shape)))
    ellipsis = draw(st.booleans())
    back = draw(st.integers(front, len(shape))) if ellipsis else len(shape)
    entries = [draw(_entry(length, index_shape, masks)) for length in shape[:front]]
    if ellipsis:
        entries += [Ellipsis, *[draw(_entry(length, index_shape, masks)) for length in shape[back:]]]
    for _ in range(draw(st.integers(0, 2))):
        entries.insert(draw(st.integers(0, len(entries))), None)
    return tuple(entries)


@st.composite
def _entry(draw: st.DrawFn, length: int, index_shape: tuple[int, ...], masks: bool) -> Any:
    """Draw a key's entry for one dim; now and then an int that is out of range."""
    kind = draw(st.sampled_from(("int", "slice", "slice", "tensor", "mask" if masks else "slice")))
    if kind == "int" and length:
        return draw(st.integers(-length, length - (draw(st.integers(0, 19)) > 0)))
    if kind == "tensor" and length:
        torch.manual_seed(draw(st.integers(0, 3)))
        return torch.randint(-length, length, tuple(draw(st.sampled_from((n, 1))) for n in index_shape))
    if kind == "mask":
        return torch.arange(length) % draw(st.integers(2, 3)) == 0
    return draw(slices(length))


@st.composite
def slices(draw: st.DrawFn, length: int) -> slice:
    bounds = st.one_of(st.none(), st.integers(-length - 2, length + 2))
    return slice(draw(bounds), draw(bounds), draw(st.sampled_from((None, 1, 1, 2, 3))))


@st.composite
def items(draw: st.DrawFn, dtypes: tuple = DTYPES) -> tuple[torch.Tensor, tuple]:
    x = draw(tensors(draw(shapes()), dtypes))
    return x, draw(keys(tuple(x.shape)))


@prop(items())
def getitem(item: tuple[torch.Tensor, tuple]) -> None:
    agrees(lambda x, key: x[key], *item)


@prop(items((torch.float64,)))
def gradient_of_getitem(item: tuple[torch.Tensor, tuple]) -> None:
    agrees_in_gradient(lambda x, key: x[key] * 1.0, *item)


@st.composite
def assignments(draw: st.DrawFn, dtypes: tuple = DTYPES) -> tuple[torch.Tensor, tuple, Any]:
    """Draw a tensor, a key, and a value that broadcasts to the keyed elements; no element is written with two
    values."""
    x = draw(tensors(draw(shapes(3)), dtypes))
    key = draw(keys(tuple(x.shape), masks=True))
    try:
        shown = x[key]
    except (IndexError, RuntimeError):
        return x, key, draw(numbers)
    if draw(st.booleans()) or any(isinstance(entry, torch.Tensor) and entry.dtype != torch.bool for entry in key):
        return x, key, draw(st.one_of(numbers, tensors((), (x.dtype,))))
    kept = tuple(shown.shape)[draw(st.integers(0, shown.ndim)) :]
    return x, key, draw(tensors(tuple(draw(st.sampled_from((n, 1))) for n in kept), (x.dtype,)))


def _assign(x: Any, key: tuple, value: Any) -> Any:
    x[key] = value
    return x * 1


@prop(assignments())
def setitem(assignment: tuple[torch.Tensor, tuple, Any]) -> None:
    agrees(_assign, *assignment)


@prop(assignments((torch.float64,)))
def gradient_through_setitem(assignment: tuple[torch.Tensor, tuple, Any]) -> None:
    agrees_in_gradient(lambda x, key, value: _assign(x * 2, key, value), *assignment)


# views and in-place changes

VIEWS: tuple[Callable, ...] = (
    lambda x, i: x.transpose(0, i % max(x.ndim, 1)) if x.ndim else x,
    lambda x, i: x.unsqueeze(i % (x.ndim + 1)),
    lambda x, i: x[i % 2 :] if x.ndim else x,
    lambda x, i: x[..., ::2] if x.ndim else x,
    lambda x, i: x.permute(*range(x.ndim - 1, -1, -1)),
    lambda x, i: x.squeeze(),
)
WRITES: tuple[Callable, ...] = (
    lambda x, y: x.mul_(2),
    lambda x, y: x.add_(y.sum()),
    lambda x, y: x.copy_(x * 3),
    lambda x, y: x.zero_(),
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Draw steps that view some handle or write through some handle, and two tensors to begin with."""
    steps = st.tuples(st.integers(0, 9), st.integers(0, len(VIEWS) - 1), st.booleans())
    x, y = (draw(tensors(draw(shapes(3)), (torch.float64,))) for _ in range(2))
    return draw(st.lists(steps, min_size=1, max_size=6)), x, y


def _program(steps: list) -> Callable:
    def run(x: Any, y: Any) -> Any:
        handles = [x * 1, y]
        for which, what, writes in steps:
            handle = handles[which % len(handles)]
            if writes:
                WRITES[what % len(WRITES)](handle, handles[0])
            else:
                handles.append(VIEWS[what](handle, which))
        return [handle * 1 for handle in handles]

    return run


@prop(programs())
def views_and_writes(program: tuple[list, torch.Tensor, torch.Tensor]) -> None:
    """Every handle has eager's values after any sequence of views and in-place changes."""
    steps, x, y = program
    agrees(_program(steps), x, y)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # eager warns, too
@pytest.mark.parametrize("count", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROPERTIES)
def test_agrees_with_eager(name: str, count: int) -> None:
    strategy, function = PROPERTIES[name]
    settings(max_examples=count)(given(strategy)(function))()
