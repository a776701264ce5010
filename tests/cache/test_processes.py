"""Processes that share their compiled programs."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from forge.executors.inductorex import inductorex

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
import torch
from torch import nn
import forge
from forge.capture import dynamo

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2))
x = torch.randn(6, 4)
jitted = forge.jit(model)
if "from-disk" in sys.argv:
    dynamo.record = lambda *args: sys.exit("a graph is recorded")
with torch.no_grad():
    inferred = jitted(x).tolist()
y = jitted(x)
y.square().sum().backward()
explained = forge.explain(jitted)
gradients = [each.grad.tolist() for each in model.parameters()]
fused = sum(row.executor == "inductor" for row in explained.rows)
print(json.dumps([explained.cached, fused, [inferred, y.tolist(), gradients]]))
"""


def start(executors: str, *arguments: str, program: str = PROGRAM) -> subprocess.Popen:
    environment = {**os.environ, "FORGE_EXECUTORS": executors, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return out


def result(text: str) -> str:
    return text.partition("[[")[2]


EXECUTORS = [
    pytest.param("hub,torch", marks=pytest.mark.slow),
    pytest.param(
        "inductor,torch",
        marks=pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels"),
    ),
]


@pytest.mark.parametrize("executors", EXECUTORS)
def test_a_second_process_compiles_nothing(executors: str) -> None:
    first = printed(start(executors))
    second = printed(start(executors, "from-disk"))
    assert (first[:3], second[:3]) == ("[0,", "[2,")
    assert first[3:] == second[3:]  # fusions, results and gradients, to the last bit
    assert (first.split(", ")[1] == "0") == ("inductor" not in executors)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_regions")
def test_a_region_whose_kernels_are_gone_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not inductorex.is_available():
        pytest.skip("there is no C++ compiler for Inductor's kernels")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    first = printed(start("inductor,torch"))
    for library in (tmp_path / "inductor").rglob("*.so"):
        library.unlink()
    assert result(printed(start("inductor,torch", "from-disk"))) == result(first)


FUSED = """
import torch, forge
torch.manual_seed(0)
x = torch.randn(64, requires_grad=True)
jitted = forge.jit(lambda x: (x.exp() + 1).log().tanh() * x)
y = jitted(x)
y.sum().backward()
assert {row.executor for row in forge.explain(jitted).rows} == {"inductor"}
print(y.tolist(), x.grad.tolist())
"""


def damage(library: Path) -> None:
    """Invert the second half of a shared object's code, which holds its kernels: it still loads."""
    data = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<3H", data, 0x3A)
    sections = [struct.unpack_from("<2I4Q", data, table + size * number) for number in range(count)]
    (code,) = [each for each in sections if data[sections[names][4] + each[0] :].startswith(b".text\0")]
    start, end = code[4] + code[5] // 2, code[4] + code[5]
    data[start:end] = bytes(255 - each for each in data[start:end])
    library.write_bytes(data)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(sys.platform != "linux", reason="its shared objects are no ELF files")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
@pytest.mark.parametrize(
    ("cache", "threads"),
    [("1", "1"), ("1", "2"), ("0", "2")],
    ids=["Inductor's own", "units of kernels", "no programs"],
)
def test_damaged_kernels_are_built_again(
    cache: str, threads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORGE_CACHE", cache)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", threads)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    first = printed(start("inductor,torch", program=FUSED))
    libraries = {path: path.read_bytes() for path in (tmp_path / "inductor").rglob("*.main.so")}
    assert len(libraries) == 2
    for library in libraries:
        damage(library)
    assert printed(start("inductor,torch", program=FUSED)) == first
    assert {path: path.read_bytes() for path in libraries} == libraries
    if cache == "1":
        third = start("inductor,torch", program=FUSED + "assert forge.explain(jitted).cached == 1")
        assert printed(third) == first


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
def test_kernels_that_are_gone_are_built_again_where_all_other_libraries_are_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernels report the processor's instruction sets: the rebuilt ones use the same."""
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    first = printed(start("inductor,torch", program=FUSED))
    for library in (tmp_path / "inductor").rglob("*.main.so"):
        library.unlink()
    others = list((tmp_path / "inductor").rglob("*.so"))
    assert others
    for library in others:
        os.truncate(library, library.stat().st_size // 2)
    assert printed(start("inductor,torch", program=FUSED)) == first


@pytest.mark.slow
def test_processes_that_write_at_once_leave_one_whole_entry(programs: Path) -> None:
    texts = [printed(process) for process in [start("hub,torch") for _ in range(3)]]
    assert len(set(map(result, texts))) == 1
    assert sorted(path.suffix for path in programs.iterdir()) == [".program", ".program"]
    assert printed(start("hub,torch", "from-disk")).startswith("[2,")


GROWING = """
import json, sys
import torch
from torch import nn
import forge
from forge.capture import dynamo

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
x = torch.randn(6, 4)
jitted = forge.jit(model, executors=["inductor", "torch"])
if "from-disk" in sys.argv:
    dynamo.record = lambda *args: sys.exit("a graph is recorded")
jitted(x).square().sum().backward()
found = {row.executor for row in forge.explain(jitted).rows}
assert forge.finish_compiling(jitted, timeout=300)
model.zero_grad()
y = jitted(x)
y.square().sum().backward()
expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
torch.testing.assert_close([each.grad for each in model.parameters()], list(expected))
torch.testing.assert_close(y, model(x))
print(json.dumps([sorted(found), sorted({row.executor for row in forge.explain(jitted).rows})]))
"""


@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
@pytest.mark.slow
def test_a_second_process_starts_with_the_larger_regions_of_a_small_program() -> None:
    first, second = [
        json.loads(printed(start("inductor,torch", *given, program=GROWING))) for given in ((), ("from-disk",))
    ]
    assert first == [["inductor", "torch"], ["inductor-whole"]]
    assert second == [["inductor-whole"], ["inductor-whole"]]


@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
@pytest.mark.slow
def test_a_small_program_from_disk_gets_larger_regions() -> None:
    without = GROWING.replace("assert forge.finish_compiling(jitted, timeout=300)", "")
    printed(start("inductor,torch", program=without))
    second, third = [
        json.loads(printed(start("inductor,torch", *given, program=GROWING))) for given in ((), ("from-disk",))
    ]
    assert second == [["inductor", "torch"], ["inductor-whole"]]
    assert third == [["inductor-whole"], ["inductor-whole"]]


LATER = """
import sys
import torch
import forge

def run(x, w):
    h = torch.softmax(x @ w, -1).sin() * x
    return h.exp() * 2 - h, h.cos().tanh() + 1

jitted = forge.jit(run, dynamic="dynamic" in sys.argv or None)
for rows in (6, 9):
    results = []
    for function in (jitted, run):
        torch.manual_seed(0)
        x, w = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64)
        first, second = function(x, w)
        (one,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
        (g,) = torch.autograd.grad(first.sum() + second.sum(), x, create_graph=True)
        (two,) = torch.autograd.grad(g.square().sum(), x)
        results.append((first, second, one, g, two))
    torch.testing.assert_close(*results)
explained = forge.explain(jitted)
assert "inductor" in {row.executor for row in explained.rows}
print(explained.cached, explained.uncached)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_what_is_compiled_later_in_regions_fits_what_was_found(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another output's gradient and a gradient of a gradient, of a program whose regions came from disk."""
    if not inductorex.is_available():
        pytest.skip("there is no C++ compiler for Inductor's kernels")
    environment = {**os.environ, "FORGE_EXECUTORS": "inductor,torch", "PYTHONPATH": str(ROOT)}
    for found in ("0 []", "1 []" if shapes == "dynamic" else "2 []"):
        command = [sys.executable, "-c", LATER, shapes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.strip() == found, done.stderr
