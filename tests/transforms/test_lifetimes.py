"""The deletion of values after their last use."""

import gc
import weakref
from typing import Any

import torch

import forge
from forge import prims
from forge.api.functional import Direct
from forge.executors import OperatorExecutor, claim
from forge.ir import Trace
from forge.ir.printing import DEL
from forge.transforms import delete_last_used


def written(trace: Trace) -> list[str]:
    """Return each statement as 'neg' or 'del a, b'."""
    return [
        f"del {', '.join(bound.inputs)}" if bound.symbol is DEL else bound.symbol.name for bound in trace.bound_symbols
    ]


def test_an_intermediate_dies_after_its_last_use() -> None:
    trace = forge.trace(lambda x: prims.exp(prims.neg(prims.sin(x))), torch.ones(2))
    assert written(delete_last_used(trace)) == ["sin", "neg", "del t0", "exp", "del t1"]


def test_a_value_that_nobody_reads_dies_at_once() -> None:
    def function(x: Any) -> Any:
        prims.sin(x)
        return prims.neg(x)

    assert written(delete_last_used(forge.trace(function, torch.ones(2)))) == ["sin", "del t0", "neg"]


def test_inputs_outputs_and_constants_live() -> None:
    trace = forge.trace(lambda x: (prims.sin(x), prims.neg(x)), torch.ones(2))
    assert written(delete_last_used(trace)) == ["sin", "neg"]


def test_inputs_that_the_trace_owns_die_too_unread_ones_first() -> None:
    trace = forge.trace(lambda x, y, z: prims.neg(prims.sin(x)), torch.ones(2), torch.ones(2), torch.ones(2))
    assert written(delete_last_used(trace, own_inputs=True)) == ["del y, z", "sin", "del x", "neg", "del t0"]


def test_an_owned_input_that_is_returned_lives() -> None:
    trace = forge.trace(lambda x, y: (x, prims.neg(y)), torch.ones(2), torch.ones(2))
    assert written(delete_last_used(trace.derive("", trace.bound_symbols), own_inputs=True)) == ["neg", "del y"]


def test_values_are_really_freed_while_the_program_runs() -> None:
    """At the second call, the first one's argument is freed."""
    alive: list[bool] = []
    references: list[weakref.ref] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        out = x + 1
        references.append(weakref.ref(out))
        return out

    def second(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def third(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(references[0]() is not None)
        return x + 1

    mine = OperatorExecutor("mine")
    for prim, function in ((prims.sin, first), (prims.cos, second), (prims.neg, third)):
        mine.register_implementation(prim, function)
    trace = forge.trace(lambda x: prims.neg(prims.cos(prims.sin(x))), torch.ones(2))
    delete_last_used(claim(trace, [mine])[0]).python_callable()(torch.ones(2))
    assert alive == [False]


def test_the_backward_frees_what_the_forward_saved_as_it_goes() -> None:
    x = torch.ones(2, requires_grad=True)
    direct = Direct(lambda x: torch.exp(torch.sin(x)), ["torch"])
    direct(x).sum().backward()
    ((_, compiled),) = direct.compiled.values()
    final = compiled.backward_traces[-1]
    assert final.boxed
    deleted = {name for bound in final.bound_symbols if bound.symbol is DEL for name in bound.inputs}
    saved = {proxy.name for proxy in final.inputs}
    assert saved <= deleted | set(final.output_names)
