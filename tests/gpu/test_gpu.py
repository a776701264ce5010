"""Tests of the machinery of `make test-gpu`, on the CPU."""

import json
import subprocess

import pytest
import torch

from tests.gpu.__main__ import LEFT, Worker, all_cases, main
from tests.gpu.measure import CONDITIONED, WITHIN, judge, nudged
from tests.gpu.report import BEGIN, END, written

FEW = [
    "attention/math/equal/32/bool/contiguous",
    "attention/window/grouped/32/both/transposed",
    "reduction/heads/1000x4096/float32",
    "operation/softmax/bfloat16",
    "program/two_outputs_used/float32",
    "model/mlp/bfloat16",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the results of a few cases and the document about them."""
    folder = tmp_path_factory.mktemp("gpu")
    state, document = folder / "results.jsonl", folder / "verification.md"
    options = ["--device", "cpu", "--jobs", "1", "--state", str(state), "--write", str(document), "--only", *FEW]
    assert main([*options, "--minutes", "0"]) == LEFT
    status = main(options)
    return options, state, document, status


def test_a_few_cases_are_within_the_bound(run):
    _, state, document, status = run
    found = [json.loads(line) for line in state.read_text().splitlines()]
    assert {each["name"].partition("/")[0] for each in found} == {each.partition("/")[0] for each in FEW}
    assert {each["status"] for each in found} <= {WITHIN, CONDITIONED}, found
    assert status == 0
    assert f"{len(found)} of {len(all_cases())} cases ran" in document.read_text()  # the document is of all of them


def test_nothing_but_results_is_in_the_folder_of_the_results(run):
    _, state, document, _ = run
    assert set(state.parent.iterdir()) == {state, document}


def test_the_default_configuration_is_tested(monkeypatch, tmp_path):
    for name in ("FORGE_EXECUTORS", "FORGE_CACHE", "FORGE_CHECK"):
        monkeypatch.setenv(name, "regions")
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(options["env"]))
    Worker("cpu", tmp_path)._start()
    assert not {"FORGE_EXECUTORS", "FORGE_CACHE", "FORGE_CHECK"} & set(started[0])
    assert started[0]["FORGE_CACHE_DIR"] == str(tmp_path)


def test_what_ran_is_not_run_again(run):
    options, state, _, _ = run
    before = state.read_text()
    assert main(options) == 0
    assert state.read_text() == before


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--state", str(tmp_path / "results.jsonl")]) == 0
    assert "skipped: torch finds no GPU here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_section_takes_the_place_of_an_earlier_one():
    first = written("# Verification\n\nText.\n", "one")
    assert first == f"# Verification\n\nText.\n\n{BEGIN}\none\n{END}\n"
    assert written(f"{first}\nMore.\n", "two") == f"# Verification\n\nText.\n\n{BEGIN}\ntwo\n{END}\n\nMore.\n"


def square_sum(x):
    return [(x * x).sum(-1), x.exp()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_operations_is_within_the_bound(dtype):
    x = torch.randn(64, 256, dtype=dtype)
    ours = [(x.double() ** 2).sum(-1).to(dtype), x.double().exp().to(dtype)]
    assert judge(ours, square_sum(x), lambda draw: square_sum(nudged(x, dtype, draw))) == (WITHIN, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_element_is_beyond_it(dtype):
    x = torch.randn(64, 256, dtype=dtype)
    ours = square_sum(x)
    ours[1][3, 5] = ours[1].max() / 2
    status, why = judge(ours, square_sum(x), lambda draw: square_sum(nudged(x, dtype, draw)))
    assert status == "beyond" and why.startswith("result 1 of 2")


def test_numbers_that_cancel_are_within_it_by_conditioning():
    x = torch.tensor([1.0, 1e-7, -1.0])

    def total(x):
        return [x.sum().reshape(1)]

    ours = [torch.zeros(1)]
    exact = [torch.tensor([1e-7])]
    assert judge(ours, exact, lambda draw: total(nudged(x, torch.float32, draw)))[0] == CONDITIONED


def test_other_metadata_is_beyond_it():
    x = torch.randn(4)
    for ours in ([x.double()], [x[None]], [None], [x, x]):
        assert judge(ours, [x], lambda draw: [x.double()])[0] == "beyond"
    assert judge([x > 0], [x < 0], lambda draw: [x < 0])[0] == "beyond"


def test_an_unlucky_draw_of_a_zero_is_within_it_by_conditioning():
    zero = torch.zeros(4)

    def judged(nearby):
        reference = lambda draw: [zero.double()]
        return judge([zero + 1], [zero + 0.1], reference, lambda draw: [zero + 0.1], nearby)[0]

    assert judged(None) == "beyond"
    assert judged(lambda draw: [zero + 0.1]) == CONDITIONED
    assert judged(lambda draw: [zero + (0.1, 0.1, 0.1, 1)[draw]]) == "beyond"
