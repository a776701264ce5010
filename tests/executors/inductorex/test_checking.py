"""Checks of forge.jit(check="regions"): torch runs the regions, and the promises at their edges are verified."""

import ctypes
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import forge
from forge import CheckError, torchlang
from forge.api.options import resolve_options
from forge.compiler.unspecified_strides import poison, randomly_strided
from forge.executors import OperatorExecutor
from forge.executors.inductorex.checking import CheckedRegion, Promise, check_region, load
from forge.executors.inductorex.strides import NO_STRIDES

F32 = {"dtype": "torch.float32", "device": "cpu"}
ADD = "def forward(self, x, y):\n    return [torch.ops.aten.add.Tensor(x, y)]\n"


def matrix(rows=2, columns=3, strides=(3, 1)):
    return Promise((rows, columns), strides, **F32)


def region(code=ADD, *, inputs=(matrix(), matrix()), outputs=(matrix(),), scope=None):
    return CheckedRegion(code, scope or {"torch": "torch"}, inputs, outputs)


def test_a_program_has_the_regions_of_the_default_configuration_and_no_kernel_is_compiled(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", None)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    jitted = forge.jit(model, check="regions")
    for rows in (3, 5, 7):
        x, twin = (torch.randn(rows, 8).requires_grad_() for _ in range(2))
        twin.data.copy_(x.data)
        assert_close(jitted(x), model(twin))
        jitted(x).sum().backward()
        model(twin).sum().backward()
        assert_close(x.grad, twin.grad)
    fused = {row.operation for row in forge.explain(jitted).rows if row.executor == "inductor"}
    assert fused >= {"torch.nn.functional.gelu", "torch.native_layer_norm"}


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "input 0 has dtype torch.float64, not torch.float32"),
        (torch.zeros(3, 2).t(), r"input 0 has strides \(1, 2\), not \(3, 1\)"),
        (torch.zeros(2, 4), r"input 0 has shape \(2, 4\), not \(2, 3\)"),
        (torch.zeros(2, 3, device="meta"), "input 0 is on meta, not cpu"),
        (3.0, "input 0 is a float, not a tensor"),
        (torch._neg_view(torch.zeros(2, 3)), "input 0 is conjugated or negated"),
    ],
)
def test_an_input_that_is_not_what_was_promised_is_an_error(x, reason):
    with pytest.raises(CheckError, match=reason):
        region()([x, torch.zeros(2, 3)])


def test_strides_of_dims_of_one_and_of_empty_tensors_mean_nothing():
    one = matrix(1, 3)
    region(inputs=(one, one), outputs=(one,))([torch.zeros(1, 3).as_strided((1, 3), (99, 1)), torch.zeros(1, 3)])
    empty = matrix(0, 3)
    region(inputs=(empty, empty), outputs=(empty,))([torch.zeros(3, 0).t(), torch.zeros(0, 3)])


@pytest.mark.parametrize(
    ("expression", "promise", "reason"),
    [
        ("x.t().contiguous().t()", matrix(), r"result 0 has strides \(1, 2\), not \(3, 1\)"),
        ("x.double()", matrix(), "result 0 has dtype torch.float64"),
        ("x.view(2, 3)", matrix(), "result 0 shares memory with input 0"),
        ("x.sum()", matrix(), r"result 0 has shape \(\), not \(2, 3\)"),
    ],
)
def test_a_result_that_is_not_what_was_promised_is_an_error(expression, promise, reason):
    checked = region(f"def forward(self, x):\n    return [{expression}]\n", inputs=(matrix(),), outputs=(promise,))
    with pytest.raises(CheckError, match=reason):
        checked([torch.zeros(2, 3)])


def test_two_results_of_one_memory_are_an_error():
    code = "def forward(self, x):\n    y = x + 1\n    return [y, y.view(2, 3)]\n"
    with pytest.raises(CheckError, match="result 1 shares memory with result 0"):
        region(code, inputs=(matrix(),), outputs=(matrix(), matrix()))([torch.zeros(2, 3)])


def test_a_size_that_no_input_defines_is_an_error_when_the_region_is_made():
    with pytest.raises(CheckError, match="the size s18 of result 0 reads s18, which no input defines"):
        region(outputs=(matrix("s18"),))


def test_a_size_that_is_no_number_is_an_error():
    code = "def forward(self, n, x):\n    return [x + n]\n"
    checked = region(code, inputs=("s0", matrix("s0")), outputs=(matrix("s0"),))
    assert checked([2, torch.zeros(2, 3)])[0].shape == (2, 3)
    with pytest.raises(CheckError, match=r"input 0, the size s0, is 2\.0, not an int"):
        checked([2.0, torch.zeros(2, 3)])
    with pytest.raises(CheckError, match=r"input 1 has shape \(4, 3\), not \(2, 3\)"):
        region(code, inputs=("s0", matrix("s0*2 - 2")), outputs=(matrix("s0"),))([2, torch.zeros(4, 3)])


def test_the_list_of_inputs_is_emptied():
    given = [torch.zeros(2, 3), torch.ones(2, 3)]
    region()(given)
    assert not given


def test_a_region_is_the_same_after_it_was_written_to_the_disk():
    checked = region(
        inputs=("s0", matrix("s0"), matrix("s0")), outputs=(matrix("s0"),), code=ADD.replace("x, y", "n, x, y", 1)
    )
    twin = load(checked.dump())
    assert (twin.code, twin.inputs, twin.outputs) == (checked.code, checked.inputs, checked.outputs)
    (result,) = twin([2, torch.ones(2, 3), torch.ones(2, 3)])
    assert_close(result, torch.full((2, 3), 2.0))


def test_programs_from_the_disk_are_checked_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))

    def function(x):
        return (x * 2).relu() - x.mean(-1, keepdim=True)

    x = torch.randn(4, 5)
    forge.jit(function, check="regions")(x)
    jitted = forge.jit(function, check="regions")
    assert_close(jitted(x), function(x))
    assert forge.explain(jitted).cached


def test_memory_that_was_never_written_holds_nan():
    x = torch.zeros(2, 3)
    graph = make_fx(lambda x: [x.new_empty(2, 3) + x], tracing_mode="fake")(x)
    (result,) = check_region(graph, [x], None, NO_STRIDES, whole_program=False)([x])
    assert result.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.int8, torch.uint8, torch.bool])
def test_every_dtype_has_a_value_for_memory_that_was_never_written(dtype):
    filled = poison(torch.zeros(3, dtype=dtype))
    assert not torch.equal(filled, torch.zeros(3, dtype=dtype)) or dtype == torch.uint8


def test_a_result_that_was_freed_holds_nan_for_who_still_looks_at_its_memory():
    (result,) = region()([torch.zeros(2, 3), torch.zeros(2, 3)])
    memory = result.numpy()  # holds a reference, so the memory is not freed
    view = result[0]
    del result
    assert (memory == 0).all() and (view == 0).all()
    large = matrix(20, 30, (30, 1))
    (result,) = region(inputs=(large, large), outputs=(large,))([torch.zeros(20, 30), torch.zeros(20, 30)])
    looked_at = (ctypes.c_float * 600).from_address(result.data_ptr())
    del result
    assert sum(map(math.isnan, looked_at)) > 500  # the allocator writes to the first of them


def test_strides_that_were_not_promised_are_random_and_values_stay():
    x = torch.randn(3, 4, 5)
    layouts = {randomly_strided(x).stride() for _ in range(20)}
    assert len(layouts) > 3
    assert torch.equal(randomly_strided(x), x)


def test_a_kernel_whose_strides_are_unknown_gets_random_ones_before_a_region_reads_it():
    seen = []
    mine = OperatorExecutor("mine")

    def sigmoid(x):
        return torch.sigmoid(x)

    sigmoid.__module__ = "a_kernel"  # not torch's, so that its strides are not known
    mine.register_implementation(torchlang.find(torch.sigmoid), sigmoid)

    def keep(x):
        seen.append(x.stride())
        return x

    keep.__module__ = "a_kernel"
    mine.register_implementation(torchlang.find(torch.tanh), keep)

    def function(x):
        y = torch.sigmoid(x)
        return (y * 2 + x.exp()).sum(-1), torch.tanh(y).sum()  # 0-d, whose strides follow those of y

    jitted = forge.jit(function, executors=[mine, "inductor", "torch"], check="regions")
    x = torch.randn(4, 5)
    for _ in range(10):
        first, _ = jitted(x)
        assert_close(first, (torch.sigmoid(x) * 2 + x.exp()).sum(-1))
    assert len(set(seen)) > 1


STRIDED = {
    "transposed": lambda x: x.t().as_strided((2, 2), (1, 2)).cos() * 2,
    "a row": lambda x: x[1].as_strided((2,), (2,)).exp() + 1,
    "windows": lambda x: x.view(-1).unfold(0, 3, 2).sin() * 2,
    "of a value": lambda x: (x * 2).t().as_strided((2, 2), (1, 2)).cos() + 1,
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_counts_from_an_input_that_begins_further_on_in_its_memory(name):
    function, memory = STRIDED[name], torch.arange(1.0, 25.0)
    jitted = forge.jit(function, check="regions")
    for start in (0, 4, 2):
        x = memory[start : start + 8].view(2, 4)
        assert_close(jitted(x), function(x))


def test_a_small_program_gets_its_larger_region_at_once(monkeypatch):
    monkeypatch.delenv("FORGE_BACKGROUND", raising=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)
    jitted = forge.jit(model, check="regions")
    x = torch.randn(8, 4)
    for _ in range(40):
        assert_close(jitted(x), model(x))
    assert {row.executor for row in forge.explain(jitted).rows} == {"inductor-whole"}


def test_the_environment_sets_the_default(monkeypatch):
    assert not resolve_options().checks
    monkeypatch.setenv("FORGE_CHECK", "regions")
    assert resolve_options(check=None).checks
    monkeypatch.setenv("FORGE_CHECK", "region")
    with pytest.raises(ValueError, match="check is 'region', but must be one of None, eager, regions"):
        resolve_options()


def test_a_promise_prints_what_differs():
    promise = replace(matrix(), shape=("s0", 3))
    assert promise.differs(torch.zeros(5, 3), {"s0": 5}) is None
    assert promise.differs(torch.zeros(5, 3), {"s0": 4}) == "has shape (5, 3), not (4, 3)"


@pytest.mark.slow
def test_a_program_that_makes_warnings_errors_compiles() -> None:
    """Torch's modules, imported when the first region is requested, use deprecated parts of torch."""
    program = """
import warnings
import torch, forge
warnings.simplefilter("error")
print(forge.jit(lambda x: (x * 2).sin() + 1, check="regions", cache=False)(torch.zeros(2)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


def test_a_conversion_of_a_detached_input_requires_no_gradient() -> None:
    x = torch.randn(5, requires_grad=True)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.detach().to(torch.bfloat16), x.detach() * 2

    results = forge.jit(function, check="regions", cache=False)(x)
    assert not any(each.requires_grad for each in results)
