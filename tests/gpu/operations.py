"""The cases of every OpInfo between pointwise calls: results and gradients, in three dtypes, one sample each."""

from functools import partial
from typing import Any

import torch
from support import around, copy_of, gives_unspecified_values, tensors_in
from test_ops import changed_inputs, differentiable_inputs, flow_of
from torch.utils import _pytree

from forge.api.functional import Direct
from forge.testing import OpInfo, Sample, all_opinfos
from tests.gpu.cases import DTYPES, Case, Skipped
from tests.gpu.measure import judge, nudged


def cases() -> dict[str, Case]:
    """Return every case by name."""
    found = {}
    for turn, (name, dtype) in enumerate(DTYPES.items()):
        for info in all_opinfos():
            if dtype in info.dtypes:
                found[f"operation/{info.name}/{name}"] = Case(partial(_run, info, dtype, turn))
    return found


def _run(info: OpInfo, dtype: torch.dtype, turn: int, device: torch.device) -> tuple[str, str]:
    for directive in info.directives:
        if directive.kind == "skip" and directive.applies("test_fused", "torch", device.type, dtype):
            raise Skipped(directive.reason)
    sample = _sample(info, dtype, turn, device)
    changed = changed_inputs(info, sample)
    wanted = differentiable_inputs(info, sample, changed) if info.gradient else []
    op = around(info.reference or info.op)
    if gives_unspecified_values(Direct(info.op, executors=["torch"]).compile(sample.args, sample.kwargs)[1].traces[0]):
        raise Skipped("it gives memory that was never written")
    state = _random_state(device)
    eager = flow_of(op, sample, wanted, changed)
    if eager.refused:
        wanted = []
        eager = flow_of(op, sample, wanted, changed)
    draws = not torch.equal(_random_state(device), state)
    ours = flow_of(Direct(around(info.op)), sample, wanted, changed)

    def reference(draw: int | None) -> list[Any]:
        wide = _wide(sample, dtype, draw)
        known = dtype if draws else info.precise  # in float64, other numbers are drawn
        if known != torch.float64:
            wide = Sample(*(_narrow(each, known) for each in (wide.args, wide.kwargs)))
        return _values(flow_of(op, wide, wanted, changed))

    return judge(_values(ours), _values(eager), reference)


def _sample(info: OpInfo, dtype: torch.dtype, turn: int, device: torch.device) -> Sample:
    """Return one of the op's samples without empty tensors, a different one for each dtype."""
    torch.manual_seed(0)
    samples = list(info.samples(info, device, dtype))
    full = [each for each in samples if all(x.numel() for x in tensors_in((each.args, each.kwargs)))] or samples
    for sample in full[turn % len(full) :] + full:
        try:
            torch.manual_seed(1)
            (info.reference or info.op)(*copy_of(sample).args, **copy_of(sample).kwargs)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
        else:
            return sample
    raise Skipped(f"eager refuses every sample: {reason}")


def _wide(sample: Sample, dtype: torch.dtype, draw: int | None) -> Sample:
    """Return the same numbers in float64, or perturbed by half an eps; a dtype named in the call becomes float64."""
    args, kwargs = _exchanged((sample.args, sample.kwargs), dtype, torch.float64)
    return Sample(*nudged((args, kwargs), dtype, draw))


def _narrow(tree: Any, dtype: torch.dtype) -> Any:
    return _exchanged(tree, torch.float64, dtype)


def _exchanged(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    def exchange(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(new) if leaf.dtype == old else leaf
        return new if leaf is old else leaf

    return _pytree.tree_map(exchange, tree)


def _values(flow: Any) -> list[Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a collective's result is not ready when its function returns
    return [*tensors_in(flow.outputs), *flow.gradients]


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
