"""The elimination of dead code."""

from typing import Any

import torch

import forge
from forge import prims
from forge.ir import Symbol, Tag, TensorProxy
from forge.prims.core import like
from forge.transforms import dce

noise = Symbol("noise", "test.dce_noise", meta=lambda x: like(x), tags=frozenset({Tag.RANDOM}))
log = Symbol("log", "test.dce_log", meta=lambda x: None, tags=frozenset({Tag.EFFECT}))
wrapped_noise = Symbol("wrapped", "test.dce_wrapped", body=lambda x: noise(x))


def ids(trace: forge.ir.Trace) -> list[str]:
    return [bound.symbol.id for bound in trace.bound_symbols]


def test_a_call_that_nobody_reads_is_dropped_with_what_only_it_read() -> None:
    def function(x: TensorProxy) -> Any:
        prims.exp(prims.neg(x))
        return prims.sin(x)

    trace = dce(forge.trace(function, torch.ones(2)))
    assert ids(trace) == ["prims.sin"] and trace.stage == "dce"


def test_random_calls_and_effects_stay() -> None:
    """A random call advances the generator even if its result is unused."""

    def function(x: TensorProxy) -> Any:
        noise(x)
        wrapped_noise(x)
        log(prims.neg(x))
        return x

    trace = forge.trace(function, torch.ones(2))
    assert ids(dce(trace)) == ids(trace) == ["test.dce_noise", "test.dce_wrapped", "prims.neg", "test.dce_log"]


def test_a_call_of_which_one_output_is_read_stays() -> None:
    pair = Symbol("pair", "test.dce_pair", meta=lambda x: (like(x), like(x)))
    trace = dce(forge.trace(lambda x: pair(x)[1], torch.ones(2)))
    assert ids(trace) == ["test.dce_pair"]


def test_what_a_nested_output_or_a_symbolic_length_reads_stays() -> None:
    trace = dce(forge.trace(lambda x: {"a": [prims.neg(x), (prims.exp(x),)]}, torch.ones(2)))
    assert ids(trace) == ["prims.neg", "prims.exp"]
