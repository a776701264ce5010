"""Logging in a program: the same records as in eager, and no graph break for them."""

import functools
import logging
from collections.abc import Callable

import pytest
import torch
import transformers

import forge

log = logging.getLogger("tests.capture.logging")


class Louder(logging.Logger):
    def warning(self, message: str, *args: object) -> str:
        super().warning(message, *args)
        return "told"


louder = Louder("tests.capture.louder")


def scaled(x: torch.Tensor) -> torch.Tensor:
    log.info("rows: %d, columns: %s", x.shape[0], x.shape[1])
    return x * 2


def told(x: torch.Tensor) -> torch.Tensor:
    log.warning("first")
    y = scaled(x).sin()
    if x.shape[0] > 1:
        log.error(f"shape {tuple(y.shape)}")
    log.log(logging.WARNING, "last")
    return y


def told_of_a_change(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    log.warning("%s", y)
    y.add_(1)
    return y


def told_by_another_class(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if louder.warning("one") == "told" else x


def told_and_raised(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    log.warning("before")
    if x.shape[0] > 1:
        raise ValueError("no")
    return y


def told_between(x: torch.Tensor) -> torch.Tensor:
    log.warning("before %s", 1)
    torch._dynamo.graph_break()
    log.warning("after %s", 2)
    return x + 1


def records(function: Callable, caplog: pytest.LogCaptureFixture, calls: int = 2) -> list[tuple[str, str]]:
    found = []
    for _ in range(calls):
        caplog.clear()
        try:
            result = function(torch.ones(2, 3)).tolist()
        except ValueError as error:
            result = str(error)
        found += [(each.levelname, each.getMessage()) for each in caplog.records if each.name == log.name]
        found.append(("result", str(result)))
    return found


@pytest.mark.parametrize("function", [told, told_of_a_change, told_by_another_class, told_and_raised, told_between])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_program_logs_what_eager_logs(
    function: Callable, dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, log.name)
    jitted = forge.jit(function, dynamic=dynamic)
    assert records(jitted, caplog) == records(function, caplog)
    if function is told and not dynamic:  # where a length that is logged is no constant
        assert not forge.explain(jitted).graph_breaks


def test_a_method_that_a_library_adds_to_loggers_breaks_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    """transformers' warning_once, which GPT-2 calls in each step that has labels."""
    asked: list[str] = []

    @functools.lru_cache(None)
    def warning_once(self: logging.Logger, message: str) -> None:
        asked.append(message)

    def program(x: torch.Tensor) -> torch.Tensor:
        log.warning_once("once")
        return x + 1

    before = getattr(logging.Logger, "warning_once", None)
    logging.Logger.warning_once = warning_once
    try:
        jitted = forge.jit(program)
        for _ in range(3):
            jitted(torch.ones(2))
    finally:
        if before is None:
            del logging.Logger.warning_once
        else:
            logging.Logger.warning_once = before
    assert asked == ["once"] and not forge.explain(jitted).graph_breaks


def test_gpt2s_training_step_is_one_graph() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(64, (2, 16))
    jitted = forge.jit(model.eval())
    torch.testing.assert_close(jitted(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)
    explained = forge.explain(jitted)
    assert explained.graphs == 1 and not explained.graph_breaks
