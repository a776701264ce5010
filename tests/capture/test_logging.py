"""Logs and warnings in a program: the same as in eager, and no graph break for them."""

import functools
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

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
    if function is told and not dynamic:  # if a logged length is not constant
        assert not forge.explain(jitted).graph_breaks


def test_a_method_that_a_library_adds_to_loggers_breaks_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    """The method is transformers' warning_once, which GPT-2 calls in each step with labels."""
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


class Change(DeprecationWarning):
    """A category of the program's own."""


def of_the_line(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("its line", stacklevel=1)
    return x * 2


def of_the_caller(x: torch.Tensor) -> torch.Tensor:
    return old(x) + old(x)


def old(x: torch.Tensor) -> torch.Tensor:
    warnings.warn(f"old: {x.ndim}", Change, 2)
    return x.sin()


layer = nn.MultiheadAttention(3, 1).requires_grad_(False)


def of_a_layer(x: torch.Tensor) -> torch.Tensor:
    """Return masks of two dtypes, like a layer."""
    x, padding = x[:, None], torch.zeros(1, 2, dtype=torch.bool)
    return layer(x, x, x, key_padding_mask=padding, attn_mask=torch.zeros(2, 2))[0]


def of_a_category(x: torch.Tensor) -> torch.Tensor:
    warnings.warn(message="future", category=FutureWarning, stacklevel=1)
    return x.cos()


def with_filters(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("not seen", stacklevel=1)
    return x.cos()


def of_values(x: torch.Tensor) -> torch.Tensor:
    warnings.warn(f"sum {x.sum()}", stacklevel=1)
    return x.cos()


WITHOUT_A_BREAK = (of_the_line, of_the_caller, of_a_layer, of_a_category)


@pytest.mark.parametrize("function", [*WITHOUT_A_BREAK, with_filters, of_values])
@pytest.mark.parametrize("action", ["default", "always", "once", "ignore", "error"])
def test_a_program_warns_as_eager_does(function: Callable, action: str) -> None:
    def seen(called: Callable) -> list[tuple]:
        for scope in (globals(), vars(nn.modules.activation)):
            scope.pop("__warningregistry__", None)
        found: list[tuple] = []
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter(action)
            warnings.filterwarnings("ignore", message="forge: ")
            for _ in range(2):
                try:
                    found.append(("result", called(torch.ones(2, 3)).round(decimals=4).tolist()))
                except Warning as warning:
                    found.append((type(warning), str(warning)))
        return found + [(each.category, str(each.message), each.filename, each.lineno) for each in given]

    jitted = forge.jit(function)
    assert seen(jitted) == seen(function)
    if function in WITHOUT_A_BREAK:
        assert not forge.explain(jitted).graph_breaks
