"""Each patch of torch is needed: a program that is correct with it is not correct without it.

A test that fails with "is no longer needed" means that this torch no longer needs the patch: its `before` has to name
this version. The test applies to each version that forge supports; with a newer one, it is an xfail.
"""

import importlib
import pkgutil
import random
import shutil
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import forge
from forge import torch_internals
from forge.compiler import region_artifacts
from forge.executors import inductorex
from forge.torch_internals.dynamo import get_compilation_metrics
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.patch import PATCHES, Patch, Scope
from forge.torch_internals.versions import NEWEST, TORCH

for _module in pkgutil.walk_packages(torch_internals.__path__, f"{torch_internals.__name__}."):
    importlib.import_module(_module.name)  # otherwise the patches of Inductor are imported with the first region

PROBES: dict[str, Callable[[], bool]] = {}


def probe(*names: str) -> Callable:
    """Register a function that returns whether a program is correct, for the patches of these names."""

    def register(function: Callable[[], bool]) -> Callable[[], bool]:
        PROBES.update(dict.fromkeys(names, function))
        return function

    return register


def _jit(function: Callable, **options: object) -> Callable:
    return forge.jit(function, executors=["torch"], cache=False, **options)


class _Two(torch.autograd.Function):
    """A function with two outputs; a missing gradient is None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, first, second):
        return first if second is None else first + 100


class _Tripled(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_ones(5)


class _Holder:
    """An object without attributes of its own, and with a method."""

    def scale(self, x):
        return x + 1


@probe("FunctionCtx.set_materialize_grads")
def a_gradient_that_is_not_there_is_none() -> bool:
    x = torch.ones(3, requires_grad=True)
    _jit(lambda x: _Two.apply(x)[0])(x).sum().backward()
    return torch.equal(x.grad, torch.ones(3))


@probe("AutogradFunctionVariable.call_apply")
def a_function_keeps_its_backward_in_torch_func() -> bool:
    found = _jit(lambda x: torch.func.grad(lambda y: _Tripled.apply(y).sum())(x))(torch.ones(3))
    return torch.equal(found, torch.full((3,), 3.0))


@probe("AutogradFunctionApplyVariable.rewire_bwd_graph_outputs")
def a_wrong_backward_raises_what_torch_does() -> bool:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="returned an invalid gradient"):
        _jit(_Wrong.apply)(x).sum().backward()
    return True


@probe("TensorVariable.method_requires_grad_")
def an_intermediate_tensor_may_require_gradients() -> bool:
    jitted = _jit(lambda x, y: ((x * 2).requires_grad_() * y).sum())
    jitted(torch.ones(3), torch.ones(3, requires_grad=True))
    explanation = forge.explain(jitted)
    return explanation.graphs == 1 and not explanation.graph_breaks and not explanation.eager


@probe("SetAttrBuiltinVariable._call_setattr")
def an_intermediate_tensor_may_be_set_to_require_gradients() -> bool:
    def program(x, y):
        h = x * 2
        h.requires_grad = True
        return (h * y).sum()

    jitted = _jit(program)
    jitted(torch.ones(3), torch.ones(3, requires_grad=True))
    explanation = forge.explain(jitted)
    return explanation.graphs == 1 and not explanation.graph_breaks and not explanation.eager


@probe("TensorVariable.call_method")
def a_shape_that_changes_in_place_is_seen() -> bool:
    def turned(x):
        y = x * 1
        y.t_()
        return y * 2, y.shape[0]

    x = torch.arange(6.0).reshape(2, 3)
    (got, rows), (expected, _) = _jit(turned)(x), turned(x)
    return rows == 3 and torch.equal(got, expected) and got.stride() == expected.stride()


@probe("TensorVariable.var_getattr", "TensorVariable.tp_getattro_impl")
def a_leaf_is_told_from_another_tensor() -> bool:
    jitted = _jit(lambda x: x + 1 if x.is_leaf else x - 1)
    leaf = torch.ones(3, requires_grad=True)
    return torch.equal(jitted(leaf), leaf + 1) and torch.equal(jitted(leaf * 1), leaf * 1 - 1)


@probe("TorchInGraphFunctionVariable.call_function")
def a_setting_of_the_process_is_set_by_each_call() -> bool:
    def sets(x):
        torch.set_default_dtype(torch.float64)
        return x + 1

    jitted, found = _jit(sets), []
    try:
        for _ in range(2):
            torch.set_default_dtype(torch.float32)
            jitted(torch.ones(2))
            found.append(torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    return found == [torch.float64] * 2


@probe("torch._dynamo.utils.iter_contains", "torch._dynamo.variables.lists.iter_contains")
def a_length_is_found_among_numbers() -> bool:
    jitted = _jit(lambda x: x + 1 if 3 in [x.shape[0], 70] else x - 1, dynamic=True)
    x = torch.ones(3, 4)
    return torch.equal(jitted(x), x + 1)


@probe("UserMethodVariable.call_function")
def a_method_that_is_patched_later_is_used() -> bool:
    kind = type("_Own", (_Holder,), {"scale": lambda self, x: x + 1})
    holder = kind()
    jitted = _jit(lambda x: holder.scale(x))
    x = torch.ones(3)
    first = jitted(x)
    kind.scale = lambda self, x: x + 2
    return torch.equal(first, x + 1) and torch.equal(jitted(x), x + 2)


@probe("UnspecializedNNModuleVariable.call_function")
def a_forward_that_is_patched_later_is_used() -> bool:
    kind = type("_Own", (torch.nn.Module,), {"forward": lambda self, x: x + 1})
    model = torch.nn.Sequential(kind())
    jitted = _jit(model)
    x = torch.ones(3)
    first = jitted(x)
    kind.forward = lambda self, x: x + 2
    return torch.equal(first, x + 1) and torch.equal(jitted(x), x + 2)


@probe("RandomVariable.call_method")
def a_generator_of_the_caller_draws_its_next_number() -> bool:
    mine, other = random.Random(1), random.Random(1)
    jitted = _jit(lambda x: x * mine.random())
    x = torch.ones(2)
    return all(torch.equal(jitted(x), x * other.random()) for _ in range(3))


@probe("LoggingLoggerVariable.call_method")
def what_is_logged_breaks_no_graph() -> bool:
    import logging

    logger = logging.getLogger("tests.patches")

    def logged(x):
        y = x + 1
        logger.info("half way")
        return y * 2

    jitted = _jit(logged)
    jitted(torch.ones(2))
    return not forge.explain(jitted).graph_breaks


@probe("SkipFunctionVariable.call_function")
def a_warning_breaks_no_graph() -> bool:
    def warned(x):
        warnings.warn("half way", stacklevel=1)
        return x * 2

    jitted = _jit(warned)
    with warnings.catch_warnings(action="ignore"):
        jitted(torch.ones(2))
    return not forge.explain(jitted).graph_breaks


@probe("torch._dynamo.utils.run_node")
def tensors_in_a_sequence_as_an_index_break_the_graph() -> bool:
    jitted = _jit(lambda x, i, j: x.sin()[:, (i, j)].cos())
    jitted(torch.ones(2, 3), torch.tensor(0), torch.tensor(2))
    return forge.explain(jitted).graphs == 2


@probe("torch._dynamo.utils.warn_once")
def dynamo_does_not_warn_of_what_explain_tells() -> bool:
    import os

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _jit(lambda x: (x + 1) * (os.getppid() > 0))(torch.ones(2))
    return not any("does not know how to trace" in str(each.message) for each in seen)


_HOLDERS = (_Holder, lambda: torch.nn.Linear(2, 2), lambda: lambda: None, lambda: types.ModuleType("made_here"))


def _sees_what_comes_later(function: Callable) -> bool:
    """Return whether `function` sees a new attribute of an object, a torch module, a function and a Python module.
    `function` returns its argument if the attribute is missing."""
    return all(sees(function, make) for sees in (_sees_what_is_set, _sees_what_the_program_sets) for make in _HOLDERS)


def _sees_what_is_set(function: Callable, make: Callable) -> bool:
    holder, x = make(), torch.ones(3)
    jitted = _jit(lambda x: function(holder, x))
    before = jitted(x)
    holder.count = 5
    return torch.equal(before, x) and torch.equal(jitted(x), function(holder, x))


def _sees_what_the_program_sets(function: Callable, make: Callable) -> bool:
    def sets(holder, x):
        found = function(holder, x)
        if found is x:
            holder.count = 5
        return found + 0

    holder, other, x = make(), make(), torch.ones(3)
    jitted = _jit(lambda x: sets(holder, x))
    return all(torch.equal(jitted(x), sets(other, x)) for _ in range(2))


@probe("GetAttrBuiltinVariable._call_getattr")
def an_attribute_with_a_default_that_comes_later_is_seen() -> bool:
    def read(holder, x):
        count = getattr(holder, "count", None)
        return x if count is None else x * count

    return _sees_what_comes_later(read)


@probe("HasAttrBuiltinVariable.call_function")
def an_attribute_that_comes_later_is_there() -> bool:
    return _sees_what_comes_later(lambda holder, x: x + 1 if hasattr(holder, "count") else x)


@probe("torch._dynamo.symbolic_convert.generic_getattr")
def an_attribute_that_is_caught_comes_later() -> bool:
    def read(holder, x):
        try:
            return x * holder.count
        except AttributeError:
            return x

    return _sees_what_comes_later(read)


@probe("InliningInstructionTranslator.get_globals_source_and_value")
def globals_of_code_without_a_module_are_its_own() -> bool:
    names = types.ModuleType("that_nobody_imports").__dict__
    exec("FACTOR = 2\ndef scaled(x): return x * FACTOR", names)
    scaled = names["scaled"]
    jitted = _jit(lambda x: scaled(x) + 1)
    right = torch.equal(jitted(torch.ones(3)), torch.full((3,), 3.0))
    return right and not forge.explain(jitted).graph_breaks


@probe("torch._dynamo.symbolic_convert._detect_and_normalize_assert_statement")
def an_assert_of_a_count_holds_for_each() -> bool:
    names: dict = {}  # pytest rewrites the asserts of a test's module
    exec("def some(x):\n    n = x.nonzero().shape[0]\n    assert n >= 3, 'too few'\n    return x + n", names)
    jitted = _jit(names["some"], fullgraph=True)
    jitted(torch.ones(4))
    with pytest.raises(AssertionError, match="too few"):
        jitted(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    return True


@probe("TensorVariable.as_python_constant")
def a_layer_that_is_never_dropped_breaks_no_graph() -> bool:
    jitted = _jit(lambda x: x if torch.rand([]) < 0.0 else x * 2)
    return jitted(torch.ones(2)).tolist() == [2.0, 2.0] and not forge.explain(jitted).graph_breaks


@probe("InstructionTranslatorBase._format_value")
def a_length_in_a_message_is_that_of_each_call() -> bool:
    def some(x, y):
        count = y.nonzero().shape[0]
        torch._check(count < 3, lambda: f"{x.shape[0]} rows")
        return x + count

    jitted = _jit(some, fullgraph=True, dynamic=True)
    for rows in (4, 5):
        jitted(torch.ones(rows), torch.ones(2))
    with pytest.raises(RuntimeError, match="6 rows"):
        jitted(torch.ones(6), torch.ones(3))
    return forge.explain(jitted).graphs == 1


@probe("torch.utils.swap_tensors")
def a_folded_weight_can_be_swapped() -> bool:
    weight, x = torch.randn(3, 3), torch.ones(2, 3)
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    holder.forward = lambda x: x @ (holder.weight * 2).t()
    jitted = _jit(holder, freeze=True)
    with torch.no_grad():
        jitted(x)
        torch.utils.swap_tensors(holder.weight, torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False))
        return torch.equal(jitted(x), holder(x))


def _sees_a_write(write: Callable[[torch.nn.Parameter], None]) -> bool:
    """Return whether a folded weight, only some elements of which are compared, is recomputed after a write to it."""
    holder, x = torch.nn.Module(), torch.ones(2, 16)
    holder.weight = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)
    holder.forward = lambda x: x @ (holder.weight * 2).t()
    jitted = _jit(holder, freeze=True)
    with torch.no_grad():
        jitted(x)
        write(holder.weight)
        return torch.equal(jitted(x), holder(x))


@probe("Parameter.data")
def a_write_through_data_is_seen() -> bool:
    return _sees_a_write(lambda weight: weight.data[0].zero_())


@probe("Parameter.numpy")
def a_write_to_an_array_is_seen() -> bool:
    def write(weight: torch.nn.Parameter) -> None:
        weight.numpy()[0] = 7

    return _sees_a_write(write)


# code that Inductor compiles


def _fused(function: Callable, *inputs: torch.Tensor) -> object:
    """Return the results of a program with regions; raise Inductor's errors."""
    return forge.jit(function, cache=False, strict=True)(*inputs)


@probe("OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr")
def rows_of_a_transposed_tensor_are_kept_apart() -> bool:
    def function(transposed, a, b, c, weight, x, rstd):
        g = (transposed + a + b + c) * weight
        return rstd * (g - x * (g * x).mean(-1, True))

    torch.manual_seed(0)
    a, b, c, x = torch.randn(4, 1, 12, 16)
    inputs = torch.randn(1, 16, 12).transpose(1, 2), a, b, c, torch.randn(16), x, torch.rand(1, 12, 1)
    return torch.allclose(_fused(function, *inputs), function(*inputs), rtol=1e-4, atol=1e-5)


@probe("CppVecOverrides.masked")
def booleans_of_integers_are_padded() -> bool:
    def function(types):
        image = types == 1
        return image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]

    types = torch.tensor([[1], [0]])
    with inductor_config.patch({"cpp.simdlen": 256}):  # AVX-512's masks have one type
        return torch.equal(_fused(function, types), function(types))


def _is_exact_near_zero(function: Callable) -> bool:
    x = torch.logspace(-9, -1, 37)
    found = _fused(lambda x: function(x * 1.0) * 1.0, x)
    return torch.allclose(found.double(), function(x.double()), rtol=1e-6, atol=0)


for _function in (torch.atanh, torch.erf, torch.expm1):
    PROBES[f"CppVecOverrides.{_function.__name__}"] = partial(_is_exact_near_zero, _function)


@probe("torch._dynamo.guards.profile_guard_manager")
def _does_not_measure_guards() -> bool:
    _jit(lambda x: x * 2)(torch.ones(3))
    return get_compilation_metrics()[-1].guard_latency_us == 0


class _Slot:
    def __init__(self) -> None:
        self.value = 1


@probe("DunderDictVariable.__init__")
def _assigns_after_a_higher_order_operator() -> bool:
    def attend(x):
        slots = [_Slot(), _Slot()]
        for slot in slots:
            x = flex_attention(x, x, x)
            slot.value = 3
            x = x * slot.value
        return x

    x = torch.randn(1, 1, 128, 16)
    with torch.no_grad():
        return torch.allclose(_jit(attend)(x), attend(x), rtol=1e-4, atol=1e-5)


def test_every_patch_has_a_program_or_says_why_not() -> None:
    lost = {str(each) for each in PATCHES if each.applies and each.not_probed is None} - PROBES.keys()
    assert lost == set()


_PROBED = [each for each in PATCHES if str(each) in PROBES and each.not_probed is None]


@pytest.fixture
def _regions_of_their_own(patch: Patch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make Inductor compile each program anew, with the patch and without."""
    if patch.scope is not Scope.COMPILE:
        yield
        return
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler (g++)")
    monkeypatch.delenv("FORGE_CHECK", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    region_artifacts._artifacts.pop(inductorex.inductorex, None)
    with inductor_config.patch(fx_graph_cache=False):
        yield


@pytest.mark.usefixtures("_regions_of_their_own")
@pytest.mark.failing_regions  # those of the program without the patch: `strict` raises those of the other
@pytest.mark.parametrize("patch", _PROBED, ids=str)
@pytest.mark.one_in(3)
def test_the_patch_is_needed(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    if not patch.applies:
        pytest.skip(f"it is for torch {patch.since or 'any'} to {patch.before or 'any'}")
    right = PROBES[str(patch)]
    assert right(), f"{patch}: the program is wrong with the patch"
    torch._dynamo.reset()
    alike = [each for each in PATCHES if PROBES.get(str(each)) is right]
    for each in alike:
        monkeypatch.setattr(each, "enabled", False)
        if each.scope is Scope.PROCESS:
            monkeypatch.setattr(each.owner, each.name, each.original)
    region_artifacts._artifacts.pop(inductorex.inductorex, None)
    try:
        without = right()
    except (Exception, pytest.fail.Exception):
        without = False
    if without and TORCH > NEWEST:
        pytest.xfail(f"torch {TORCH} does this by itself, as far as this program shows")
    assert not without, f"{patch} is no longer needed: torch {TORCH} is right without it, which is for: {patch.why}"
