"""Regions of nvFuser's executor with the double of the library: dtypes, layouts, memory, definitions, failures."""

import subprocess
import sys

import nvfuser_double
import pytest
import torch
from nvfuser_executors import Always

import forge
from forge.api.functional import Direct
from forge.executors import Declined, FusionExecutor, claim, resolve_executors
from forge.executors.nvfuserex import NvFuserExecutor, library
from forge.executors.nvfuserex.definition import TensorInput, dump, load
from forge.ir.printing import DEL


@pytest.fixture
def executor() -> Always:
    return Always("nvfuser-double", lambda: nvfuser_double, "cpu")


def compiled(executor, function, *inputs):
    """Return the program of one call, after comparing its values, dtypes and strides with eager's."""
    direct = Direct(function, [executor, "torch"])
    expected, actual = function(*inputs), direct(*inputs)
    torch.testing.assert_close(actual, expected, check_stride=True)
    return direct.compile(inputs, {})[1]


def definitions(executor):
    return [fusion.definition for fusion in executor._compiler._fusions.values()]


def who(program):
    return [claim.executor for claim in program.claims]


def why(program):
    return [reason for claim in program.claims for name, reason in claim.declined if name == "nvfuser-double"]


# calls that nvFuser takes


def test_neighbouring_calls_are_one_definition(executor):
    program = compiled(executor, lambda x: torch.softmax(x * 2, -1) + 1, torch.randn(3, 4))
    assert who(program) == ["nvfuser-double"] * 3
    assert len(definitions(executor)) == 1


@pytest.mark.parametrize(
    ("function", "given", "reason"),
    [
        (lambda x: x @ x, torch.randn(3, 3), "no operator for prims.matmul"),
        (torch.digamma, torch.rand(3), "no operator for prims.digamma"),
        (torch.neg, torch.ones(3, dtype=torch.int8), "has no torch.int8"),
        (torch.exp, torch.randn(3, dtype=torch.complex64), "has no torch.complex64"),
        (torch.exp, torch.randn(0, 3), "may be empty"),
        (torch.exp, torch.randn([1] * 9), "up to 8 dims"),
        (lambda x: x[::2] + 1, torch.randn(4), "no step"),
        (lambda x: x << 70, torch.ones(3, dtype=torch.int64), "as many bits"),
    ],
)
def test_what_is_not_taken_is_declined_with_the_reason(executor, function, given, reason):
    program = compiled(executor, function, given)
    assert any(reason in each for each in why(program)), why(program)


def test_tensors_of_another_device_are_declined():
    elsewhere = Always("nvfuser-double", lambda: nvfuser_double, "cuda")
    program = compiled(elsewhere, torch.exp, torch.randn(3))
    assert "computes on cuda" in why(program)[0]


class Second(FusionExecutor):
    """A fusion executor that takes every call and has torch run it."""

    def can_fuse(self, bound):
        return True

    def fuse(self, region):
        return claim(region, resolve_executors(["torch"]))[0].python_callable()

    def is_profitable(self, calls):
        return True


def test_the_first_of_two_fusion_executors_takes_what_it_accepts(executor):
    direct = Direct(lambda x: torch.digamma(torch.exp(x) + 1), [executor, Second("second"), "torch"])
    assert who(direct.compile((torch.rand(3),), {})[1]) == ["nvfuser-double", "nvfuser-double", "second"]


def test_gradients_of_what_it_takes_are_its_too(executor):
    jitted = forge.jit(lambda x: torch.nn.functional.layer_norm(x.softmax(-1), (4,)), executors=[executor, "torch"])
    jitted(torch.randn(3, 4, requires_grad=True)).square().sum().backward()
    calls = [bound.symbol for bound in forge.last_backward_traces(jitted)[-1].bound_symbols]
    assert [symbol.name for symbol in calls if symbol is not DEL and symbol.executor is not executor] == ["contiguous"]


# dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half_after_every_call(executor, dtype):
    program = compiled(executor, lambda x: (x + x, x**3, x.sum(0), x.amax(1)), torch.randn(3, 4, dtype=dtype))
    assert set(who(program)) == {"nvfuser-double"}


def test_a_rounding_that_the_program_asks_for_is_made(executor):
    x = torch.tensor([1.0, 1 + 2**-12, 3.0])
    compiled(executor, lambda x: (x.half().float() - 1) * 4096, x)


def test_arithmetic_on_bools_is_logical(executor):
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    compiled(executor, lambda a, b: (a + b, a * b, a ^ b, ~a, a & b, torch.maximum(a, b)), a, b)


# layouts


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 8)[:, :5],
        torch.randn(3, 1, 2),
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(2.0),
    ],
    ids=["transposed", "channels_last", "gaps", "one", "expanded", "0-d"],
)
def test_results_have_the_strides_that_torch_gives(executor, x):
    compiled(executor, lambda x: (torch.exp(x) * 2, x.sum(), x * 3), x)


@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(4, 3).t()], ids=["contiguous", "transposed"])
def test_nvfuser_lays_out_what_is_dense_itself(executor, x):
    compiled(executor, lambda x: torch.exp(x) * 2, x)
    (fusion,) = executor._compiler._fusions.values()
    assert fusion.laid_out == ()


def test_a_result_that_repeats_a_value_has_memory_for_each_element(executor):
    program = compiled(executor, lambda x: (x.exp().unsqueeze(0).expand(4, 3).clone(), x.exp()), torch.randn(3))
    assert "nvfuser-double" in who(program)


def test_a_copy_has_memory_of_its_own(executor):
    x = torch.randn(3, 4)
    copy, transposed = Direct(lambda x: (x.clone(), x.t().contiguous().t().clone()), [executor, "torch"])(x)
    before = transposed.clone()
    copy.zero_()
    assert x.abs().sum() > 0 and torch.equal(transposed, before)
    transposed.zero_()
    assert x.abs().sum() > 0


# definitions


def test_regions_of_one_contiguity_and_stride_order_share_a_definition(executor):
    direct = Direct(lambda x: torch.exp(x) * 2, [executor, "torch"])
    for gap in (5, 6):
        x = torch.randn(3, gap)[:, :4]
        torch.testing.assert_close(direct(x), torch.exp(x) * 2)
    assert len(definitions(executor)) == 1
    direct(torch.randn(4, 3).t())
    assert len(definitions(executor)) == 2


def test_a_function_for_any_length_has_lengths_of_minus_one_and_runs_for_others(executor):
    def function(x):
        return torch.softmax(x.reshape(-1, x.shape[-1]) * x.shape[0], -1).transpose(0, 1) + 1

    jitted = forge.jit(function, executors=[executor, "torch"], dynamic=True)
    for shape in ((4, 3, 6), (5, 7, 8), (2, 9, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(jitted(x), function(x), check_stride=True)
    assert forge.explain(jitted).graphs == 1
    (definition,) = definitions(executor)
    assert [each.shape for each in definition.inputs if isinstance(each, TensorInput)] == [(-1, -1, -1)]


def test_a_definition_is_made_again_from_its_bytes(executor):
    compiled(executor, lambda x: torch.where(x > 0, x.half().float(), float("-inf")).sum(1), torch.randn(3, 4))
    (definition,) = definitions(executor)
    assert load(dump(definition, (0,))) == (definition, (0,))


def test_a_function_is_loaded_in_another_process(executor):
    x = torch.randn(4, 3)
    compiled(executor, lambda x: (torch.exp(x), x.sum(0).expand(4, 3) * 2), x)
    (fusion,) = executor._compiler._fusions.values()
    loaded = Always("nvfuser-double", lambda: nvfuser_double, "cpu").load(executor.dump(fusion))
    for one, other in zip(loaded([x]), fusion([x]), strict=True):
        torch.testing.assert_close(one, other, check_stride=True)


# failures


class Failing:
    """A library that fails at one operator, at its definition or at run time."""

    DataType = nvfuser_double.DataType
    compute_tensor_descriptor = staticmethod(nvfuser_double.compute_tensor_descriptor)
    version = staticmethod(nvfuser_double.version)

    def __init__(self, operator=None):
        self.operator = operator
        self.runs = -1  # how often it runs before it fails

    def FusionDefinition(self):
        definition, outer = nvfuser_double.FusionDefinition(), self
        record, execute = definition.record, definition.execute

        def recorded(name, *args, **kwargs):
            if name == outer.operator:
                raise RuntimeError(f"no {name} here\nException raised from csrc at 0x1234\nframe #0: in C++")
            return record(name, *args, **kwargs)

        def executed(inputs):
            if outer.runs == 0:
                raise RuntimeError("no scheduler\nframe #0: in C++")
            outer.runs -= 1
            return execute(inputs)

        definition.record, definition.execute = recorded, executed
        return definition


def test_what_the_library_cannot_define_torch_runs_and_nothing_is_printed(capfd):
    failing = NvFuserExecutor("nvfuser-double", lambda: Failing("tanh"), "cpu")
    program = compiled(failing, lambda x: torch.tanh(x) * 2, torch.randn(3))
    assert why(program) == ["nvFuser failed: RuntimeError: no tanh here"] * 2
    assert capfd.readouterr() == ("", "")


def test_what_the_library_cannot_compile_torch_runs():
    failing = Failing()
    failing.runs = 0
    program = compiled(NvFuserExecutor("nvfuser-double", lambda: failing, "cpu"), lambda x: x.exp() * 2, torch.ones(3))
    assert why(program) == ["nvFuser failed: RuntimeError: no scheduler"] * 2


@pytest.mark.usefixtures("compiled_regions")  # under check="regions" a failure is raised
def test_what_the_library_fails_at_later_torch_runs_from_then_on():
    failing, x = Failing(), torch.randn(3)
    direct = Direct(lambda x: x.exp() * 2, [NvFuserExecutor("nvfuser-double", lambda: failing, "cpu"), "torch"])
    direct(x)
    failing.runs = 0
    with pytest.warns(UserWarning, match=r"nvfuser-double\.fusion0 failed") as told:
        for _ in range(2):
            torch.testing.assert_close(direct(x), x.exp() * 2)
    (warning,) = [str(each.message) for each in told]
    assert warning.endswith("RuntimeError: no scheduler")


# the library


@pytest.mark.slow
def test_importing_forge_does_not_import_the_library():
    code = "import forge, sys; assert forge.jit and not {'nvfuser', 'nvfuser_direct'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("cuda", "torch_version", "installed", "reason"),
    [
        (False, (2, 11), True, "no CUDA device"),
        (True, (2, 13), True, "from torch 2.13 on"),
        (True, (2, 12), False, "is not installed"),
    ],
)
def test_why_the_library_is_not_there(monkeypatch, cuda, torch_version, installed, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(library, "TORCH", torch_version)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: object() if installed else None)
    found = NvFuserExecutor("nvfuser").is_available()
    assert isinstance(found, Declined) and reason in found.reason


def test_a_library_that_does_not_load_is_declined_with_the_first_line(monkeypatch, tmp_path):
    (tmp_path / "nvfuser_direct.py").write_text("raise ImportError('libnvrtc.so.12: cannot open\\nframe 1')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, library.MODULE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "TORCH", (2, 11))
    library._import_library.cache_clear()
    flags = sys.getdlopenflags()
    found = NvFuserExecutor("nvfuser").is_available()
    library._import_library.cache_clear()
    assert found.reason == "nvfuser_direct cannot be imported: ImportError: libnvrtc.so.12: cannot open"
    assert sys.getdlopenflags() == flags


def test_it_is_asked_by_name_only():
    assert "nvfuser" not in [executor.name for executor in forge.executors.resolve_executors(None)]
    with pytest.raises(RuntimeError, match="'nvfuser' is not available"):
        if NvFuserExecutor("nvfuser").is_available():
            pytest.skip("the library is available here")
        forge.jit(torch.exp, executors=["nvfuser", "torch"])
