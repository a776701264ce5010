"""Factors of batched products are made contiguous by the region that computes them.

    matmul(x.permute(0, 2, 1, 3), y) = matmul(x.permute(0, 2, 1, 3).contiguous(), y)

torch multiplies a batch of one dim, and rows of one dim by a matrix. Heads between the rows and the columns of a
projection do not collapse into such a batch, nor do the rows of a gradient whose columns are contiguous: each product,
and each product of its gradients, would copy the factor first. A region can write it in another order just as
well. For a factor that no region computes, one copy serves several products.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.proxies import Dim
from forge.ir.symbol import substitute
from forge.prims.core import same_shape, statically_true
from forge.transforms.makers import is_view
from forge.transforms.result_strides import Strides

_PRODUCTS = frozenset({prims.matmul, clang.matmul, torchlang.matmul})
_MATRIX = 2  # dims


def contiguous_batches(
    trace: Trace,
    is_fused: Callable[[BoundSymbol], bool],
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the program with contiguous factors for its batched products, if torch would copy them.

    Args:
        trace: The program, with the gradients in it.
        is_fused: Returns whether a call may be in a region.
        strides: Returns torch's strides of the values of a trace, by name.
        in_torch: Returns whether a call runs as torch runs it.
    """
    products = {id(bound): factors for bound in trace.bound_symbols if (factors := _factors(bound)) and in_torch(bound)}
    if not products:
        return trace
    in_eager = strides(trace)
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    reads = Counter(factor.name for factors in products.values() for factor in factors)
    targets = {
        factor.name: (factor, dims)
        for factors in products.values()
        for factor, dims in factors.items()
        if factor.name in in_eager and _is_copied(factor.shape[:dims], in_eager[factor.name][:dims])
        if reads[factor.name] > 1 or _is_made_by(factor, makers, is_fused)
    }
    return _rewrite(trace, set(products), targets, in_eager) if targets else trace


def _factors(bound: BoundSymbol) -> dict[TensorProxy, int]:
    """Return the factors of a product that torch copies unless some leading dims of each collapse, and their number."""
    if bound.symbol is torchlang.linear:
        x = torchlang.linear.bind(bound.args, bound.kwargs)["input"]
        return {x: x.ndim - 1} if x.ndim > _MATRIX else {}
    if bound.symbol not in _PRODUCTS:
        return {}
    a, b = bound.args
    if a.ndim == b.ndim > _MATRIX + 1 and same_shape(a.shape[:-_MATRIX], b.shape[:-_MATRIX]):
        return {a: a.ndim - _MATRIX, b: b.ndim - _MATRIX}
    return {a: a.ndim - 1} if a.ndim > b.ndim == _MATRIX else {}


def _is_copied(sizes: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Return whether dims do not collapse into one."""
    dims = [(size, step) for size, step in zip(sizes, strides, strict=True) if not statically_true(size == 1)]
    return not all(statically_true(outer == size * step) for (_, outer), (size, step) in pairwise(dims))


def _is_made_by(x: TensorProxy, makers: Mapping[str, BoundSymbol], is_fused: Callable[[BoundSymbol], bool]) -> bool:
    """Return whether a fused call produces the base of a value."""
    maker = makers.get(x.name)
    while maker is not None and is_view(maker) and maker.inputs:
        maker = makers.get(maker.inputs[0])
    return maker is not None and is_fused(maker)


def _rewrite(
    trace: Trace, products: set[int], targets: Mapping[str, tuple[TensorProxy, int]], strides: Strides
) -> Trace:
    new, copies = trace.derive("contiguous_batches"), dict[str, TensorProxy]()
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            names = targets.keys() & set(bound.inputs) - copies.keys() if id(bound) in products else ()
            with new.set_tags(bound.tags, bound.source):
                copies.update((name, _contiguous(*targets[name], strides[name])) for name in sorted(names))
            new.record(substitute(bound, copies))
    return new


def _contiguous(x: TensorProxy, dims: int, strides: Sequence[Dim]) -> TensorProxy:
    """Record a copy whose first `dims` dims collapse into one. The matrices keep their order."""
    in_rows = dims != x.ndim - _MATRIX or statically_true(strides[-1] == 1) or not statically_true(strides[-2] == 1)
    if in_rows:
        return prims.contiguous(x)
    order = (*range(x.ndim - _MATRIX), x.ndim - 1, x.ndim - 2)
    return prims.permute(prims.contiguous(prims.permute(x, order)), order)
