"""Every call of a claimed program has the metadata in its trace, forward and backward: shapes, dtypes, devices.

The code of regions is generated for the trace's metadata, and silently misreads a tensor of another dtype. One op in
`EVERY` runs by default, all under `slow`: `pytest tests/test_metadata.py --op softmax` runs everything about one op.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import assert_same_metadata, chosen_opinfos, samples, short, tensors_in
from test_ops import Inputs, changed_inputs, differentiable_inputs

from forge.api.functional import Direct
from forge.ir import BoundSymbol, Proxy, TensorProxy, Trace
from forge.ir.printing import DEL
from forge.ir.pytree import tree_map
from forge.testing import OpInfo, Sample

EVERY = 6
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def _instances(config: pytest.Config) -> Iterator[Any]:
    for position, info in enumerate(chosen_opinfos(config)):
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] or list(info.dtypes)[:1]
        for turn, dtype in enumerate(dtypes):
            marks = [] if turn == 0 and position % EVERY == 0 else [pytest.mark.slow]
            yield pytest.param(info, dtype, marks=marks, id=f"{info.name}-{short(dtype)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        metafunc.parametrize("info,dtype", list(_instances(metafunc.config)))


@pytest.mark.one_in(2)
def test_calls_give_what_the_trace_says(info: OpInfo, dtype: torch.dtype) -> None:
    for sample in samples(info, "cpu", dtype):
        _check(info, sample)


def _check(info: OpInfo, sample: Sample) -> None:
    changed = changed_inputs(info, sample)
    inputs = Inputs(sample, differentiable_inputs(info, sample, changed), changed).sample
    try:
        _, compiled = Direct(info.op, executors=["torch"]).compile(inputs.args, inputs.kwargs)
    except RuntimeError:  # torch refuses it, which other tests cover
        return
    with torch.no_grad():
        result = run(compiled.traces[-1], tensors_in((inputs.args, inputs.kwargs)))
        if compiled.backward_traces:
            _, tensors, numbers = result
            backward = compiled.backward_traces[-1]
            seeds = backward.inputs[len(tensors) + len(numbers) :]
            try:
                run(backward, [*tensors, *numbers, *[torch.randn(x.shape).to(x.dtype) for x in seeds]])
            except RuntimeError as error:  # or NotImplementedError, a subclass; as in eager
                assert "derivative for" in str(error)


def run(trace: Trace, given: list[Any]) -> Any:
    """Run a claimed trace and return its results; compare each call's result with its metadata in the trace."""
    known = {**trace.constants, **dict(zip(trace.input_names, given, strict=True))}
    for bound in trace.bound_symbols:
        if bound.symbol is not DEL:
            _store(bound, _run(bound, known), known)
    return tree_map(partial(_value, known), trace.output)


def _run(bound: BoundSymbol, known: dict[str, Any]) -> Any:
    args, kwargs = tree_map(partial(_value, known), (tuple(bound.args), bound.kwargs))
    result = bound.symbol.op(*args, **kwargs)
    if bound.symbol.out:
        return tuple(args[place] if isinstance(place, int) else kwargs[place] for place in bound.symbol.out)
    return result


def _value(known: dict[str, Any], leaf: Any) -> Any:
    return known[leaf.name] if isinstance(leaf, Proxy) else leaf


def _store(bound: BoundSymbol, result: Any, known: dict[str, Any]) -> None:
    def store(output: Any, value: Any) -> None:
        if isinstance(output, (tuple, list)):
            for one, other in zip(output, value, strict=True):
                store(one, other)
        elif isinstance(output, Proxy):
            if isinstance(output, TensorProxy):
                assert_same_metadata(output, value, f"{bound}: {output.name}")
            known[output.name] = value

    store(bound.output, result)
