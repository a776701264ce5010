"""Sums of broadcast products become matrix products.

    (a[:, :, None, :] * b[:, None, :, :]).sum(-1)

reads and multiplies as many numbers as the product has elements, and no fused kernel reuses them in registers;
the equivalent torch.einsum("bik,bjk->bij", a, b) runs as a batch of matrix products. State space models and pairwise
scores are often written so.

Source: as in opt_einsum, dims that both factors have and the sum drops are contracted, those of both that stay are
batch dims, and those of one are rows or columns.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

import torch

from forge import prims, torchlang
from forge.clang import language
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.proxies import Dim
from forge.transforms.dce import live_calls
from forge.transforms.makers import Makers
from forge.transforms.replacement import record_as
from forge.transforms.result_strides import StandIns, Strides, asks_for_strides, results_to_restore

SUM, MUL = torchlang.sum, torchlang.mul
_FEWEST = 8  # the fewest rows, columns and contracted elements of a matrix product that pays
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class _Contraction(NamedTuple):
    """A sum over dims of the product of two factors: each without its broadcast dims, and the dims that it has. dims:
    those that the sum drops. sizes: of the product."""

    factors: tuple[TensorProxy, TensorProxy]
    has: tuple[tuple[int, ...], tuple[int, ...]]
    dims: tuple[int, ...]
    sizes: tuple[Dim, ...]


def contract(
    trace: Trace,
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the trace with sums of broadcast products as matrix products.

    strides: torch's strides of the values of a trace, by name. in_torch: whether a call runs as torch runs it.
    float32 is left alone if torch may round the factors of matrix products (torch.set_float32_matmul_precision),
    and the trace if the caller would see other strides, or a call may depend on them.
    """
    sums = [bound for bound in trace.bound_symbols if bound.symbol is SUM]
    if not sums:
        return trace
    makers = Makers(trace)
    readers: dict[str, int] = dict.fromkeys(trace.output_names, 2)
    for bound in trace.bound_symbols:
        for name in bound.inputs:
            readers[name] = readers.get(name, 0) + 1
    contractions = {}
    for bound in sums:
        contraction = _contraction(bound, makers, readers)
        if contraction is not None and in_torch(bound) and in_torch(makers.calls[bound.inputs[0]]):
            contractions[bound.output.name] = contraction
    if not contractions or asks_for_strides(trace):
        return trace
    restored = results_to_restore(trace, lambda bound: contractions.keys() >= set(bound.outputs) > set(), strides)
    return trace if restored is None else _rewrite(trace, contractions, restored)


def _contraction(bound: BoundSymbol, makers: Makers, readers: dict[str, int]) -> _Contraction | None:
    arguments = SUM.bind(bound.args, bound.kwargs)
    product, result = arguments["input"], bound.output
    maker = makers.calls.get(product.name) if isinstance(product, TensorProxy) else None
    if maker is None or maker.symbol is not MUL or readers[product.name] > 1:
        return None
    if maker.mode != bound.mode or result.dtype != product.dtype:
        return None
    factors = list(MUL.bind(maker.args, maker.kwargs).values())[:2]
    if not all(isinstance(each, TensorProxy) and each.dtype == product.dtype for each in factors):
        return None
    if product.dtype not in _DTYPES or any(each.device != product.device for each in factors):
        return None
    if product.dtype is torch.float32 and _may_round_factors():
        return None
    dims = _summed(arguments.get("dim"), product.ndim)
    operands = [_without_broadcast(each, product, makers) for each in factors]
    contraction = _Contraction((operands[0][0], operands[1][0]), (operands[0][1], operands[1][1]), dims, product.shape)
    return contraction if _is_worth_it(contraction) else None


def _may_round_factors() -> bool:
    """Return whether torch may round the factors of matrix products of float32."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set for one library: torch.backends.cuda.matmul.fp32_precision
        return True


def _summed(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return the dims of its argument that a sum drops."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(sorted(each % ndim for each in (dim if isinstance(dim, (tuple, list)) else (dim,))))


def _without_broadcast(
    factor: TensorProxy, product: TensorProxy, makers: Makers
) -> tuple[TensorProxy, tuple[int, ...]]:
    """Return the source of an expanded factor, and the dims of the product in which it has more than one element."""
    maker = makers.calls.get(factor.name)
    while maker is not None and maker.symbol in (torchlang.expand, torchlang.expand_as):
        factor = maker.args[0]
        maker = makers.calls.get(factor.name)
    first = product.ndim - factor.ndim
    sizes = enumerate(factor.shape)
    return factor, tuple(first + dim for dim, size in sizes if not prims.statically_true(size == 1))


def _is_worth_it(contraction: _Contraction) -> bool:
    """Return whether rows, columns and contracted elements are many, and each dim belongs to one of these."""
    one, other = map(set, contraction.has)
    summed = set(contraction.dims)
    if not summed.isdisjoint(one ^ other):  # summed in only one factor
        return False
    if any(
        not prims.statically_true(contraction.sizes[dim] == 1) for dim in {*range(len(contraction.sizes))} - one - other
    ):
        return False
    parts = (one - other, other - one, one & other & summed)
    sizes = [contraction.sizes[dim] for part in parts for dim in part]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return all(prod(int(contraction.sizes[dim]) for dim in part) >= _FEWEST for part in parts)


def _rewrite(trace: Trace, contractions: dict[str, _Contraction], restored: dict[str, TensorProxy]) -> Trace:
    new = trace.derive("contract")
    stand_ins = StandIns(new, restored)
    values = stand_ins.values
    with recording(new, language):
        for bound in trace.bound_symbols:
            contraction = contractions.get(bound.output.name) if bound.symbol is SUM else None
            if contraction is None:
                new.record(stand_ins.substitute(bound))
                continue
            output = values.get(bound.output.name, bound.output)
            with new.set_tags(bound.tags, bound.source):
                record_as(new, output, partial(_matrix_product, contraction, values, bound.output.shape))
        stand_ins.restore()
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


def _matrix_product(contraction: _Contraction, values: dict[str, TensorProxy], shape: tuple[Dim, ...]) -> TensorProxy:
    factors = [
        torchlang.reshape(values.get(factor.name, factor), [contraction.sizes[dim] for dim in has])
        for factor, has in zip(contraction.factors, contraction.has, strict=True)
    ]
    terms = ["".join(ascii_letters[dim] for dim in has) for has in contraction.has]
    rest = [
        dim
        for dim in range(len(contraction.sizes))
        if dim not in contraction.dims and dim in {*contraction.has[0], *contraction.has[1]}
    ]
    equation = f"{terms[0]},{terms[1]}->{''.join(ascii_letters[dim] for dim in rest)}"
    return torchlang.reshape(torchlang.einsum(equation, *factors), shape)
