"""The command forge kernels bench: its calls, inputs and report; nothing here is really timed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import cli
from forge.benchmark import kernel_bench
from forge.benchmark.kernel_bench import bench, parse_shapes
from forge.executors.executor import decline
from forge.executors.hubex.verification.messages import Answer
from forge.executors.inductorex import inductorex
from forge.support import timing
from tests.hub.kernels import metadata

MANIFEST = """\
forge_kernels: 1
library: {name: acme}
ops:
- pattern: rms_norm
  type_alias: {T: [float32, bfloat16]}
  kernels:
  - name: norm
    kernel_name: norm
    device: cpu
    arg_meta: {x: T, weight: T}
    shape: {x: "[..., H]", weight: "[H]"}
    where: "H % 24 == 0"
    grad: composite
"""
CODE = "import torch\ndef norm(x, weight, eps):\n    return torch.rms_norm(x, weight.shape, weight, eps)\n"
SECONDS = {"acme.norm": 1e-6, "norm": 1e-6, "eager": 4e-6, "reference": 8e-6, "inductor": 2e-6}


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the candidates of each timing: each is called once, and takes its time in SECONDS."""
    found: list[list[str]] = []

    def fake(runs: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
        found.append(list(runs))
        for run in runs.values():
            run()
        return {name: SECONDS[name] for name in runs}

    monkeypatch.setattr(timing, "time_candidates", fake)
    monkeypatch.setattr(inductorex, "can_fuse", lambda bound: decline("not here"))  # it takes seconds to compile
    return found


def norm(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def kernel(function: Callable = norm, op: str = "pattern:rms_norm", **options: Any) -> Any:
    options = {"dtypes": [torch.float32], "shape": {"x": "[..., H]", "weight": "[H]"}, **options}
    return forge.executors.hubex.gather([forge.kernel(op, function, **options)])[0]


def written(folder: Path) -> str:
    variant = folder / "norms/build/torch-universal"
    variant.mkdir(parents=True)
    files = {"__init__.py": CODE, "metadata.json": metadata("norms"), "forge_kernels.yaml": MANIFEST}
    for name, text in files.items():
        (variant / name).write_text(text)
    return str(folder / "norms")


def test_a_kernel_is_timed_against_eager_and_its_reference_on_sizes_that_its_constraints_allow(ran: list) -> None:
    found = list(bench([kernel(where="H % 24 == 0")]))
    assert ran == [["norm", "eager", "reference"]] * len(kernel_bench.SIZES)
    assert all(each.reasons == {"inductor": "not here"} for each in found)
    for each, size in zip(found, kernel_bench.SIZES, strict=True):
        assert size / 4 < each.elements <= size
        width = int(each.arguments.split("float32[")[-1].rstrip("]"))
        assert width % 24 == 0 and width > 500
        assert each.bytes == 4 * (2 * each.elements + width)
    assert [found[0].ratio(who) for who in ("norm", "eager", "reference")] == [0.25, 1, 2]


def test_lengths_that_belong_together_grow_together() -> None:
    def layer(input, normalized_shape, weight, bias, eps):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    shapes = {"input": "[N, H]", "weight": "[H]", "bias": "[H]"}
    made = kernel(layer, "torch.nn.functional.layer_norm", shape=shapes, where="normalized_shape == (H,)")
    *_, largest = bench([made])
    assert largest.seconds and largest.elements > 1 << 20


def test_lengths_do_not_grow_past_what_the_constraints_allow() -> None:
    *_, largest = bench([kernel(where="H <= 100")])
    assert int(largest.arguments.split("float32[")[-1].rstrip("]")) <= 100 and largest.elements > 1 << 20


def test_the_backward_is_timed_with_the_forward() -> None:
    (found,) = bench([kernel(grad="composite")], shapes=[[(4, 8), (8,)]], backward=True)
    assert found.seconds.keys() == {"norm", "eager", "reference"}
    assert found.bytes == 4 * (2 * 40 + 2 * 32 + 40)
    (found,) = bench([kernel()], shapes=[[(4, 8), (8,)]], backward=True)
    assert found.reasons == {"norm": "it has no gradient"} and not found.seconds


def test_what_is_not_verified_is_not_timed(ran: list) -> None:
    wrong = SimpleNamespace(answer=lambda kernel, question: Answer("it is wrong"))
    (found,) = bench([kernel()], verifier=wrong)
    assert found.reasons == {"norm": "it is wrong"} and ran == []
    right = SimpleNamespace(answer=lambda kernel, question: Answer(None, 3))
    assert all("norm" in each.seconds for each in bench([kernel()], verifier=right))


def test_a_kernel_that_raises_on_a_size_is_told_and_the_others_are_timed() -> None:
    def narrow(x, weight, eps):
        if x.shape[-1] > 100:
            raise RuntimeError("too wide\nfor me")
        return norm(x, weight, eps)

    found = list(bench([kernel(narrow)], shapes=[[(2, 64), (64,)], [(2, 128), (128,)]]))
    assert [sorted(each.seconds) for each in found] == [["eager", "narrow", "reference"], ["eager", "reference"]]
    assert found[1].reasons["narrow"] == "RuntimeError: too wide"


@pytest.fixture(autouse=True)
def _more_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "narrow", 1e-6)
    monkeypatch.setitem(SECONDS, "layer", 1e-6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"op": "foo"}, "op is 'foo', but the kernels are of pattern:rms_norm"),
        ({"dtype": torch.int8}, "int8 was asked for, but the kernels are for float32 on cpu"),
        ({"device": torch.device("meta")}, "on meta was asked for, but the kernels are for float32 on cpu"),
        ({"shapes": [[(2, 3)]]}, r"norm: 1 shape given, but it is called with 2 tensors \(x, weight\), such as \d"),
        ({"shapes": [[(2, 5), (5,)]]}, r"norm: does not take 2x5,5: H % 8 == 0"),
    ],
)
def test_what_no_kernel_is_for_is_an_error(options: dict[str, Any], problem: str) -> None:
    made = kernel(where="H % 8 == 0", device="cpu")
    with pytest.raises(ValueError, match=problem):
        list(bench([made], **options))


@pytest.mark.parametrize("text", ["", "a", "2x", "2,,3", "-1x2"])
def test_shapes_that_are_none_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="but must be the shape of each tensor, such as 2x512,512"):
        parse_shapes(text)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    options = ["--unverified", "--dtype", "float32", "--shapes", "2x3x48,48", "--json", str(out)]
    assert cli.main(["kernels", "bench", written(tmp_path), *options]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "arguments", "who", "time", "of", "eager", "bandwidth"]
    assert [line.split() for line in lines[:2]] == [
        "acme.norm float32[2, 3, 48], float32[48] acme.norm 1.0 µs 0.25 2.5 GB/s".split(),
        "acme.norm float32[2, 3, 48], float32[48] eager 4.0 µs 1.00 0.6 GB/s".split(),
    ]
    (result,) = json.loads(out.read_text())["results"]
    assert (result["elements"], result["bytes"], result["operation"]) == (288, 2496, "pattern:rms_norm")
    assert [each["name"] for each in result["candidates"]] == ["acme.norm", "eager", "reference", "inductor"]
    assert result["candidates"][0]["bytes_per_second"] == pytest.approx(2496e6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dtype", "float33"], "--dtype is 'float33', but must be a dtype of torch, such as float32"),
        (["--device", "q"], "--device is 'q', but must be a device of torch, such as cuda:0"),
        (["--shapes", "2y3"], "--shapes is '2y3', but must be the shape of each tensor"),
        (["--plot", "x.png"], "--plot needs matplotlib"),
        (["--json", "no/such.json"], "--json is 'no/such.json', but there is no folder no"),
        (["--plot", "no/such.png"], "--plot is 'no/such.png', but there is no folder no"),
    ],
)
def test_options_that_are_wrong_are_one_line_before_anything_is_loaded(
    options: list[str], problem: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["kernels", "bench", "nowhere/at-all", *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"forge: {problem}") and said.count("\n") == 1


def test_a_plot_has_a_line_for_each_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, list[int]]] = []

    class Axis:
        def plot(self, sizes: Any, times: Any, *, marker: str, label: str) -> None:
            drawn.append((label, list(sizes)))

        def set(self, **options: Any) -> None: ...
        def legend(self) -> None: ...

    saved: list[Path] = []
    figure = SimpleNamespace(savefig=saved.append)
    pyplot = SimpleNamespace(subplots=lambda count, **options: (figure, [[Axis()]] * count), close=lambda figure: None)
    monkeypatch.setattr(kernel_bench.importlib, "import_module", lambda name: pyplot)
    draw = kernel_bench.plotter(tmp_path / "x.png")
    monkeypatch.undo()
    result = kernel_bench.Bench("k", "op", "float32", "cpu", elements=8, seconds={"k": 1.0, "eager": 2.0})
    draw([result])
    assert drawn == [("k", [8]), ("eager", [8])] and saved == [tmp_path / "x.png"]


@pytest.mark.slow
def test_the_fuser_is_timed_as_one_region(monkeypatch: pytest.MonkeyPatch, ran: list) -> None:
    monkeypatch.delattr(inductorex, "can_fuse")
    (found,) = bench([kernel()], shapes=[[(4, 8), (8,)]])
    assert ran == [["norm", "eager", "reference", "inductor"]] and not found.reasons


def test_a_kernel_that_is_slower_than_another_candidate_is_told_the_remedy() -> None:
    def timed(kernel: str, **seconds: float) -> kernel_bench.Bench:
        return kernel_bench.Bench(kernel, "op", "float32", "cpu", seconds=seconds)

    results = [
        timed("k", k=4.0, eager=5.0, inductor=1.0),
        timed("k", k=1.0, eager=5.0),
        timed("fast", fast=1.0, eager=1),
    ]
    assert kernel_bench.slower_kernels(results) == [
        "k is slower than inductor in 1 of 2 calls: say in faster where it is the faster one, or give forge.jit "
        "select='measured'"
    ]
