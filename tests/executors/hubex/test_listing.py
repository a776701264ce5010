"""The listing forge.kernels: the existing kernels, and whether they may be used."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import cli
from forge.executors.hubex import Verifier, gather, hubex, table_of, verifier
from forge.hub import HubNotice
from tests.hub.kernels import kernel, process_restored, write
from tests.hub.repositories import GELU, Repository


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """Start without kernels, even if a GPU has those that come with forge; restore those of the process afterwards."""
    with process_restored():
        hubex._kernels = []
        hubex.add([])
        yield


def silu(input: torch.Tensor) -> torch.Tensor:
    return input / (1 + torch.exp(-input))


def test_a_process_without_kernels_says_how_to_add_some() -> None:
    assert str(forge.kernels()) == "no kernels: forge.use_kernels([...]) adds some"


def test_every_kernel_has_its_status_and_reason() -> None:
    right = forge.kernel(F.silu, silu, dtypes=[torch.float32], grad="composite", where="input.ndim == 2", device="cpu")
    wrong = forge.kernel(F.silu, lambda input: silu(input) + 1, name="wrong", priority=3, device="cpu")
    absent = forge.kernel(F.silu, silu, name="absent", priority=1, device={"type": "xpu"})
    trusted = forge.kernel(
        F.gelu, F.gelu, name="trusted", device="cpu", args={"input": "input"}, where="approximate == 'none'"
    )
    forge.use_kernels([right, wrong, absent])
    forge.use_kernels([trusted], verify=False)
    assert [row.status for row in forge.kernels()][:3] == ["not verified yet", "declined", "not verified yet"]
    with pytest.warns(HubNotice, match="kernel wrong"):
        forge.jit(F.silu)(torch.randn(3, 4))
    rows = {row.kernel: row for row in forge.kernels()}
    assert list(rows) == ["wrong", "absent", "silu", "trusted"]  # in the order in which they are tried
    assert rows["wrong"].status == "declined" and rows["wrong"].reason.startswith("failed verification on input: ")
    assert (rows["absent"].status, rows["absent"].reason) == ("declined", "no xpu device is here")
    assert (rows["silu"].status, rows["silu"].reason) == ("verified", "")
    assert rows["trusted"].status == "trusted"
    assert rows["silu"].constraints == "cpu; input: T (float32); input.ndim == 2; derived gradient"
    assert rows["wrong"].constraints == "cpu; no gradient; priority 3"
    place, _, line = rows["silu"].place.rpartition(":")
    assert os.path.abspath(place) == os.path.abspath(__file__) and int(line) > 0
    assert [row.kernel for row in forge.kernels(op=F.gelu)] == ["trusted"]


def test_an_operator_that_there_is_not() -> None:
    assert forge.kernels(op="torch.nn.functional.gelu") == ()
    with pytest.raises(ValueError, match=r"^forge\.kernels: unknown operator 'torch\S+slu'; did you mean .*silu"):
        forge.kernels(op="torch.nn.functional.slu")


def test_a_verdict_on_disk_is_shown_in_another_process(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = Repository(tmp_path, "kept", "def f(x): return F.gelu(x)", **GELU, device="cpu")
    assert [row.status for row in forge.kernels([made.folder])] == ["not verified yet"]
    forge.jit(F.gelu, kernels=[made.folder])(torch.randn(4))
    assert [row.status for row in table_of(gather([made.folder]), Verifier())] == ["verified"]  # as another process
    verifier._answers.clear()
    assert cli.main(["kernels", "list", str(made.folder)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["op", "kernel", "device", "status"]
    assert row.split()[:4] == ["torch.nn.functional.gelu", "acme.kept", "cpu", "verified"]


def test_the_order_that_is_shown_is_the_order_of_claiming() -> None:
    """An operator may be declared under any of its names: torch.add and aten::add.Tensor."""
    options = {"dtypes": [torch.float32]}
    kernels = [
        forge.kernel("aten::add.Tensor", lambda self, other, alpha: self, name="late", device="cpu"),
        forge.kernel("torch.add", torch.add, name="odd", where="input.ndim == 7", priority=2, device="cpu"),
        forge.kernel("aten::add.Tensor", lambda self, other, alpha: self + other * alpha, name="typed", **options),
        forge.kernel("torch.add", torch.add, name="never", device={"type": "xpu"}, priority=1),
    ]
    forge.use_kernels(kernels, verify=False)
    jitted = forge.jit(torch.add)
    torch.testing.assert_close(jitted(torch.ones(3), torch.ones(3)), torch.ones(3) + 1)
    (claim,) = forge.explain(jitted).rows
    shown = list(dict.fromkeys(row.kernel for row in forge.kernels(op=torch.add)))
    assert shown == ["odd", "never", "typed", "late"]
    assert [*(name for name, _ in claim.declined), claim.executor] == shown[:3]
    assert shown == forge.load_kernel("aten::add.Tensor").kernels
    after = {row.kernel: row.next for row in forge.kernels(op="torch.add") if row.device in ("cpu", "-")}
    assert after == {
        "odd": "never, where the constraints do not hold or a gradient is needed; its priority is lower (1, not 2)",
        "never": "typed, always; its priority is lower (0, not 1)",
        "typed": "late, where the constraints do not hold or a gradient is needed; it has fewer constraints (1, not 2)",
        "late": "what runs without kernels, where the constraints do not hold or a gradient is needed",
    }


def test_what_is_listed_of_a_source_is_what_an_executor_has_of_it(tmp_path: Path) -> None:
    """The key `replace` drops earlier declarations."""
    kernels = "  kernels: [{name: %s, kernel_name: 'python:torch.nn.functional:silu'}]\n"
    head = "forge_kernels: 1\nlibrary: {name: %s}\nops:\n- op: torch.nn.functional.silu\n"
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    paths[0].write_text(head % "a" + kernels % "first")
    paths[1].write_text(head % "b" + "  replace: true\n" + kernels % "second")
    assert {row.kernel for row in forge.kernels(paths)} == {"b.second"}
    assert forge.load_kernel(F.silu, kernels=paths).kernels == ["b.second"]


def test_one_operator_of_a_source_is_listed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = Repository(tmp_path, "kept", "def f(x): return F.gelu(x)", **GELU, device="cpu")
    assert cli.main(["kernels", "list", str(made.folder), "--json", "--op", "torch.nn.functional.gelu"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kernel"] == "acme.kept" and row["next"].startswith("what runs without kernels, where")
    assert cli.main(["kernels", "list", str(made.folder), "--op", "torch.add"]) == 0
    assert capsys.readouterr().out.startswith("no kernels")


LAYERS = """
from torch import nn

class Doubled(nn.Module):
    has_backward = False

    def forward(self, x, *, scale: float = 2.0):
        raise RuntimeError("a layer that is listed does not run")

class Halved(nn.Module):
    def forward(self, hidden_states):
        return hidden_states / 2

class _Own(nn.Module):
    pass
"""


def _with_layers(folder: Path) -> Path:
    """Write a repository without a manifest, whose __init__ must not run for the listing, and return its folder."""
    raising = "from . import layers\nraise RuntimeError('imported')\n"
    return write(folder, kernel({"layers.py": LAYERS, "__init__.py": raising}))


def test_the_layers_of_a_repository_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = _with_layers(tmp_path / "rms")
    assert cli.main(["kernels", "list", str(folder)]) == 0
    header, doubled, halved = capsys.readouterr().out.splitlines()
    assert header.split() == ["layer", "forward", "gradient", "place"]
    place = folder / "build" / "torch-universal" / "layers.py"
    assert doubled.split("  ")[:2] == ["rms.Doubled", "x, *, scale: float=2.0"]
    assert doubled.split()[-2] == "no" and doubled.endswith("layers.py:4")
    assert halved.split()[:3] == ["rms.Halved", "hidden_states", "yes"] and halved.endswith("layers.py:10")
    assert os.path.samefile(halved.split()[-1].rpartition(":")[0], place)
    assert cli.main(["kernels", "list", str(folder), "--json"]) == 0
    assert [row["layer"] for row in json.loads(capsys.readouterr().out)] == ["rms.Doubled", "rms.Halved"]


def test_layers_are_listed_below_kernels_and_not_where_an_operator_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    made = Repository(tmp_path, "both", "from . import layers\ndef f(x): return F.gelu(x)", **GELU, device="cpu")
    (variant,) = (made.folder / "build").iterdir()
    (variant / "layers.py").write_text(LAYERS)
    assert cli.main(["kernels", "list", str(made.folder)]) == 0
    kernels, layers = capsys.readouterr().out.split("\n\n")
    assert "acme.both" in kernels and "Doubled" in layers
    assert cli.main(["kernels", "list", str(made.folder), "--op", "torch.nn.functional.gelu"]) == 0
    assert "Doubled" not in capsys.readouterr().out
    assert cli.main(["kernels", "list", str(made.folder), "--json"]) == 0
    assert ["kernel" in row for row in json.loads(capsys.readouterr().out)] == [True, False, False]


def test_a_repository_with_neither_kernels_nor_layers_says_that_it_has_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write(tmp_path / "rms", kernel())
    assert cli.main(["kernels", "list", str(folder)]) == 1
    assert "has no forge_kernels.yaml" in capsys.readouterr().err
    layers = _with_layers(tmp_path / "layers")
    assert cli.main(["kernels", "list", str(layers), "--op", "torch.nn.functional.gelu"]) == 1
    assert "has no forge_kernels.yaml" in capsys.readouterr().err
