"""Engines that train a jitted model over two processes: the steps, the weights and the saved files are those of a model
in eager."""

import inspect
import re
from pathlib import Path
from typing import Any

import engine_programs
import pytest
import torch
from engine_programs import (
    accelerated,
    collected,
    fully_sharded,
    refused_backend,
    titan,
    trained_by_lightning,
    trained_by_trainer,
)
from two_processes import Pair

from forge.torch_internals.versions import TORCH

# A region keeps float32 between operators that round to bfloat16 in eager: a few of its units.
HALF = {"rtol": 0.05, "atol": 0.02}


def _check(found: dict[str, Any], graphs: int, sharded: str | None = None, **tolerance: float) -> None:
    """Compare with eager. graphs: the maximum number of graphs. sharded: the class of each block."""
    ours, eager = found["forge"], found["eager"]
    assert found["broken"] == [] and found["warned"] == []
    assert 1 < found["graphs"] <= graphs and found["regions"]
    assert ours["saved"] == eager["saved"] and any(ours["saved"])
    assert ours["sharded"] == eager["sharded"] == [sharded or ours["sharded"][0]] * 2
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours["losses"], eager["losses"], **tolerance)
    torch.testing.assert_close(ours["weights"], eager["weights"], **tolerance)
    torch.testing.assert_close(ours["again"], ours["after"])


SLOW = pytest.mark.slow
BLOCKS = pytest.param("blocks", marks=SLOW)


@pytest.mark.parametrize("jitted", ["model", BLOCKS])
def test_accelerate_trains_and_saves_a_jitted_model(jitted: str, pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(accelerated, str(tmp_path), jitted):
        _check(found, 4 if jitted == "model" else 8)


@pytest.mark.slow
def test_accelerate_trains_in_bfloat16(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(accelerated, str(tmp_path), "model", mixed_precision="bf16"):
        _check(found, 4, **HALF)


@SLOW
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_shards_every_jitted_block(mixed_precision: str, pair: Pair, tmp_path: Path) -> None:
    """Accelerate shards the modules of a class, which it finds by name."""
    pytest.importorskip("accelerate")
    half = mixed_precision == "bf16"
    for found in pair.run(accelerated, str(tmp_path), "blocks", sharded=True, mixed_precision=mixed_precision):
        _check(found, 8, "FSDPTransformerBlock", **(HALF if half else {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:forge. ")
def test_a_model_that_is_jitted_whole_and_then_sharded_trains_in_pieces(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(accelerated, str(tmp_path), "model", sharded=True):
        assert found["broken"] and found["regions"]
        torch.testing.assert_close(found["forge"]["losses"], found["eager"]["losses"], rtol=1e-4, atol=1e-5)


def test_accelerate_takes_no_backend_that_it_does_not_list(pair: Pair) -> None:
    pytest.importorskip("accelerate")
    for message in pair.run(refused_backend):
        assert "not a valid DynamoBackend" in message


@pytest.mark.parametrize("jitted", ["model", BLOCKS])
def test_the_trainer_evaluates_saves_and_resumes_a_jitted_model(jitted: str, pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(trained_by_trainer, str(tmp_path), jitted):
        _check(found, 4 if jitted == "model" else 8)


@pytest.mark.slow
def test_the_trainer_trains_in_bfloat16(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(trained_by_trainer, str(tmp_path), "model", bf16=True):
        _check(found, 4, **HALF)


@pytest.mark.slow
def test_the_trainer_shards_every_jitted_block(pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in pair.run(trained_by_trainer, str(tmp_path), "blocks", sharded=True):
        _check(found, 8, "FSDPLlamaDecoderLayer")


@pytest.mark.parametrize(
    ("options", "graphs", "sharded"),
    [
        pytest.param({"inside": False}, 4, None, id="the module itself", marks=SLOW),
        pytest.param({}, 4, None, id="its model"),
        pytest.param({"precision": "bf16-mixed"}, 4, None, id="bfloat16", marks=SLOW),
        pytest.param({"strategy": "fsdp2"}, 8, "FSDPTransformerBlock", id="sharded blocks", marks=SLOW),
    ],
)
def test_lightning_trains_and_saves_a_jitted_model(
    options: dict[str, Any], graphs: int, sharded: str | None, pair: Pair, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    jitted, tolerance = "model" if sharded is None else "blocks", HALF if "precision" in options else {}
    for found in pair.run(trained_by_lightning, str(tmp_path), jitted, **options):
        _check(found, graphs, sharded, **tolerance)


def test_fully_sharded_data_parallel_wraps_every_jitted_block(pair: Pair, tmp_path: Path) -> None:
    for found in pair.run(fully_sharded, str(tmp_path), "blocks"):
        _check(found, 2, "FullyShardedDataParallel")


def test_a_jitted_block_that_is_sharded_is_freed_with_its_model(pair: Pair) -> None:
    assert pair.run(collected) == [True, True]


@pytest.mark.parametrize(
    ("jitted", "parallel", "graphs"),
    [
        ("blocks", "tp", 4),
        pytest.param("blocks", "fsdp", 4, marks=SLOW),
        pytest.param("model", "shard", 2, marks=SLOW),
        pytest.param("model", "tp", 2, marks=SLOW),
        pytest.param("torch.compile", "tp", 4, marks=SLOW),
        pytest.param("torch.compile", "fsdp", 4, marks=SLOW),
    ],
)
def test_the_recipe_of_torchtitan_trains_and_saves_a_llama(
    jitted: str, parallel: str, graphs: int, pair: Pair, tmp_path: Path
) -> None:
    """The model is built on the meta device, parallelized, checkpointed, compiled, sharded, and then initialized."""
    if parallel == "tp" and TORCH < (2, 13):
        pytest.skip("torch leaves gradients of norms under SequenceParallel partial, and neither clips nor saves those")
    for found in pair.run(titan, str(tmp_path), jitted, parallel):
        found["forge"]["sharded"] = found["eager"]["sharded"]
        _check(found, graphs)


@pytest.mark.slow
@pytest.mark.parametrize(("jitted", "parallel"), [("blocks", "fsdp"), ("model", "shard")])
def test_the_recipe_of_torchtitan_trains_in_bfloat16(jitted: str, parallel: str, pair: Pair, tmp_path: Path) -> None:
    for found in pair.run(titan, str(tmp_path), jitted, parallel, bf16=True):
        found["forge"]["sharded"] = found["eager"]["sharded"]
        _check(found, 6, **HALF)


def test_the_lines_of_the_document_are_those_of_the_programs() -> None:
    document = (Path(__file__).parents[2] / "docs/how-to/engines.md").read_text()
    lines = re.findall(r"^\+ *(.*)$", document, re.MULTILINE)
    assert lines and set(lines) <= {line.strip() for line in inspect.getsource(engine_programs).splitlines()}
