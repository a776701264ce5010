"""Every OpInfo on every executor, device and dtype, against eager.

An id reads op-executor-device-dtype: `pytest "tests/test_ops.py::test_consistency[exp2-torchex-cpu-float32]"`, and
`pytest tests/test_ops.py --op exp2` runs everything about one op. One float, one half precision and one integer dtype
and two layouts run by default, of one op in three by its decomposition and in complex dtypes too; the others under the
`slow` marker.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import (
    DEVICES,
    EXECUTORS,
    assert_same,
    assert_same_metadata,
    chosen_opinfos,
    copied,
    copy_of,
    default_dtypes,
    directive_marks,
    gives_unspecified_values,
    main_dtype,
    map_tensors,
    run_eager,
    samples,
    short,
    tensors_in,
    tolerance,
)
from torch.utils import _pytree

import forge
from forge.api.functional import Compilation, Direct
from forge.capture.handles import handle_of
from forge.compiler.executable import Executable
from forge.ir import Proxy, Symbol, TensorProxy, Trace
from forge.ir.printing import DEL
from forge.ir.pytree import rename
from forge.testing import OpInfo, Sample
from tests.seeding import seed

Dtypes = Callable[[OpInfo], list[torch.dtype]]
EVERY = 3  # one op in so many runs by its decomposition by default, and in complex dtypes


# instances


def _all_dtypes(info: OpInfo) -> list[torch.dtype]:
    return list(info.dtypes)


def _one_dtype(info: OpInfo) -> list[torch.dtype]:
    return [main_dtype(info)]


def _double(info: OpInfo) -> list[torch.dtype]:
    """Return the dtypes in which a wrong gradient is not a rounding error."""
    return [info.precise, torch.complex128] if torch.complex64 in info.dtypes else [info.precise]


def _double_or_one_dtype(info: OpInfo) -> list[torch.dtype]:
    return _double(info) if info.gradient else [main_dtype(info)]


def _instances(metafunc: pytest.Metafunc, dtypes: Dtypes) -> Iterator[Any]:
    test = metafunc.function.__name__
    executors = {"torchex": "torch"} if test == "test_jit" else EXECUTORS
    for position, info in enumerate(chosen_opinfos(metafunc.config)):
        for label, executor in executors.items():
            usual = [main_dtype(info)] if test == "test_meta" else _usual(info, dtypes, executor)
            if position % EVERY:
                real = [dtype for dtype in usual if not dtype.is_complex]
                usual = [] if executor == "torch-prims" else real or usual
            for device in DEVICES:
                for dtype in dtypes(info):
                    slow = [] if dtype in usual else [pytest.mark.slow]
                    marks = [*directive_marks(info, test, executor, device, dtype), *slow]
                    yield pytest.param(
                        info, executor, device, dtype, marks=marks, id=f"{info.name}-{label}-{device}-{short(dtype)}"
                    )


def _halves(info: OpInfo) -> list[torch.dtype]:
    wanted = (torch.bfloat16, torch.float16) if info.gradient else ()
    return [dtype for dtype in wanted if dtype in info.dtypes]


def _usual(info: OpInfo, dtypes: Dtypes, executor: str) -> list[torch.dtype]:
    """Return the dtypes whose tests are not slow: one for decompositions, none if one executor stands for both."""
    if executor == "torch-prims" and dtypes is _one_dtype:
        return []
    if executor == "torch-prims" or dtypes in (_double_or_one_dtype, _halves):
        return [main_dtype(info)] if dtypes is _all_dtypes else dtypes(info)[:1]
    return default_dtypes(info) if dtypes is _all_dtypes else dtypes(info)


DTYPES_OF: dict[str, Dtypes] = {
    "test_consistency": _all_dtypes,
    "test_meta": _all_dtypes,  # by default one: consistency compares dtypes and shapes, too
    "test_gradient": _double,
    "test_half_gradient": _halves,
    "test_jit": _double_or_one_dtype,
    "test_printing": _one_dtype,
    "test_strided": _one_dtype,
    "test_inputs_unchanged": _one_dtype,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "executor" in metafunc.fixturenames:
        dtypes = DTYPES_OF[metafunc.function.__name__]
        metafunc.parametrize("info,executor,device,dtype", list(_instances(metafunc, dtypes)))
    elif "info" in metafunc.fixturenames:
        test, infos = metafunc.function.__name__, chosen_opinfos(metafunc.config)
        devices = [
            pytest.param(
                info, device, marks=directive_marks(info, test, None, device, None), id=f"{info.name}-{device}"
            )
            for info in infos
            for device in DEVICES
        ]
        metafunc.parametrize("info,device", devices)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device: the cuda instances are not generated"
)
def test_cuda_instances_exist_where_there_is_cuda() -> None:
    assert DEVICES == ("cpu", "cuda")


# running


def _compile(info: OpInfo, executor: str, sample: Sample) -> Compilation:
    return Direct(info.op, executors=[executor]).compile(sample.args, sample.kwargs)


def _inputs(sample: Sample) -> list[torch.Tensor]:
    return tensors_in((sample.args, sample.kwargs))


def _call(executable: Executable, sample: Sample) -> Any:
    seed(1)
    return executable.call(*_inputs(sample))


def _generator_state(device: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


# tests


def test_consistency(info: OpInfo, executor: str, device: str, dtype: torch.dtype) -> None:
    """The result is eager's in values, shape, dtype and device, and so is the random generator afterwards."""
    within = tolerance(info, "test_consistency", executor, device, dtype)
    for sample in samples(info, device, dtype):
        ours = copy_of(sample)
        expected = run_eager(info, sample)
        state = _generator_state(device)
        executable, report = _compile(info, executor, ours)
        actual = _call(executable, ours)
        assert torch.equal(_generator_state(device), state), "the random generator is not where eager leaves it"
        if gives_unspecified_values(report.traces[0]):
            assert_same_metadata(actual, expected)
        else:
            # the torch executor runs torch's own function, whose strides are to survive; a decomposition's may differ
            assert_same(actual, expected, within=within, stride=executor == "torch" and info.reference is None)


@pytest.mark.one_in(4)
def test_meta(info: OpInfo, executor: str, device: str, dtype: torch.dtype) -> None:
    """Every call's metadata matches its real result, from the inputs to the result."""
    for sample in samples(info, device, dtype):
        ours = copy_of(sample)
        expected = run_eager(info, sample)
        trace = _compile(info, executor, ours)[1].traces[-1]
        assert_same_metadata(_interpret(trace, _inputs(ours)), expected, info.name)


def _interpret(trace: Trace, inputs: list[torch.Tensor]) -> Any:
    """Return the result of a claimed trace, run call by call; each call's metadata is compared with its result."""
    env: dict[str, Any] = dict(zip(trace.input_names, inputs, strict=True)) | dict(trace.constants)
    for bound in trace.bound_symbols:
        if bound.symbol is DEL:
            continue
        args, kwargs = rename(bound.args, env), rename(bound.kwargs, env)
        result = bound.symbol.op(*args, **kwargs)
        if bound.outputs:
            assert_same_metadata(bound.output, result, bound.symbol.id)
            _bind(bound.output, result, env)
    return rename(trace.output, env)


def _bind(output: Any, result: Any, env: dict[str, Any]) -> None:
    if isinstance(output, Proxy):
        env[output.name] = result
    elif isinstance(output, (tuple, list)):
        for one, other in zip(output, result, strict=True):
            _bind(one, other, env)


def test_gradient(info: OpInfo, executor: str, device: str, dtype: torch.dtype) -> None:
    """Gradients in float64 and complex128 are eager's: their values, and the inputs and outputs without gradients.

    The torch executor's own rules run through forge.vjp, too; torch-prims runs the symbols' own rules and those of
    decompositions.
    """
    within = tolerance(info, "test_gradient", executor, device, dtype)
    flowed = False
    for sample in samples(info, device, dtype):
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        eager = flow_of(info.reference or info.op, sample, wanted, changed)
        if not wanted or eager.refused:
            continue
        flowed = flowed or any(eager.requires_grad)
        ours = flow_of(Direct(info.op, executors=[executor]), sample, wanted, changed)
        assert_same_flow(ours, eager, within)
        if executor == "torch" and any(eager.requires_grad) and not changed:
            _assert_vjp(info, sample, wanted, eager, within)
    assert flowed == info.gradient, (
        f"OpInfo({info.name!r}) says gradient={info.gradient}, but in eager "
        f"{'some output has' if flowed else 'no output of any sample has'} a gradient"
    )


@pytest.mark.parametrize("every", [pytest.param(False, id="one"), pytest.param(True, id="all", marks=pytest.mark.slow)])
@pytest.mark.one_in(2)
def test_half_gradient(info: OpInfo, executor: str, device: str, dtype: torch.dtype, every: bool) -> None:
    """Results and gradients in half precision are as near to those of `precise` as eager's, up to the dtype's rounding.

    A random op has no reference in another dtype: it is compared with eager.
    """
    for sample in samples(info, device, dtype) if every else [next(samples(info, device, dtype))]:
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        state = _generator_state(device)
        eager = flow_of(info.reference or info.op, sample, wanted, changed)
        if eager.refused:
            continue
        ours = flow_of(Direct(info.op, executors=[executor]), sample, wanted, changed)
        if torch.equal(_generator_state(device), state):
            exact = flow_of(info.reference or info.op, _as_precise(info, sample, dtype), wanted, changed)
            _assert_as_near(_values(ours), _values(eager), _values(exact), dtype)
        else:
            assert_same_flow(ours, eager, None)


def _as_precise(info: OpInfo, sample: Sample, dtype: torch.dtype) -> Sample:
    """Return the same numbers in float64, or the op's widest dtype; a dtype named in the call becomes that one."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(info.precise) if leaf.dtype == dtype else leaf
        return info.precise if leaf is dtype else leaf

    return Sample(_pytree.tree_map(double, sample.args), _pytree.tree_map(double, sample.kwargs))


def _values(flow: "_Flow") -> list[torch.Tensor | None]:
    return [*tensors_in(flow.outputs), *flow.gradients]


def _assert_as_near(ours: list, eager: list, exact: list, dtype: torch.dtype) -> None:
    """Check that each tensor's largest error is at most twice eager's, plus the rounding of a sum of as many terms as
    it may have: the elements of all tensors for each of its own."""
    total = sum(value.numel() for value in exact if value is not None)
    for one, other, reference in zip(ours, eager, exact, strict=True):
        assert (one is None) == (other is None)
        if one is None or not one.numel():
            continue
        assert one.dtype == other.dtype and one.shape == other.shape
        if not one.is_floating_point():
            assert torch.equal(one, other)
            continue
        terms = max(1, total // one.numel())
        size = reference.double().abs().nan_to_num(posinf=0.0).max()
        rounding = torch.finfo(dtype).eps * terms * size
        error, eagers = _error(one, reference), _error(other, reference)
        assert error <= 2 * eagers + rounding, f"off by {error}, eager by {eagers}, {terms} terms round by {rounding}"


def _error(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the largest distance, ignoring elements whose reference is not finite, or not representable in the
    dtype."""
    value, reference = value.detach().double(), reference.detach().double()
    return (value - reference).where(value.isfinite() & reference.isfinite(), 0).abs().max()


class _Flow:
    """The results of a function, the outputs that require a gradient, and the gradients of its inputs.

    `refused` is the reason why eager has no derivative, if it detects that only in the backward.
    """

    def __init__(self, outputs: Any, gradients: list[torch.Tensor | None], refused: str | None = None) -> None:
        self.outputs = outputs
        self.requires_grad = [output.requires_grad for output in tensors_in(outputs)]
        self.gradients = gradients
        self.refused = refused


class Inputs:
    """A copy of a sample with leaves that require gradients at some positions.

    An input that eager changes is passed as a clone of its leaf, because a leaf cannot be changed in place.
    """

    def __init__(self, sample: Sample, wanted: list[int], changed: list[int]) -> None:
        fresh = copy_of(sample)
        tensors = _inputs(fresh)
        self.leaves = [tensors[i].requires_grad_() for i in wanted]
        given = {id(tensors[i]): tensors[i].clone() for i in wanted if i in changed}
        args, kwargs = map_tensors(lambda tensor: given.get(id(tensor), tensor), (fresh.args, fresh.kwargs))
        self.sample = Sample(args, kwargs)


def changed_inputs(info: OpInfo, sample: Sample) -> list[int]:
    """Return the positions of the inputs that eager changes."""
    before, after = copy_of(sample), copy_of(sample)
    run_eager(info, after)
    pairs = zip(_inputs(before), _inputs(after), strict=True)
    return [i for i, (one, other) in enumerate(pairs) if other._version or not _equal(one, other)]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def differentiable_inputs(info: OpInfo, sample: Sample, changed: list[int]) -> list[int]:
    """Return the positions of the float inputs that eager accepts with a gradient."""
    floats = [i for i, tensor in enumerate(_inputs(sample)) if tensor.is_floating_point() or tensor.is_complex()]
    if _accepts_gradients(info, sample, floats, changed):
        return floats
    return [i for i in floats if _accepts_gradients(info, sample, [i], changed)]


def _accepts_gradients(info: OpInfo, sample: Sample, wanted: list[int], changed: list[int]) -> bool:
    try:
        run_eager(info, Inputs(sample, wanted, changed).sample)
    except (RuntimeError, NotImplementedError):  # no derivative for this argument, a buffer that is written
        return False
    return True


def flow_of(function: Callable, sample: Sample, wanted: list[int], changed: list[int]) -> _Flow:
    inputs = Inputs(sample, wanted, changed)
    seed(1)
    outputs = function(*inputs.sample.args, **inputs.sample.kwargs)
    flowing = [output for output in tensors_in(outputs) if output.requires_grad]
    if not flowing:
        return _Flow(outputs, [None] * len(inputs.leaves))
    try:
        gradients = torch.autograd.grad(flowing, inputs.leaves, _cotangents(flowing), allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if re.search(NOT_IMPLEMENTED, str(error)):
            return _Flow(outputs, [None] * len(inputs.leaves), refused=str(error))
        raise
    return _Flow(outputs, list(gradients))


# no formula, no kernel for the dtype, or a complex gradient for a real input (of where and of setitem)
# or one that depends on the phase of a vector, or cuDNN keeps nothing for it in evaluation
NOT_IMPLEMENTED = (
    r"derivative for .* is not implemented|\" not implemented for '|input_is_complex == grad_is_complex|ill-defined"
    "|cudnn RNN backward can only be called in training mode"
)


def _cotangents(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator(outputs[0].device).manual_seed(2)
    return [
        torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator) for output in outputs
    ]


def assert_same_flow(ours: _Flow, eager: _Flow, within: tuple[float, float] | None) -> None:
    assert ours.requires_grad == eager.requires_grad, (
        f"the outputs' requires_grad is {ours.requires_grad}, in eager {eager.requires_grad}"
    )
    found = [gradient is not None for gradient in ours.gradients]
    expected = [gradient is not None for gradient in eager.gradients]
    assert found == expected, f"which inputs get a gradient: {found}, in eager {expected}"
    assert_same(ours.outputs, eager.outputs, within=within)
    for one, other in zip(ours.gradients, eager.gradients, strict=True):
        if other is not None:
            assert_same(one, other, within=within)


@pytest.mark.parametrize(
    "dynamic", [pytest.param(False, id="static"), pytest.param(True, id="dynamic", marks=pytest.mark.slow)]
)
@pytest.mark.one_in(2)
def test_jit(info: OpInfo, executor: str, device: str, dtype: torch.dtype, dynamic: bool) -> None:
    """The first sample through forge.jit, Dynamo included: nothing opaque, nothing in eager; outputs and gradients.

    The same holds with symbolic shapes, which every meta has to support; numbers are symbolic, too, if Dynamo supports
    them.
    """
    within = tolerance(info, "test_jit", executor, device, dtype)
    sample = next(each for each in samples(info, device, dtype) if _counts(each, dtype))
    changed = changed_inputs(info, sample)
    wanted = differentiable_inputs(info, sample, changed) if info.gradient else []
    eager = flow_of(info.reference or info.op, sample, wanted, changed)
    if eager.refused:
        wanted = []
        eager = flow_of(info.reference or info.op, sample, wanted, changed)
    options = {"executors": [executor], "strict": True, "fullgraph": True, "dynamic": dynamic}
    jitted = forge.jit(info.op, **options)
    try:
        ours = flow_of(jitted, sample, wanted, changed)
    except (*NOT_SYMBOLIC, RuntimeError) as error:
        if not dynamic:
            raise
        if any(text in str(error) for text in NO_METADATA):
            pytest.skip(f"torch has no symbolic metadata of it: {error}")
        if not isinstance(error, NOT_SYMBOLIC):
            raise
        jitted = forge.jit(_without_numbers(info, sample), **options)
        with torch._dynamo.config.patch(specialize_float=True):
            ours = flow_of(lambda *args, **kwargs: jitted(tensors_in((args, kwargs))), sample, wanted, changed)
    torch._dynamo.reset()
    assert not handle_of(jitted).eager, "forge.jit ran it in eager"
    if gives_unspecified_values(forge.trace(info.op, *sample.args, **sample.kwargs)):
        assert_same_metadata(ours.outputs, eager.outputs)
    else:
        assert_same_flow(ours, eager, within)


def _counts(sample: Sample, dtype: torch.dtype) -> bool:
    """Return whether the sample tests its op: eager takes empty complex tensors where it takes no others."""
    return not dtype.is_complex or all(tensor.numel() for tensor in _inputs(sample))


NOT_SYMBOLIC = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError, forge.StrictError)

NO_METADATA = (
    "does not support symbolic shapes",
    "Operator does not support running with fake tensors",
    "Cannot call numel() on tensor with symbolic sizes",
)


def _without_numbers(info: OpInfo, sample: Sample) -> Callable:
    """Return the op as a function of a list of its tensors, with all other arguments constant."""

    def call(tensors: list) -> Any:
        given = iter(tensors)

        def fill(tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                return next(given)
            if type(tree) in (tuple, list):
                return type(tree)([fill(item) for item in tree])
            return {key: fill(item) for key, item in tree.items()} if isinstance(tree, dict) else tree

        return info.op(*fill(sample.args), **fill(sample.kwargs))

    return call


def _assert_vjp(
    info: OpInfo, sample: Sample, wanted: list[int], eager: _Flow, within: tuple[float, float] | None
) -> None:
    """Check forge.vjp of the op as a function of its differentiable inputs."""
    fresh = copy_of(sample)
    inputs = _inputs(fresh)

    def function(*primals: Any) -> Any:
        given = iter(primals)
        positions = iter(range(len(inputs)))

        def choose(tensor: torch.Tensor) -> Any:
            return next(given) if next(positions) in wanted else tensor

        args, kwargs = map_tensors(choose, (fresh.args, fresh.kwargs))
        result = info.op(*args, **kwargs)
        return _leaves(result)

    seed(1)
    outputs, pullback = forge.vjp(function, *[tensor for i, tensor in enumerate(inputs) if i in wanted])
    weights = iter(_cotangents([output for output, flows in zip(outputs, eager.requires_grad, strict=True) if flows]))
    cotangents = [
        next(weights) if flows else torch.zeros_like(output)
        for output, flows in zip(outputs, eager.requires_grad, strict=True)
    ]
    gradients = pullback(*cotangents)
    for one, other in zip(gradients, eager.gradients, strict=True):
        assert_same(one, torch.zeros_like(one) if other is None else other, within=within)


def _leaves(tree: Any) -> list[Any]:
    """Return the tensors, or their proxies, of a nest."""
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree] if isinstance(tree, (TensorProxy, torch.Tensor)) else []


def test_errors(info: OpInfo, device: str) -> None:
    """A wrong call raises the right type with the right message, and torch raises the same type."""
    found = [] if info.errors is None else list(info.errors(info, torch.device(device)))
    assert found, f"OpInfo {info.name!r} has no error sample: give errors= in its registration"
    for error in found:
        call = f"{info.name}{error.sample.args}{error.sample.kwargs}"
        if not error.stricter:
            with pytest.raises(error.error):
                (info.reference or info.op)(*copy_of(error.sample).args, **copy_of(error.sample).kwargs)
                wanted = "say why forge does not, with ErrorSample(…, stricter=…)"
                pytest.fail(f"torch accepts {call}: {wanted}", pytrace=False)
        with pytest.raises(error.error, match=error.match):
            forge.trace(info.op, *error.sample.args, **error.sample.kwargs)
            pytest.fail(f"forge accepts {call}", pytrace=False)


@pytest.mark.one_in(3)
def test_printing(info: OpInfo, executor: str, device: str, dtype: torch.dtype) -> None:
    """The text of a claimed trace is Python code with the same result, and is reproducible."""
    within = tolerance(info, "test_printing", executor, device, dtype) or (0, 0)
    for sample in samples(info, device, dtype):
        ours, again = copy_of(sample), copy_of(sample)
        executable, report = _compile(info, executor, ours)
        trace = report.traces[-1]
        text = str(trace)
        assert text == str(trace)
        scope: dict[str, Any] = {}
        exec(text, scope)
        expected = _call(executable, ours)
        seed(1)
        actual = scope[trace.name](*_inputs(again))
        if gives_unspecified_values(report.traces[0]):
            assert_same_metadata(actual, expected)
        else:
            assert_same(actual, expected, within=within, stride=True)


def _mark_layout(
    request: pytest.FixtureRequest, info: OpInfo, executor: str, device: str, dtype: torch.dtype, layout: str
) -> None:
    """Apply the op's directives for one layout."""
    for mark in directive_marks(info, f"test_strided[{layout}]", executor, device, dtype):
        if mark.name == "skip":
            pytest.skip(mark.kwargs["reason"])
        request.applymarker(mark)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: copied(x.transpose(0, -1).contiguous()).transpose(0, -1),
    "expanded": lambda x: copied(x[:1]).expand(x.shape) if x.shape[0] else x,
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x,
    "every other": lambda x: torch.stack([x, x], -1)[..., 1],
}


@pytest.mark.parametrize(
    "layout",
    ["transposed", "expanded", *(pytest.param(each, marks=pytest.mark.slow) for each in ("offset", "every other"))],
)
@pytest.mark.one_in(5)
def test_strided(
    info: OpInfo, executor: str, device: str, dtype: torch.dtype, layout: str, request: pytest.FixtureRequest
) -> None:
    """Transposed, expanded, offset and strided inputs have eager's result; those that eager refuses are left out."""
    _mark_layout(request, info, executor, device, dtype, layout)
    within = tolerance(info, "test_strided", executor, device, dtype)
    for sample in samples(info, device, dtype):
        args, kwargs = map_tensors(lambda x: LAYOUTS[layout](x) if x.ndim else x, (sample.args, sample.kwargs))
        strided = Sample(args, kwargs)
        ours = copy_of(strided)
        try:
            expected = run_eager(info, strided)
        except RuntimeError:  # a view of a transposed input, a write into an expanded one, a singular matrix
            continue
        executable, report = _compile(info, executor, ours)
        actual = _call(executable, ours)
        if gives_unspecified_values(report.traces[0]):
            assert_same_metadata(actual, expected)
        else:
            assert_same(actual, expected, within=within)


@pytest.mark.one_in(2)
def test_inputs_unchanged(info: OpInfo, executor: str, device: str, dtype: torch.dtype) -> None:
    """No input is modified except those that eager modifies, in the same way."""
    for sample in samples(info, device, dtype):
        ours = copy_of(sample)
        executable, _ = _compile(info, executor, ours)
        run_eager(info, sample)
        _call(executable, ours)
        for one, other in zip(_inputs(ours), _inputs(sample), strict=True):
            assert_same(one, other)


def test_covers(info: OpInfo, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples call the symbol of the op and those in `symbols`; an identity is called, but not recorded."""
    claimed = {*info.symbols}
    own = forge.torchlang.find(info.op)
    if own is not None:
        claimed.add(own.id)
    met: set[str] = set()
    call = Symbol.__call__

    def noted(symbol: Symbol, *args: Any, **kwargs: Any) -> Any:
        met.add(symbol.id)
        return call(symbol, *args, **kwargs)

    monkeypatch.setattr(Symbol, "__call__", noted)
    for dtype in default_dtypes(info):
        if directive_marks(info, "test_covers", None, device, dtype):
            continue
        for sample in samples(info, device, dtype):
            forge.trace(info.op, *sample.args, **sample.kwargs)
    assert claimed <= met, f"OpInfo {info.name!r} claims {sorted(claimed - met)}, but no sample calls them"
