"""The functions.yaml of ExecuTorch as in its documentation, and C++ kernels of the `(context, …, out)` form."""

import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.executors.hubex import gather, hubex, operators
from forge.hub import executorch
from forge.hub.manifest import Checker, Manifest, ManifestError, parse_manifest, read_manifest
from tests.hub.kernels import process_restored


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with process_restored():
        yield


def read(text: str) -> Manifest:
    return parse_manifest(text, operators(), file="functions.yaml")


def entry(arg_meta: str, more: str = "") -> str:
    return f"- op: add.out\n  kernels:\n  - arg_meta: {arg_meta}\n    kernel_name: custom::add\n{more}"


# reading of functions.yaml


@pytest.mark.parametrize(
    ("meta", "dtypes", "order"),
    [
        ("{self: [Float, [0, 1]]}", "float32", "[0, 1]"),
        ("{self: [[Float, Half], [0]]}", "float32, float16", "[0]"),
        ("{self: [BFloat16, [[0, 1], [1, 0]]]}", "bfloat16", "[0, 1], [1, 0]"),
    ],
)
def test_aliases_may_be_written_where_they_are_used(meta: str, dtypes: str, order: str) -> None:
    (kernel,) = read(entry(meta)).kernels
    assert (str(kernel.dtypes["self"]), str(kernel.orders["self"])) == (dtypes, order)


def test_a_kernel_may_define_aliases_of_its_own_which_go_before_the_operators() -> None:
    own = "    type_alias: {T: [Half]}\n    dim_order_alias: {D: [1, 0]}\n  type_alias: {T: [Float], U: [Double]}\n"
    (kernel,) = read(entry("{self: [T, D], other: U}", own)).kernels
    assert (str(kernel.dtypes["self"]), str(kernel.dtypes["other"])) == ("T (float16)", "U (float64)")
    assert str(kernel.orders["self"]) == "D ([1, 0])"


def test_wrong_inline_aliases_are_told_with_their_place() -> None:
    with pytest.raises(ManifestError) as error:
        read(entry("{self: [[Float, Hlf], [0, 1]], other: [Float, [0, 2]]}"))
    assert str(error.value).splitlines() == [
        "functions.yaml:3:31: unknown dtype 'Hlf'; did you mean 'Half'?",
        "functions.yaml:3:61: dim order [0, 2] is not a permutation of 0..1",
    ]


@pytest.mark.parametrize(
    ("schema", "tensors"),
    [
        ("my_ops::linear.out(Tensor weight, Tensor input, Tensor(?) bias, *, Tensor(a!) out) -> Tensor(a!)", "bias"),
        ("my_ops::scale.out(Tensor x, Tensor(?) by=None, *, Tensor(a!) out) -> ()", "by"),
    ],
)
def test_an_optional_tensor_may_be_written_as_the_documentation_does(schema: str, tensors: str) -> None:
    (op,) = read(f"- func: {schema}\n  kernels: [{{arg_meta: null, kernel_name: custom::f}}]\n").ops
    assert op.signature is not None and op.signature.by_name[tensors].optional
    with pytest.raises(ManifestError, match="invalid schema"):
        read("- func: my_ops::f(Tensor(?)(?) x) -> Tensor\n  kernels: [{arg_meta: null, kernel_name: f}]\n")


def test_one_function_may_stand_in_several_entries_of_an_operator() -> None:
    text = entry("{self: Float}") + "  - {arg_meta: {self: Half}, kernel_name: custom::add}\n" + entry("null")
    names = [kernel.name for kernel in read(text).kernels]
    assert names == ["custom::add", "custom::add#2", "custom::add#3"]


# kernels that run


PYTHON = "functions.python:forge_executorch_kernels:"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module that functions.yaml names with python:, because compiling C++ takes a minute."""
    module = types.ModuleType("forge_executorch_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def anywhere(self: torch.Tensor, other: torch.Tensor, alpha: float = 1, *, out: torch.Tensor) -> torch.Tensor:
        return torch.add(self, other, alpha=alpha, out=out)

    def channels_last(self: torch.Tensor, other: torch.Tensor, alpha: float = 1, *, out: torch.Tensor) -> torch.Tensor:
        for tensor in (self, other, out):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        return torch.add(self, other, alpha=alpha, out=out)

    def mul3(input: torch.Tensor, *, output: torch.Tensor) -> None:
        output.copy_(input * 3)

    module.anywhere, module.channels_last, module.mul3 = anywhere, channels_last, mul3
    return module


KEYS = """\
- op: add.out
  dim_order_alias: {D: [0, 2, 3, 1]}
  kernels:
  - {arg_meta: null, kernel_name: "python:forge_executorch_kernels:anywhere"}
  - arg_meta: {self: [Float, D], other: [Float, D], out: [Float, D]}
    kernel_name: "python:forge_executorch_kernels:channels_last"
"""


def claims(function: object, *args: torch.Tensor) -> list[str]:
    jitted = forge.jit(function)
    torch.testing.assert_close(jitted(*args), function(*args))
    return [row.executor.removeprefix(PYTHON) for row in forge.explain(jitted).rows]


def test_a_channels_last_key_is_chosen_when_the_tensor_is(kernels: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "functions.yaml"
    path.write_text(KEYS)
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    forge.use_kernels([path], verify=False)
    assert claims(lambda a, b: a + b, x, x) == ["anywhere"]
    assert claims(lambda a, b: a + b, last, last) == ["channels_last"]
    assert claims(lambda a, b: a + b, last, x) == ["anywhere"]
    assert forge.jit(lambda a, b: a + b)(last, last).is_contiguous(memory_format=torch.channels_last)
    rows = forge.kernels([path])
    assert [row.kernel.rpartition(":")[2] for row in rows] == ["channels_last", "anywhere"]
    assert rows[0].next.endswith("; it has fewer constraints (0, not 6)")


def test_a_checker_names_every_reason_though_an_argument_is_called_self() -> None:
    (kernel,) = read(entry("{self: Float}")).kernels
    checker = Checker(kernel, operators().resolve("aten::add.out"))
    x = torch.ones(2)
    assert checker.failures(self=x, other=x) == []
    assert checker.failures(self=x.double(), other=x) == ["dtype float64 is not float32"]


@pytest.mark.parametrize(
    ("op", "values", "reason"),
    [
        ("add.out", {"self": torch.ones(2), "other": 2}, "other is 2, but aten::add.out takes a tensor there"),
        ("max.dim_max", {"self": torch.ones(2)}, "dim is None, which aten::max.dim_max does not take"),
        ("clamp.out", {"self": torch.ones(2), "min": torch.ones(2)}, "min is a tensor, but aten::clamp.out takes"),
    ],
)
def test_a_call_of_another_overload_is_declined(op: str, values: dict, reason: str) -> None:
    (kernel,) = read(f"- op: {op}\n  kernels: [{{arg_meta: null, kernel_name: f}}]\n").kernels
    (found,) = Checker(kernel, operators().resolve(f"aten::{op}")).failures(**values)
    assert found.startswith(reason)


def test_an_out_variant_is_a_kernel_of_the_operator_that_it_computes(kernels: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "functions.yaml"
    path.write_text(
        "- func: forge_et::mul3.out(Tensor input, *, Tensor(a!) output) -> Tensor(a!)\n  kernels:\n"
        '  - {arg_meta: {output: Float}, kernel_name: "python:forge_executorch_kernels:mul3"}\n'
    )
    with pytest.raises(ManifestError, match=r"writes to output; .*, or register forge_et::mul3 in torch.library"):
        gather([path])
    library = torch.library.Library("forge_et", "DEF")
    try:
        library.define("mul3(Tensor input) -> Tensor")
        library.impl("mul3", lambda input: input * 3, "CompositeExplicitAutograd")
        torch.library.register_fake("forge_et::mul3", torch.empty_like, lib=library)
        forge.use_kernels([path])
        assert claims(lambda x: torch.ops.forge_et.mul3(x), torch.randn(3)) == ["mul3"]
    finally:
        library._destroy()


# the binding


FUNCTIONS = """\
- op: clamp.out
  kernels: [{arg_meta: null, kernel_name: torch::executor::clamp_out}]
- op: max.dim_max
  kernels: [{arg_meta: null, kernel_name: torch::executor::native::max_out}]
- op: index.Tensor_out
  kernels: [{arg_meta: null, kernel_name: index_out}]
"""
MANIFEST = "forge_kernels: 1\nlibrary: {name: my-et}\nbuild: {cpp: [k.cpp]}\nexecutorch: functions.yaml\n"


def written(folder: Path, functions: str = FUNCTIONS, manifest: str = MANIFEST) -> Path:
    (folder / "functions.yaml").write_text(functions)
    (folder / "k.cpp").write_text("")
    (folder / "forge_kernels.yaml").write_text(manifest)
    return folder / "forge_kernels.yaml"


def test_the_binding_declares_calls_and_registers_each_kernel(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path), operators())
    files = executorch.files_of(manifest)
    binding = files[executorch.BINDING].decode()
    context = "executorch::runtime::KernelRuntimeContext&"
    optional = "const std::optional<at::Scalar>&"
    for line in (
        "namespace torch { namespace executor { namespace native { at::Tensor& clamp_out("
        f"{context}, const at::Tensor&, {optional}, {optional}, at::Tensor&); }}}}}}",
        "namespace torch { namespace executor { namespace native { std::tuple<at::Tensor&, at::Tensor&> max_out("
        f"{context}, const at::Tensor&, int64_t, bool, at::Tensor&, at::Tensor&); }}}}}}",
        "namespace at { namespace native { at::Tensor& index_out("
        f"{context}, const at::Tensor&, at::ArrayRef<std::optional<at::Tensor>>, at::Tensor&); }}}}",
        "TORCH_LIBRARY(forge_executorch_my_et, m) {",
    ):
        assert line in binding
    assert manifest.kernels[0].kernel_name == ("forge_executorch_my_et::torch_executor_clamp_out__aten_clamp_out")
    assert manifest.kernels[0].name == "torch::executor::clamp_out"
    assert {kernel.device.types for kernel in manifest.kernels if kernel.device} == {("cpu",)}
    assert "forge-executorch/executorch/runtime/kernel/kernel_includes.h" in files


def test_what_no_binding_is_generated_for_says_so(tmp_path: Path) -> None:
    functions = "- func: my_ops::f(Device device) -> Tensor\n  kernels: [{arg_meta: null, kernel_name: custom::f}]\n"
    manifest = read_manifest(written(tmp_path, functions), operators())
    with pytest.raises(executorch.NotBound, match="kernel custom::f: 'device' is Device, which no binding"):
        executorch.files_of(manifest)


@pytest.mark.parametrize(
    ("manifest", "functions", "message"),
    [
        (MANIFEST.replace("functions", "../functions"), "", "must be a path inside of the manifest's folder"),
        (MANIFEST.replace("functions", "function"), "", "does not exist in .*; did you mean 'functions.yaml'"),
        (MANIFEST, "a: b", r"functions\.yaml:1:1: is no functions.yaml, which is a list of entries"),
        (MANIFEST, "- op: ad.out\n  kernels: []\n", r"functions\.yaml:1:7: unknown operator 'aten::ad.out'"),
    ],
)
def test_mistakes_are_told_with_their_file(tmp_path: Path, manifest: str, functions: str, message: str) -> None:
    path = written(tmp_path, functions or FUNCTIONS, manifest)
    with pytest.raises(ManifestError, match=message):
        read_manifest(path, operators())


def test_kernels_of_several_files_are_merged_and_a_default_survives_a_partial_one(tmp_path: Path) -> None:
    files = MANIFEST.replace("executorch: functions.yaml", "executorch: [functions.yaml, more.yaml]")
    path = written(tmp_path, FUNCTIONS, files)
    (tmp_path / "more.yaml").write_text(
        "- op: clamp.out\n  kernels: [{arg_meta: {self: Float}, kernel_name: more::clamp_out}]\n"
    )
    rows = read_manifest(path, operators()).kernels
    assert [each.name for each in rows if each.op == "aten::clamp.out"] == [
        "torch::executor::clamp_out",
        "more::clamp_out",
    ]


@pytest.mark.slow  # compiles
def test_kernels_of_the_example_run_and_report_their_failures(tmp_path: Path) -> None:
    for file in (Path(__file__).parents[2] / "examples/kernels/executorch").iterdir():
        shutil.copy(file, tmp_path)
    library = torch.library.Library("my_executorch_ops", "DEF")
    try:
        library.define("mul3(Tensor input) -> Tensor")
        library.impl("mul3", lambda input: input * 3, "CompositeExplicitAutograd")
        torch.library.register_fake("my_executorch_ops::mul3", torch.empty_like, lib=library)
        forge.use_kernels([tmp_path])
        x = torch.randn(2, 3, 4, 5)
        last = x.to(memory_format=torch.channels_last)
        add = [row.kernel for row in forge.kernels(op="torch.add")]
        assert [name.rpartition("::")[2] for name in add] == ["add_channels_last_out", "add_out"]
        assert claims(lambda a, b: a + b, x, x) == [add[1]]
        assert claims(lambda a, b: a + b, last, last) == [add[0]]
        assert claims(lambda x: torch.ops.my_executorch_ops.mul3(x), x) == ["my-executorch.custom::mul3_out_impl"]
        (mul3,) = [each.function for each in hubex.kernels if each.name.endswith("mul3_out_impl")]
        with pytest.raises(RuntimeError, match="custom::mul3_out_impl: InvalidArgument: output has 1 dims, input 4"):
            mul3(x, output=torch.empty(3))
    finally:
        library._destroy()
