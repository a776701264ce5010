"""Hidden states that start as a transposed image are made row-major, once, at their start.

    x = conv(image).flatten(2).transpose(1, 2) + positions
      = conv(image).flatten(2).transpose(1, 2).contiguous() + positions

torch's sum has the memory order of the first operand: the residual stream of a vision or speech transformer stays
transposed in memory through all layers, and each norm and each product reads it across its rows. The caller's results
have eager's strides.
"""

from collections.abc import Callable

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.pytree import tensors
from forge.ir.symbol import substitute
from forge.prims.core import statically_true
from forge.transforms.makers import is_view
from forge.transforms.result_strides import StandIns, Strides, asks_for_strides, draws, results_to_restore

_IMAGES = frozenset({torchlang.conv1d, torchlang.conv2d, torchlang.conv3d})  # whose results are transposed
_ROWS = frozenset({torchlang.layer_norm, torchlang.linear, torchlang.rms_norm})  # which read rows
_DIMS = 3  # (N, rows, width)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def row_major(
    trace: Trace,
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str = "cuda",
) -> Trace:
    """Return the trace with hidden states of three dims row-major, if they start as a transposed image.

    strides: torch's strides of the values of a trace, by name. in_torch: whether a call runs as torch runs it. The
    trace is unchanged if the caller would see other strides, or a call may depend on them.
    """
    symbols = {bound.symbol for bound in trace.bound_symbols}
    images = [bound for bound in trace.bound_symbols if bound.symbol in _IMAGES]
    if not any(bound.output.device.type == device for bound in images):
        return trace
    if not any(isinstance(bound.output, TensorProxy) and bound.output.ndim == _DIMS for bound in trace.bound_symbols):
        return trace
    if _ROWS.isdisjoint(symbols) or asks_for_strides(trace):
        return trace
    in_eager = strides(trace)
    transposed = {
        id(bound): bound
        for bound in trace.bound_symbols
        if isinstance(bound.output, TensorProxy) and _is_transposed(bound.output, in_eager, device)
    }
    producers = [bound for bound in transposed.values() if not is_view(bound)]
    if not producers or any(map(draws, producers)) or not all(map(in_torch, producers)):
        return trace
    laid_out = set(map(id, producers))
    restored = results_to_restore(trace, lambda bound: id(bound) in laid_out, lambda trace: in_eager)
    if restored is None:
        return trace
    return _rewrite(trace, {bound.output.name for bound in transposed.values()}, laid_out, restored)


def _is_transposed(x: TensorProxy, strides: Strides, device: str) -> bool:
    """Return whether torch's strides of a tensor of (N, rows, width) put the elements of a row apart."""
    in_eager = strides.get(x.name)
    if in_eager is None or x.ndim != _DIMS or x.device.type != device or x.dtype not in _DTYPES:
        return False
    _, rows, width = x.shape
    return (
        statically_true(in_eager[1] == 1) and statically_true(in_eager[2] == rows) and not statically_true(width == 1)
    )


def _rewrite(trace: Trace, transposed: set[str], laid_out: set[int], restored: dict[str, TensorProxy]) -> Trace:
    """Give the calls `laid_out` row-major operands; a result that the caller sees keeps its name."""
    new = trace.derive("row_major")
    stand_ins = StandIns(new, restored)
    rows: dict[str, TensorProxy] = {}  # row-major copies of transposed values
    turned: set[str] = set()  # results of calls with row-major operands, and their views
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            if id(bound) in laid_out:
                for x in tensors((bound.args, bound.kwargs)):
                    if x.name in transposed - turned and x.name not in rows:
                        with new.set_tags(bound.tags, bound.source):
                            rows[x.name] = torchlang.contiguous(stand_ins.values.get(x.name, x))
                turned.add(bound.output.name)
                bound = substitute(bound, {name: rows[name] for name in rows if name in bound.inputs})
            elif is_view(bound) and not turned.isdisjoint(bound.inputs):
                turned.update(bound.outputs)
            new.record(stand_ins.substitute(bound))
        stand_ins.restore()
    return new
