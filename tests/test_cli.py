"""The commands forge trace, explain, bench, export and run; help, completion, errors in one line. The tests of the
kernels' commands are in tests/hub."""

import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import forge
from forge import cli
from forge.benchmark import model_bench
from forge.benchmark.model_bench import Case
from forge.cli import help, inputs, names, targets
from forge.cli.app import TargetError, app
from forge.hub import builder, lockfile
from forge.support import timing
from forge.torch_internals.versions import TORCH

ROOT = Path(__file__).parents[1]
PROGRAMS = '''
"""A user's programs."""
import torch
from torch import nn

print("imported")
module = nn.Linear(4, 4)
number = 3


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, scale=1.0):
        return torch.relu(self.linear(x)) * scale


class Group:
    net = Net


def make(width=8):
    print("made")
    return Net(width), (torch.randn(2, width),)


def with_names():
    return Net(), {"x": torch.randn(2, 8), "scale": 2.0}


def closure():
    return lambda x: x.sin()


def without_arguments():
    return torch.ones(3).exp()


def product(x, w):
    return x @ w


def raises():
    raise RuntimeError("no weights\\nmore of it")


def leaves():
    raise SystemExit("bye")


def wrong(x):
    return x @ torch.ones(3, 3)


def on_value(x):
    return x.exp() if x.sum() > 0 else x.sin()


def layer():
    return nn.Linear(3, 3)
'''
NAMED = {name: f"{name}: " if TORCH >= (2, 15) else "" for name in ("mm", "addmm")}  # torch's errors name the operator
LAYER = (  # a layer of torch's that the user's code makes
    f"forge: programs:layer raised RuntimeError: {NAMED['addmm']}mat1 and mat2 shapes cannot be multiplied "
    f"(2x4 and 3x3) (programs.py:{PROGRAMS[: PROGRAMS.index('def layer')].count(chr(10)) + 1})\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the current folder, with two files; modules imported from it are forgotten afterwards."""
    (tmp_path / "programs.py").write_text(PROGRAMS)
    (tmp_path / "given.py").write_text(
        "import torch\n\ndef forge_inputs():\n    return torch.ones(3, 4), torch.ones(4, 5)\n\n"
        "def product(x, w):\n    return x @ w\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def load(target: str, *given: str, training: bool = False, dtype: torch.dtype | None = None, **settings: Any) -> Case:
    cpu = torch.device("cpu")
    parsed = inputs.parse_inputs(given, cpu) if given else None
    return targets.load(target, settings, parsed, training=training, dtype=dtype, device=cpu)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# targets


@pytest.mark.parametrize(
    ("target", "given", "settings", "shape"),
    [
        ("programs.py:product", ["float32[2,3]", "w=float32[3,4]"], {}, (2, 4)),
        ("programs:make", [], {}, (2, 8)),
        ("programs:make", [], {"width": 5}, (2, 5)),
        ("programs:make", ["float32[7,8]"], {}, (7, 8)),
        ("programs:with_names", [], {}, (2, 8)),
        ("programs:module", ["float32[3,4]"], {}, (3, 4)),
        ("programs:Net", ["float32[3,8]", "scale=2.0"], {}, (3, 8)),
        ("programs:Group.net", ["float32[3,6]"], {"width": 6}, (3, 6)),
        ("programs:closure", ["float32[3]"], {}, (3,)),
        ("programs:without_arguments", [], {}, (3,)),
        ("given.py:product", [], {}, (3, 5)),
        ("given.py:product", ["float32[2,3]", "float32[3,4]"], {}, (2, 4)),
        ("torch.nn.functional:gelu", ["float32[2]"], {}, (2,)),
        ("torch.nn:Linear", ["float32[2,3]"], {"in_features": 3, "out_features": 4}, (2, 4)),
    ],
)
def test_a_target_is_a_function_a_module_or_what_makes_one(
    target: str, given: list[str], settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    case = load(target, *given, **settings)
    assert case.run(case.target)().shape == shape


def test_a_module_is_in_the_mode_and_dtype_that_are_wanted_with_its_own_inputs() -> None:
    case = load("programs:make", dtype=torch.float64)
    assert not case.target.training and case.args[0].dtype == torch.float64
    case = load("programs:make", training=True)
    assert case.target.training and not case.args[0].requires_grad
    case.run(case.target)()
    assert case.target.linear.weight.grad is not None


def test_the_inputs_of_a_function_have_gradients_in_training() -> None:
    case = load("programs:product", "float32[2,3]", "float32[3,4]", training=True)
    case.run(case.target)()
    assert case.args[0].grad.shape == (2, 3)


def test_the_current_folder_is_searched_behind_what_is_installed(folder: Path) -> None:
    (folder / "fractions.py").write_text("raise RuntimeError('of the folder')")
    sys.modules.pop("fractions", None)
    with pytest.raises(TargetError, match="unknown name 'nothing'"):
        load("fractions:nothing")


def test_a_file_that_is_called_like_a_module_is_loaded_all_the_same(folder: Path) -> None:
    (folder / "json.py").write_text("def double(x):\n    return x + x\n")
    case = load("json.py:double", "float32[2]")
    assert case.run(case.target)().shape == (2,) and sys.modules["json"] is json


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["no_such:f"], 1, "forge: no_such:f: there is no module 'no_such'\n"),
        (["programs.nothing:f"], 1, "forge: programs.nothing:f: there is no module 'programs.nothing'\n"),
        (["no/such.py:f"], 1, "forge: no/such.py: there is no such file\n"),
        (["./programs:f"], 1, "forge: ./programs:f: './programs' is no name of a module; a file's ends with .py\n"),
        (["programs.py"], 1, "forge: programs.py: NAME is missing; it has Group, Net, closure"),
        (["programs:mke"], 1, "forge: programs:mke: unknown name 'mke'; did you mean 'make'? known: Group, Net"),
        (["torch:nosuch"], 1, "forge: torch:nosuch: unknown name 'nosuch'; did you mean 'cosh'?\n"),
        (["torch:"], 1, "forge: torch:: NAME is missing; it has "),
        (["programs:layer", "-i", "float32[2,4]"], 1, LAYER),
        (["programs:number"], 1, "forge: programs:number: is 3, but must be a module, a function, or a function that"),
        (["programs:raises"], 1, "forge: programs:raises raised RuntimeError: no weights (programs.py:46)\n"),
        (["programs:leaves"], 1, "forge: programs:leaves raised SystemExit: bye (programs.py:50)\n"),
        (["programs:product"], 1, "forge: programs:product: takes x, w, but with its inputs: missing a required arg"),
        (
            ["programs:wrong", "-i", "float32[2,4]"],
            1,
            f"forge: programs:wrong raised RuntimeError: {NAMED['mm']}mat1 and ",
        ),
        (["programs:Net", "--set", "wide=3"], 1, "forge: programs:Net: cannot be called with what --set gives: got"),
        (["programs:module", "--set", "width=3"], 1, "forge: programs:module: is made already, so that --set width c"),
        (["programs:make", "--device", "cuda:9999"], 1, "forge: --device cuda:9999 cannot be used: "),
        (["programs:make", "--device", "gpu"], 2, "forge trace: invalid value for --device: 'gpu' is no device of"),
        (["programs:make", "--dtype", "int64"], 2, "forge trace: invalid value for --dtype: 'int64' is no floating-"),
        (["programs:make", "--set", "width"], 2, "forge trace: invalid value for --set: 'width' is not NAME=VALUE"),
        (["programs:make", "--executors", "trch"], 2, "forge trace: invalid value for --executors: unknown executor"),
        (["programs:make", "-i", "float32[2"], 2, "forge trace: invalid value for --input: 'float32[2' is neither"),
        (["programs:make", "--stage", "9"], 2, "forge trace: invalid value for --stage: '9' is none of 0 recorded f"),
        (["programs:make", "--stage", "none"], 2, "forge trace: invalid value for --stage: 'none' is none of 0 rec"),
        (["programs:make", "--levels", "0"], 2, "forge trace: invalid value for '--levels': "),
        (["programs:make", "--nonsense"], 2, "forge trace: no such option: --nonsense"),
        ([], 2, "forge trace: missing argument 'TARGET'"),
    ],
)
def test_an_error_is_one_line_that_names_the_argument(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left, out, err = run(capsys, "trace", *arguments)
    told = err.replace("imported\n", "").replace("made\n", "")
    assert (left, out) == (status, "") and told.startswith(said) and told.count("\n") == 1, err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trace x --levels a", "'--levels': 'a' is not a whole number"),
        ("trace x --levels 1.5", "'--levels': '1.5' is not a whole number"),
        ("trace x --levels 0", "'--levels': 0 is less than 1"),
        ("bench x --rounds -3", "'--rounds': -3 is less than 1"),
        ("trace x --seed 1e999", "'--seed': '1e999' is not a whole number"),
        ("kernels build x -j a", "'--jobs' / '-j': 'a' is not a whole number"),
        ("kernels verify x --seconds abc", "'--seconds': 'abc' is not a number"),
        ("kernels list --trust me", "'--trust': 'me' is not one of 'locked', 'publisher', 'any'"),
        ("kernels new x --kind fortran", "'--kind': 'fortran' is not one of 'cpp', 'triton'"),
    ],
)
def test_a_value_of_a_wrong_type_is_told_in_the_words_of_a_command_line(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newer versions of typer would print pydantic's message: Input should be a valid integer."""
    command = "forge " + line.partition(" x" if " x" in line else " --")[0]
    assert run(capsys, *line.split()) == (2, "", f"{command}: invalid value for {said} ({command} --help)\n")


def test_debug_shows_the_traceback_at_either_place(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "trace", "programs:raises"], ["trace", "programs:raises", "--debug"]):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (1, "") and "Traceback" in err and 'raise RuntimeError("no weights' in err


def test_an_error_of_forges_own_is_one_line_with_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("forge.debug.doctor.examine", fail)
    assert run(capsys, "doctor") == (1, "", "forge: AssertionError: a bug (--debug shows where)\n")


# inputs


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("float32[4,8]", (4, 8), torch.float32),
        ("bf16[2, 3]", (2, 3), torch.bfloat16),
        ("double[]", (), torch.float64),
        ("complex64[2]", (2,), torch.complex64),
        ("bool[3]", (3,), torch.bool),
        ("int64[0,2]", (0, 2), torch.int64),
        ("i32[2,16]<1000", (2, 16), torch.int32),
        ("uint8[5]<256", (5,), torch.uint8),
    ],
)
def test_an_input_has_a_dtype_and_a_shape(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for given in (text, f"x={text}"):
        args, kwargs = inputs.parse_inputs([given], torch.device("cpu"))
        (made,) = (*args, *kwargs.values())
        assert (tuple(made.shape), made.dtype) == (shape, dtype) and set(kwargs) <= {"x"}


def test_integers_are_below_what_is_said() -> None:
    (few, usual), _ = inputs.parse_inputs(["int64[1000]<3", "int64[1000]"], torch.device("cpu"))
    assert set(few.tolist()) == {0, 1, 2} and set(usual.tolist()) == set(range(inputs.BELOW))


def test_literals_are_inputs_and_settings() -> None:
    given = ["(1, 2)", "dim=-1", "mode='tanh'", "flag=True", "nothing=None"]
    named = {"dim": -1, "mode": "tanh", "flag": True, "nothing": None}
    assert inputs.parse_inputs(given, torch.device("cpu")) == (((1, 2),), named)
    assert inputs.parse_settings(["a=3", "b=gelu", "c=[1]", "d="]) == {"a": 3, "b": "gelu", "c": [1], "d": ""}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["flat[4]"], "has no dtype of torch, but 'flat'"),
        (["float32[4,a]"], "has no list of lengths, but '4,a'"),
        (["float32[-1]"], "has no list of lengths, but '-1'"),
        (["float32[4"], "is neither a tensor nor a literal"),
        (["float32[4]<3"], "has something else behind < than a positive number, or no dtype of integers"),
        (["int64[4]<0"], "has something else behind < than a positive number"),
        (["x=int8[2]", "int8[2]"], "is positional, but stands behind a named one"),
        (["x=1", "x=2"], "is the second of that name"),
        ([""], "is empty"),
    ],
)
def test_an_input_of_wrong_syntax_is_named_with_what_is_wanted(given: list[str], reason: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        inputs.parse_inputs(given, torch.device("cpu"))
    assert str(caught.value).startswith(f"{given[-1]!r} {reason}") and "wanted is [NAME=]DTYPE[LENGTH" in str(
        caught.value
    )


# models of transformers


@pytest.mark.parametrize("name", ["llama", "GPT2Config", "bert", "t5", "vit", "BertForTokenClassification", "gemma3"])
def test_a_model_of_transformers_is_made_small_with_inputs_and_labels(name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    case = load(name, training=True)
    assert sum(each.numel() for each in case.target.parameters()) < 1_000_000
    case.run(case.target)()
    assert any(each.grad is not None for each in case.target.parameters())
    case = load(name)
    assert "labels" not in case.kwargs
    case.run(case.target)()


def test_settings_and_inputs_go_before_those_of_a_small_model() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    case = load("gpt2", "input_ids=int64[3,5]<7", training=True, num_hidden_layers=1, n_embd=32)
    assert (case.target.config.n_layer, case.target.config.n_embd) == (1, 32)
    assert case.kwargs["labels"].shape == (3, 5)


def test_a_model_or_a_field_that_is_unknown_is_told_with_the_near_ones() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(
        TargetError, match=r"unknown model type of transformers 'lama'; did you mean 'llama'.*module:name"
    ):
        load("lama")
    with pytest.raises(TargetError, match=r"--set: unknown field of LlamaConfig 'num_layer'.* did you mean"):
        load("llama", num_layer=1)
    with pytest.raises(TargetError, match=r"error for field 'num_hidden_layers': TypeError: .* expected int, got str"):
        load("llama", num_hidden_layers="x")


def test_without_transformers_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TargetError, match=r"^'llama' is neither module:name .* pip install transformers$"):
        load("llama")


# trace


def test_trace_prints_the_program_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "trace", "programs.py:make", "--executors", "torch")
    assert (status, err) == (0, "imported\nmade\n"), "what the user's code prints is not the command's"
    compile(out, "printed", "exec")
    assert out.startswith("# computation, lifetimes") and "programs.py:17" in out


def test_trace_of_a_training_step_is_its_forward_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("trace", "torch.nn.functional:gelu", "--input", "float32[4]")
    assert run(capsys, *call, "--train")[1].count("\ndef ") == 2
    out = run(capsys, *call, "--backward")[1]
    assert out.startswith("# backward, lifetimes") and out.count("\ndef ") == 1


def test_stages_are_chosen_by_number_by_a_part_of_the_name_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    def stages(*which: str) -> list[str]:
        out = run(capsys, "trace", "programs:make", *which)[1]
        return [line.partition(", ")[2].partition(":")[0] for line in out.splitlines() if line.startswith("# comp")]

    every = ["recorded from Dynamo", "dce", "cse", "row_products", "claim", "fuse", "lifetimes"]
    assert stages("--stage", "all") == every
    assert stages("--stage", "1") == stages("--stage", "-6") == stages("--stage", "dce") == ["dce"]
    assert stages() == ["lifetimes"]
    listed = run(capsys, "trace", "programs:make", "--stage", "list")[1].splitlines()
    assert [line.split(maxsplit=3)[2:] for line in listed[1:]] == [[str(n), name] for n, name in enumerate(every)]


def test_levels_show_what_a_call_consists_of(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("trace", "programs:make", "--stage", "0")
    assert "#   linear = " not in run(capsys, *call)[1]
    assert "prims." in run(capsys, *call, "--levels", "4")[1]


def test_trace_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = json.loads(run(capsys, "trace", "programs:make", "--train", "--stage", "all", "--json")[1])
    assert {"graph": 0, "phase": "forward", "number": 0, "stage": "recorded from Dynamo"}.items() <= first.items()
    assert "def computation" in first["text"]


def test_every_graph_of_a_program_that_breaks_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "trace", "programs:on_value", "--input", "float32[4]")
    assert status == 0 and out.count("\ndef ") == 2


def test_where_nothing_is_compiled_trace_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plain.py").write_text("def add(x):\n    return x + 1\n")
    said = "forge: plain:add: nothing was compiled; forge explain says why\n"
    assert run(capsys, "trace", "plain:add", "--input", "3") == (1, "", said)


# explain and bench


def test_explain_as_text_json_and_html(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "programs:make", "--train")
    assert status == 0 and "torch.relu" in out and "backward" in out
    status, out, err = run(capsys, "explain", "programs:make", "--json", "--html", "report.html")
    assert status == 0 and "forge: the report is in report.html\n" in err
    assert json.loads(out)["graphs"] == 1
    assert "torch.relu" in (folder / "report.html").read_text()


def test_bench_compares_systems_in_turn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bench, "in_turn", _as_if({"eager": 2e-3, "torch.compile": 1e-3, "forge": 5e-4}))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    status, out, _ = run(capsys, "bench", "programs.py:make", "--train", "--rounds", "3")
    assert status == 0 and out.startswith("programs.py:make, a training step on cpu, torch")
    cells = [line.split()[:-2] for line in out.splitlines()[3:]]
    assert cells == [
        ["eager", "2.00", "ms", "1.00", "2.00"],
        ["torch.compile", "1.00", "ms", "0.50", "1.00"],
        ["forge", "500.0", "µs", "0.25", "0.50"],
    ]
    found = json.loads(run(capsys, "bench", "programs:make", "--only", "eager,forge", "--json", "--rounds", "3")[1])
    assert [each["name"] for each in found["systems"]] == ["eager", "forge"]
    assert found["systems"][1]["of_eager"] == 0.25 and found["systems"][1]["of_torch_compile"] is None
    assert len(found["systems"][0]["rounds"]) == 3 and found["training"] is False


def _as_if(seconds: dict[str, float]) -> Any:
    return lambda runs, *, rounds, batch_seconds: {name: [seconds[name]] * rounds for name in runs}


def test_each_system_is_timed_once_a_round_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "seconds_per_call", lambda run, calls: order.append(run()) or float(len(order)))
    found = timing.in_turn({"a": lambda: "a", "b": lambda: "b"}, rounds=3)
    assert order[4:] == ["a", "b"] * 3 and found == {"a": [5.0, 7.0, 9.0], "b": [6.0, 8.0, 10.0]}
    assert timing.ratio([2.0, 9.0, 3.0], [1.0, 3.0, 3.0]) == 2.0


def test_a_system_that_fails_is_told_and_the_others_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(function: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(model_bench, "in_turn", _as_if({"eager": 2e-3, "forge": 1e-3}))
    status, out, _ = run(capsys, "bench", "programs:make")
    assert status == 1 and "\nforge  1.00 ms  0.50" in out
    assert out.endswith("torch.compile failed: RuntimeError: no compiler\n")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "shard"])
def test_bench_runs_in_several_processes(plan: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    options = ["--train", "--nproc", "2", "--plan", plan, "--only", "eager,forge", "--rounds", "2", "--json"]
    status, out, err = run(capsys, "bench", "programs.py:make", *options)
    assert status == 0, err
    found = json.loads(out)
    assert (found["processes"], found["plan"], found["training"]) == (2, plan, True)
    assert [each["name"] for each in found["systems"]] == ["eager", "forge"]
    assert all(each["reason"] is None and len(each["rounds"]) == 2 for each in found["systems"])


def test_only_a_module_is_shared_by_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "bench", "torch:sin", "--input", "float32[2]", "--nproc", "2")
    assert status == 1 and "torch:sin: is no module with parameters" in err


def test_an_unknown_system_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "bench", "programs:make", "--only", "egaer")
    assert status == 2 and "--only: 'egaer' is none of eager, torch.compile, forge" in err


def test_each_system_has_a_module_of_its_own() -> None:
    seen = []
    system = model_bench.System("seen", lambda target: seen.append(target) or target)
    model_bench.compare(load("programs:make"), [system, model_bench.System("again", system.prepare)], rounds=1)
    assert seen[0] is not seen[1]


# export and run


@pytest.mark.slow
def test_export_writes_a_file_that_run_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "linear.pt2")
    linear = "torch.nn:Linear --set in_features=8 --set out_features=4".split()
    status, out, err = run(
        capsys, "export", *linear, "--input", "float32[2,8]", "--dynamic", "input:0=2..9", "-o", file
    )
    assert (status, err) == (0, "") and "AOTInductor package" in out and "≤ 9" in out
    digest = out.splitlines()[-1].removeprefix("digest: ")
    assert forge.load(file, digest=digest).entry_points.keys() == {"model"}
    status, out, err = run(capsys, "run", file, "--input", "input=float32[5,8]")
    assert (status, err) == (0, "") and out.startswith("result: f32[5, 4] from ")
    assert run(capsys, "run", file)[1].startswith("result: f32[2, 4] from ")
    status, _, err = run(capsys, "run", file, "--input", "float32[10,8]")
    assert (status, err) == (1, "forge: input: dim 0 is 10, but must be at least 2 and at most 9\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("export torch.nn:ReLU -i float32[2] -o relu.pt", "--output: 'relu.pt' does not end with .pt2"),
        ("export torch.nn:ReLU -i float32[2] -o none/relu.pt2", "--output: there is no folder none"),
        ("export torch.nn:ReLU -i float32[2] -o relu.pt2 --train", "--train: an exported program has no backward"),
        ("export torch.nn:ReLU -i float32[2] -o relu.pt2 --dynamic y:0", "--dynamic: 'y:0' is not NAME:DIM"),
    ],
)
def test_wrong_option_of_export_is_a_usage_error(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *line.split())
    assert status == 2 and problem in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.pt*"))


def test_run_of_what_is_no_file_of_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pt2").write_text("x")
    status, _, err = run(capsys, "run", str(tmp_path / "x.pt2"))
    assert status == 1 and "is no zip file" in err and err.count("\n") == 1


# help


def _commands() -> list[str]:
    root = typer.main.get_command(app)
    found = ["forge"]
    for name, command in root.commands.items():
        found += [f"forge {name}", *(f"forge {name} {inner}" for inner in getattr(command, "commands", ()))]
    return found


@pytest.mark.parametrize("command", _commands())
def test_help_fits_ends_with_examples_and_explains_every_option(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        status, out, err = run(capsys, *command.split()[1:], "--help")
        assert (status, err) == (0, "") and out.startswith(f"Usage: {command} ")
        examples = out.partition("\nExamples\n")[2]
        assert examples and all(f"{line}\n" in examples for line in help.EXAMPLES[command])
        assert max(map(len, out.splitlines())) <= min(columns, 110)
        assert not any(line.endswith(" ") for line in out.splitlines())
    assert run(capsys, *command.split()[1:], "-h")[1] == out
    found = typer.main.get_command(app)
    for name in command.split()[1:]:
        found = found.commands[name]
    shown = [each for each in found.params if each.param_type_name == "option"]
    assert all(each.help and each.opts[-1] in out for each in shown)


def test_a_command_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["kernels"]):
        status, out, err = run(capsys, *arguments)
        assert (status, err) == (2, "") and out.startswith("Usage: forge") and "Examples" in out


def test_commands_are_listed_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--help")[1]
    places = [out.index(f"\n  {name} ") for name in ("trace", "explain", "bench", "export", "run", "doctor", "kernels")]
    assert places == sorted(places)


def test_a_mistyped_command_or_option_is_one_line_with_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "trac") == (2, "", "forge: no such command 'trac'. Did you mean 'trace'? (forge --help)\n")
    err = run(capsys, "doctor", "--jsno")[2]
    assert err.startswith("forge doctor: no such option: --jsno") and "--json" in err and err.count("\n") == 1


LONG = ("forge bench", "forge export", "forge run")
TARGETS = [
    pytest.param(command, line, marks=[pytest.mark.slow] if position or line.startswith(LONG) else [])
    for command, lines in help.EXAMPLES.items()
    for position, line in enumerate(lines)
    if not command.startswith("forge kernels")
]


@pytest.mark.parametrize(("command", "line"), TARGETS, ids=lambda text: text.replace("\\\n", ""))
def test_the_examples_of_the_help_run(
    command: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.chdir(tmp_path)
    if command == "forge run":  # the file of the last example of forge export
        run(capsys, *shlex.split(help.EXAMPLES["forge export"][-1])[1:])
    monkeypatch.setattr(model_bench, "BATCH", 0.0)
    name, *arguments = shlex.split(line.replace("\\\n", ""), comments=True)
    assert name == "forge" and line.startswith(command)
    status, out, err = run(capsys, *arguments)
    assert out and (status == 0 or "doctor" in arguments), err


# completion, and the program itself


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("forge tr", ["trace"]),
        ("forge kernels v", ["verify"]),
        ("forge explain --ht", ["--html"]),
        ("forge trace x --executors induc", ["inductor", "inductor-whole"]),
        ("forge trace x --executors inductor,t", ["inductor,torch", "inductor,torch-prims"]),
        ("forge trace x --dtype bf", ["bfloat16"]),
        ("forge bench x --only eager,", ["eager,forge", "eager,torch.compile"]),
        ("forge kernels list --trust p", ["publisher"]),
    ],
)
def test_the_shell_completes(
    words: str, found: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_FORGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert sorted(run(capsys)[1].split()) == found


def test_a_script_for_the_shell_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    status, out, _ = run(capsys, "--show-completion")
    assert status == 0 and "complete " in out and "_FORGE_COMPLETE=complete_bash" in out


def test_python_m_forge_finds_modules_of_the_current_folder() -> None:
    command = [sys.executable, "-m", "forge", "trace", "programs:make", "--executors", "torch"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0 and "torch.relu" in ran.stdout, ran.stderr


# imports of the installed command


AT_ONCE = """
import contextlib, io, os, sys
from forge.cli import main

def run(*arguments, **environment):
    sys.argv = ["forge", *arguments]
    os.environ.update(environment)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    for name in environment:
        del os.environ[name]
    return printed.getvalue()

assert run("--version").startswith("forge "), "the version"
for command in {commands!r}:
    assert run(*command.split()[1:], "--help").startswith(f"Usage: {{command}} "), command
words = "forge trace x --executors inductor,t"
completed = run(_FORGE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="4")
assert completed.split() == ["inductor,torch", "inductor,torch-prims"], completed
heavy = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
assert not heavy, heavy
"""


def test_version_help_and_completion_import_no_torch() -> None:
    ran = _python("-c", AT_ONCE.format(commands=_commands()))
    assert ran.returncode == 0, ran.stderr


def test_the_installed_command_runs_with_all_of_forge(folder: Path) -> None:
    (folder / "own.py").write_text("import forge\nsine = forge.jit(lambda x: x.sin())\n")
    arguments = ("trace", "own.py:sine", "--input", "float32[4]", "--executors", "torch")
    ran = _python("-m", "forge", *arguments)
    assert ran.returncode == 0 and "torch.sin" in ran.stdout, ran.stderr


def _python(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_names_that_are_completed_are_those_of_the_registries() -> None:
    ran = _python("-c", "from forge.executors.registry import known_executors as known; print(*known())")
    assert set(names.EXECUTORS) == set(ran.stdout.split()), ran.stderr  # of a process in which no test has added one
    assert tuple(model_bench.systems()) == names.SYSTEMS
    assert (names.KINDS, names.LOCK_FILE) == (builder.KINDS, lockfile.DEFAULT_NAME)
    assert all(inputs.parse_dtype(name) is getattr(torch, name) for name in names.DTYPES)


def test_each_command_has_an_action_that_takes_what_it_declares() -> None:
    for module in ("doctor", "files", "kernels", "programs"):
        declared = vars(importlib.import_module(f"forge.cli.{module}"))
        actions = importlib.import_module(f"forge.cli.actions.{module}")
        for name, function in declared.items():
            if inspect.isfunction(function) and function.__module__ == f"forge.cli.{module}" and name[0] != "_":
                taken = inspect.signature(getattr(actions, name)).parameters
                assert list(taken) == list(inspect.signature(function).parameters), name
