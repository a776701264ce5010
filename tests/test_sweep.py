"""A fixed, evenly spread sample of the checks of `make sweep` on torch's operator database."""

import pytest
import torch

import forge
from tests.sweep.checks import CHECKS, run_check
from tests.sweep.compare import difference, sharing
from tests.sweep.entries import Entry, all_entries

EVERY = 90
SAMPLE = list(all_entries())[::EVERY]


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.one_in(4)
def test_an_entry_is_eagers(name: str) -> None:
    found = {check: run_check(check, all_entries()[name]) for check in CHECKS if check != "native"}
    assert {check: why for check, (status, why) in found.items() if status == "failed"} == {}
    assert any(status == "ok" for status, _ in found.values())


def entry_of(function: object) -> Entry:
    """Return the entry of sin, with another function."""
    entry = Entry(all_entries()["sin"].info)
    entry.__class__ = type("Changed", (Entry,), {"function": property(lambda self: function)})
    return entry


def test_the_sweep_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(lambda input, args, kwargs: torch.sin(input))
    assert run_check("forward", entry) == ("ok", "")
    monkeypatch.setattr(forge, "jit", lambda function, **options: lambda *given: function(*given) + 1)
    status, why = run_check("forward", entry)
    assert status == "failed" and "not close" in why


def test_the_sweep_finds_a_call_that_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = all_entries()["gather"]
    assert run_check("refused", entry) == ("ok", "")
    monkeypatch.setattr(forge, "jit", lambda function: lambda *given: None)
    assert run_check("refused", entry)[0] == "failed"


def test_the_sweep_names_an_opaque_call() -> None:
    opaque = torch.vmap(lambda row: torch.bernoulli(row * 0), randomness="different")
    entry = entry_of(lambda input, args, kwargs: opaque(input.sum().expand(2, 3)))
    status, why = run_check("native", entry)
    assert status == "failed" and why.startswith("torch.vmap")


def test_what_the_sweep_compares() -> None:
    x = torch.randn(3, 4)
    assert difference((x, 1), (x.clone(), 1)) is None
    assert "strides" in difference(x.t().contiguous().t(), x)
    assert "dtype" in difference(x.double(), x)
    assert "structure" in difference([x], x)
    assert "not close" in difference(x + 1, x)
    assert "not None" in difference([x, x], [x, None])
    assert sharing([x], [x[1]]) != sharing([x], [x[0].clone()])
    assert sharing([x], [x[1]]) != sharing([x], [x[2]])
