"""Models with random weights, and their texts, for tests of `generate`."""

from typing import Any

import pytest
import torch

import forge
from forge.runtime.repeated_calls import RepeatedCall


def with_random_weights(model: Any, std: float = 0.2) -> Any:
    """Return a model whose texts do not repeat one token."""
    for each in model.parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=std)
    return model


def tokens_of(model: Any, prompt: dict[str, Any], new: int, **options: Any) -> torch.Tensor:
    """Return the text of some new tokens from a model, with the same random numbers at each call."""
    torch.manual_seed(1)
    return model.generate(**prompt, max_new_tokens=new, disable_compile=True, **options)


class _Streamer:
    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


def check_streams(model: Any, prompt: dict[str, Any], **options: Any) -> None:
    """Check that a streamer gets the same tokens from a model and from the jitted one."""
    streamed = []
    for each in (model, forge.jit(model)):
        streamer = _Streamer()
        tokens_of(each, prompt, 30, **options, streamer=streamer)
        streamed.append(streamer.tokens)
    assert streamed[0] == streamed[1]


def count_noted_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each step that examines the calls of its program adds their number."""
    looked_at: list[int] = []
    note = RepeatedCall._note

    def counted(self: RepeatedCall, calls: list[Any], x: torch.Tensor) -> None:
        looked_at.append(len(calls))
        note(self, calls, x)

    monkeypatch.setattr(RepeatedCall, "_note", counted)
    return looked_at
