"""The helpers of the OpInfo tests: instances, copies of samples, comparison with eager."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import short_type
from forge.testing import OpInfo, Sample, all_opinfos
from tests.seeding import seed

EXECUTORS = {"torchex": "torch", "torchprims": "torch-prims"}
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

# torch.testing.assert_close's own (rtol, atol): a few units in the last place of the dtype.
TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}

NO_KERNEL = re.compile("\" not implemented for '")  # eager's error for a dtype without a kernel on a device
ALIGNED = 64  # elements: kernels do not distinguish larger alignments


def chosen_opinfos(config: pytest.Config) -> list[OpInfo]:
    """Return every OpInfo, or those that --op names. Raises pytest.UsageError for an unknown name, with similar
    ones."""
    infos = {info.name: info for info in all_opinfos()}
    names = config.getoption("--op")
    for name in names:
        if name not in infos:
            near = difflib.get_close_matches(name, infos, n=5)
            raise pytest.UsageError(f"--op {name}: no OpInfo has this name; near: {', '.join(near) or 'none'}")
    return [infos[name] for name in names] if names else list(infos.values())


def default_dtypes(info: OpInfo) -> list[torch.dtype]:
    """Return one float, one half precision, one integer and one complex dtype of the op's; the others are slow."""
    groups = (
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.int32, torch.uint8),
        (torch.complex64, torch.complex128),
    )
    found = [next((dtype for dtype in group if dtype in info.dtypes), None) for group in groups]
    return [dtype for dtype in found if dtype is not None] or list(info.dtypes[:1])


def main_dtype(info: OpInfo) -> torch.dtype:
    """Return the dtype for tests that do not depend on it."""
    return default_dtypes(info)[0]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def samples(info: OpInfo, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the op's samples, the same ones every time, except those that eager refuses because they are complex. No
    sample at all is a failure, as is one that eager refuses for another reason; refusals by a GPU have directives."""
    found = all_samples(info, device, dtype)
    if dtype.is_complex:
        found = [sample for sample in found if refusal(info, sample) is None]
    elif device == "cpu":
        fail_for_refused_samples(info, found)
    if not found:
        pytest.fail(f"OpInfo {info.name!r} yields no samples for {dtype} on {device}")
    yield from found


def all_samples(info: OpInfo, device: str, dtype: torch.dtype) -> list[Sample]:
    """Return the op's samples, the same ones every time."""
    seed(0)
    return list(info.samples(info, torch.device(device), dtype))


def refusal(info: OpInfo, sample: Sample) -> Exception | None:
    """Return eager's error for a sample, or None."""
    ours = copy_of(sample)
    seed(1)
    try:
        (info.reference or info.op)(*ours.args, **ours.kwargs)
    except Exception as error:
        return error
    return None


def fail_for_refused_samples(info: OpInfo, found: Sequence[Sample]) -> None:
    """Fail at the first sample that eager refuses for any reason but a missing kernel: it is an error of the OpInfo."""
    with torch.random.fork_rng(devices=[]):  # keep a test's random values unchanged
        refused = ((sample, refusal(info, sample)) for sample in found)
        for sample, error in refused:
            if error is not None and not NO_KERNEL.search(str(error)):
                pytest.fail(f"OpInfo {info.name!r}: eager refuses the sample {in_words(sample)}: {error!r}")


def in_words(sample: Sample) -> str:
    """Return a sample as text: `(f32[2, 3], dim=1)`."""
    args, kwargs = _pytree.tree_map(
        lambda leaf: UnquotedText(short_type(leaf)) if isinstance(leaf, torch.Tensor) else leaf,
        (sample.args, sample.kwargs),
    )
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


class UnquotedText(str):
    """A string whose repr is itself."""

    __slots__ = ()
    __repr__ = str.__str__


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest, in the order in which a trace takes them as inputs."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return the nest with `function` applied to its tensors."""
    return _pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in new memory with the same strides, expanded dims included, and the same alignment."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    reach = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.storage_offset() % ALIGNED
    memory = tensor.new_empty(offset + reach)
    memory[offset:] = tensor.as_strided((reach,), (1,)).detach()
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def copy_of(sample: Sample) -> Sample:
    """Return the sample with copied tensors."""
    args, kwargs = map_tensors(copied, (sample.args, sample.kwargs))
    return Sample(args, kwargs)


def run_eager(info: OpInfo, sample: Sample) -> Any:
    """Return the op's result in eager. Skip the test if eager has no kernel for the dtype on this device."""
    seed(1)
    try:
        return (info.reference or info.op)(*sample.args, **sample.kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if NO_KERNEL.search(str(error)):
            pytest.skip(f"eager has no kernel: {error}")
        raise


def tolerance(info: OpInfo, test: str, executor: str, device: str, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return (rtol, atol) of the op's own directive, or None."""
    for directive in info.directives:
        if directive.kind == "tolerance" and directive.applies(test, executor, device, dtype):
            return directive.tolerance
    return None


def directive_marks(
    info: OpInfo, test: str, executor: str | None, device: str, dtype: torch.dtype | None
) -> list[pytest.MarkDecorator]:
    """Return the marks of the op's own directives: skips and expected failures, each with its reason."""
    made = {"skip": pytest.mark.skip, "xfail": partial(pytest.mark.xfail, strict=True)}
    return [
        made[directive.kind](reason=directive.reason)
        for directive in info.directives
        if directive.kind in made and directive.applies(test, executor, device, dtype)
    ]


def assert_same(actual: Any, expected: Any, *, within: tuple[float, float] | None = None, stride: bool = False) -> None:
    """Check that values, shapes, dtypes, devices and the nest are the same; `within` widens the dtype's own
    tolerance."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"expected a tensor, got {actual!r}"
        rtol, atol = within or TOLERANCE.get(expected.dtype, (0, 0))
        torch.testing.assert_close(
            actual.detach(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True, check_stride=stride
        )
    elif isinstance(expected, (tuple, list)):
        assert isinstance(actual, (tuple, list)) and len(actual) == len(expected), f"expected {expected}, got {actual}"
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, within=within, stride=stride)
    else:
        assert type(actual) is type(expected), f"expected {expected!r}, got {actual!r}"
        assert actual == expected or (actual != actual and expected != expected)


def assert_same_flow(
    actual: Any, expected: Any, *, within: tuple[float, float] | None = None, stride: bool = False
) -> None:
    """Check that outputs, gradients, and inputs with a refused gradient are the same; `stride`: outputs have the same
    strides."""
    assert_same(actual.outputs, expected.outputs, within=within, stride=stride)
    assert actual.refused == expected.refused
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same(one, other, within=within)


def around(op: Callable) -> Callable:
    """Return the op between pointwise calls that change neither dtype nor range much."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _pytree.tree_map(_scaled, op(*args, **kwargs))

    return call


def _scaled(x: Any) -> Any:
    return x * 2 if isinstance(x, (torch.Tensor, TensorProxy)) and x.is_floating_point() else x


def assert_same_metadata(actual: Any, expected: Any, what: str = "") -> None:
    """Check that two tensors, or a proxy and a tensor, or nests of them, agree in shape, dtype and device."""
    if isinstance(expected, (tuple, list)):
        assert isinstance(actual, (tuple, list)) and len(actual) == len(expected), f"{what}: {actual} for {expected}"
        for one, other in zip(actual, expected, strict=True):
            assert_same_metadata(one, other, what)
    elif isinstance(expected, torch.Tensor):
        ours = tuple(actual.shape), actual.dtype, actual.device.type
        theirs = tuple(expected.shape), expected.dtype, expected.device.type
        assert ours == theirs, f"{what}: the metadata is {ours}, the real output {theirs}"


def gives_unspecified_values(trace: Trace) -> bool:
    """Return whether an output is uninitialized memory (torch.empty), whose metadata alone can be compared."""
    return any(
        Tag.UNINITIALIZED in maker.symbol.tags for maker in _makers(trace.bound_symbols, set(trace.output_names))
    )


def _makers(calls: Sequence[BoundSymbol], names: set[str]) -> Iterator[BoundSymbol]:
    for bound in calls:
        if not names.isdisjoint(bound.outputs):
            yield from _makers(bound.subsymbols, names) if bound.subsymbols else (bound,)
