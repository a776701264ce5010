"""Sharded models in realistic use: models of transformers, entries other than forward, changed models."""

from typing import Any

import pytest
import torch
from sharded_models import (
    CHANGES,
    ENTRIES,
    REFUSED,
    changed,
    entered,
    generated,
    interrupted,
    refused,
    trained_transformer,
    under_autocast,
    whole_numbers,
    with_a_default_device,
    without_a_bias,
)
from two_processes import Pair

from tests.markers import slow_except

SLOW = pytest.mark.slow


def _check(found: dict[str, Any], **tolerance: float) -> None:
    assert found["broken"] == []
    torch.testing.assert_close(found["forge"], found["eager"], **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("t5", "shard", marks=SLOW),
        *[
            pytest.param(name, "shard", marks=SLOW)
            for name in "clip whisper mixtral mamba bart vit gemma3 qwen3_moe gpt_neox".split()
        ],
        ("gpt_neox", "fully_shard"),
        pytest.param("t5", "fully_shard", marks=SLOW),
    ],
)
@pytest.mark.slow
def test_a_model_of_transformers_trains_as_under_fsdp2(name: str, how: str, pair: Pair) -> None:
    pytest.importorskip("transformers")
    for found in pair.run(trained_transformer, name, how):
        torch.testing.assert_close(found["forge"], found["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_sharded_model_trains_under_autocast(pair: Pair) -> None:
    for found in pair.run(under_autocast):
        _check(found, rtol=2e-2, atol=2e-3)  # roundings of bfloat16


@pytest.mark.slow
def test_a_sharded_model_trains_with_a_default_device(pair: Pair) -> None:
    for found in pair.run(with_a_default_device):
        _check(found)


# entries


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.one_in(3)
def test_an_entry_reads_whole_parameters(entry: str, pair: Pair) -> None:
    for found in pair.run(entered, entry):
        torch.testing.assert_close(found["eager"], found["plain"])
        torch.testing.assert_close(found["forge"], found["plain"])
        assert found["outside"] == ["Parameter", "DTensor", "DTensor"]


def test_attributes_are_sharded_after_an_error(pair: Pair) -> None:
    assert pair.run(interrupted) == [["DTensor", "DTensor"]] * 2


@pytest.mark.slow
def test_a_sharded_model_generates(pair: Pair) -> None:
    pytest.importorskip("transformers")
    for found in pair.run(generated):
        torch.testing.assert_close(found["eager"], found["plain"])
        torch.testing.assert_close(found["forge"], found["plain"])


# changes


@pytest.mark.parametrize("change", slow_except(CHANGES, "load_state_dict"))
@pytest.mark.slow
def test_a_sharded_model_that_ran_may_change_as_under_fsdp2(change: str, pair: Pair) -> None:
    for found in pair.run(changed, change):
        torch.testing.assert_close(found["forge"], found["eager"], rtol=1e-4, atol=1e-5)


def test_a_parameter_may_be_removed(pair: Pair) -> None:
    for found in pair.run(without_a_bias):
        plain, *others = found["results"]
        torch.testing.assert_close(others, [plain, plain])
        assert found["there"] == [False] * 3


def test_parameters_of_integers_keep_their_dtype(pair: Pair) -> None:
    assert pair.run(whole_numbers) == [[torch.int64, torch.bfloat16] * 2] * 2


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_sharded_model_refuses(what: str, pair: Pair) -> None:
    for message in pair.run(refused, what):
        assert REFUSED[what][2] in message
