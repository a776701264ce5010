"""The bounded table, and forge's tables of this kind."""

import pytest
import torch

import forge
from forge.ir.bounded import BoundedDict
from forge.patterns import find_matches
from forge.torchlang import autocast_casts


def test_a_new_entry_takes_the_place_of_the_first() -> None:
    table = BoundedDict(3)
    for number in range(5):
        table[number] = -number
    table[2] = 7
    assert table == {2: 7, 3: -3, 4: -4}


def test_a_pattern_keeps_a_number_of_traced_references() -> None:
    pattern = forge.pattern(lambda x: torch.exp(x) * x)
    pattern._exact = BoundedDict(2)
    for length in range(2, 8):
        assert len(find_matches(forge.trace(lambda x: torch.exp(x) * x, torch.ones(length)), [pattern])) == 1
    assert len(pattern._exact) == 2


def test_autocast_keeps_a_number_of_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(autocast_casts._memo, BoundedDict)
    monkeypatch.setattr(autocast_casts, "_memo", BoundedDict(2))
    x = torch.linspace(-1, 1, 16).view(4, 4)
    for rank in range(2, 6):
        batch = x.view(*[1] * (rank - 2), 4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            ours = forge.jit(lambda a: (a @ a).softmax(-1))(batch)
            torch.testing.assert_close(ours, (batch @ batch).softmax(-1))
    assert len(autocast_casts._memo) == 2
