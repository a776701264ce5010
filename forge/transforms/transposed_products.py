"""Products of a backward are computed in the layout of the tensors whose gradients they are.

    y = x @ w.mT:    grad_w = (x.mT @ grad_y).mT
                            = grad_y.mT @ x

The rule of a product computes the gradient of its operand, and the rule of the operand's transposition transposes that.
As a view it has other strides than w, so a caller that wants w's copies all of it. The product of the transposed
operands, in reverse order, is laid out like w. The same holds for a weight whose memory the caller transposed.

Torch decides by the strides of the operand when a backward runs (mm_mat2_backward and _grouped_mm_mat2_backward in
torch/csrc/autograd/FunctionsManual.cpp). Here the program decides.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from forge import clang, prims
from forge.ir import BoundSymbol, Proxy, Symbol, TensorProxy, Trace, recording
from forge.ir.strides import contiguous, same
from forge.transforms.replacement import record_as

_PRODUCTS = frozenset({prims.matmul, clang.matmul, prims.grouped_mm})
_SUMS = frozenset({prims.add, clang.add})


def transpose_products(trace: Trace, targets: Sequence[Proxy | None]) -> Trace:
    """Return a backward in which a product that only its transposition reads is the product of the transposed operands.

    targets: the tensors whose gradients are the outputs. A product that is such a gradient is computed in the layout of
    the tensor.
    """
    analysis = _Analysis(trace, targets)
    if not analysis.sites:
        return trace
    new = trace.derive(trace.stage)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            if id(bound) in analysis.sites:
                record_as(new, bound.output, partial(analysis.record_replacement, bound, new))
            elif id(bound) not in analysis.dead:
                new.record(bound)
    return new


class _Analysis:
    """Calls of a backward, by id: `sites` are replaced, `dead` ones compute products with no other users."""

    def __init__(self, trace: Trace, targets: Sequence[Proxy | None]) -> None:
        self.makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
        self.reads = Counter(name for bound in trace.bound_symbols for name in bound.inputs)
        self.reads.update(trace.output_names)
        self.sites: set[int] = set()
        self.dead: set[int] = set()
        in_columns = {
            gradient.name
            for gradient, tensor in zip(trace.output, targets, strict=True)
            if isinstance(gradient, TensorProxy) and isinstance(tensor, TensorProxy) and _is_in_columns(tensor)
        }
        for bound in trace.bound_symbols:
            if in_columns.isdisjoint(bound.outputs):
                base, between = self.base_of(bound)
                if base is not None:
                    self.replace(bound, base.name, between)
        for name in in_columns:
            if name in self.makers:
                self.replace(self.makers[name], name)

    def replace(self, bound: BoundSymbol, name: str, between: Sequence[BoundSymbol] = ()) -> None:
        """Replace a call if the value `name` can be computed transposed: the call transposes it or computes it.
        between: the calls that only lead from the value to the call."""
        calls = list(self.calls_to(name))
        if all(call is not None for call in calls):
            self.sites.add(id(bound))
            self.dead.update(id(call) for call in (*calls, *between) if call is not bound)

    def base_of(self, bound: BoundSymbol) -> tuple[TensorProxy | None, list[BoundSymbol]]:
        """Return the value that a call transposes, and the calls between the two: a reshape of its rows or columns to
        several dims, as in einsum."""
        base = base_of_transposition(bound)
        if base is not None:
            return base, []
        permuted = _only_call(bound, prims.permute)
        if permuted is None or self.reads[permuted.inputs[0]] != 1:
            return None, []
        x, dims = (*permuted.args, *permuted.kwargs.values())
        maker = self.makers.get(x.name)
        reshaped = None if maker is None else _only_call(maker, prims.reshape)
        if maker is None or reshaped is None or reshaped.args[0].ndim != 2:
            return None, []
        base, last = reshaped.args[0], x.ndim - 1
        by_row = tuple(dims) == (*range(1, x.ndim), 0) and prims.statically_true(base.shape[0] == x.shape[0])
        by_column = tuple(dims) == (last, *range(last)) and prims.statically_true(base.shape[1] == x.shape[last])
        return (base, [maker]) if by_row or by_column else (None, [])

    def calls_to(self, name: str) -> Iterator[BoundSymbol | None]:
        """Yield the calls that compute a value from products; None for any other operand."""
        bound = self.makers.get(name)
        if bound is None or self.reads[name] != 1:
            yield None
        elif bound.symbol in _PRODUCTS:
            yield bound if _has_transposed_form(bound.symbol, *bound.args[:2]) else None
        elif _keeps_positions(bound):
            yield bound
            for each in bound.inputs:
                yield from self.calls_to(each)
        else:
            yield None

    def record_replacement(self, bound: BoundSymbol, trace: Trace) -> TensorProxy:
        """Record the replacement of a call, and return its result."""
        base, between = self.base_of(bound)
        if base is not None:
            value = self.record_transpose(base.name, trace)
            with trace.set_tags(bound.tags, bound.source):
                return prims.reshape(value, bound.output.shape) if between else value
        with trace.set_tags(bound.tags, bound.source):
            return swap_last(self.record_transpose(bound.output.name, trace))

    def record_transpose(self, name: str, trace: Trace) -> TensorProxy:
        """Record the calls that compute a value, transposed."""
        bound = self.makers[name]
        with trace.set_tags(bound.tags, bound.source):
            if bound.symbol in _PRODUCTS:
                a, b, *rest = bound.args
                args = [self.operand_transpose(b), self.operand_transpose(a), *rest]
            else:
                args = [self.record_transpose(x.name, trace) if isinstance(x, TensorProxy) else x for x in bound.args]
            value: TensorProxy = bound.symbol(*args, **bound.kwargs)
            return value

    def operand_transpose(self, x: TensorProxy) -> TensorProxy:
        maker = self.makers.get(x.name)
        base = None if maker is None or id(maker) in self.sites else base_of_transposition(maker)
        return swap_last(x) if base is None else base


def _is_in_columns(x: TensorProxy) -> bool:
    """Return whether a tensor is known to have the layout of a contiguous one with transposed matrices."""
    if x.ndim < 2 or x.strides is None:
        return False
    *batch, rows, columns = x.shape
    *steps, down, right = x.strides
    in_rows = same(tuple(x.strides), contiguous(tuple(x.shape)))
    return not in_rows and same((*steps, right, down), contiguous((*batch, columns, rows)))


def _has_transposed_form(symbol: Symbol, a: TensorProxy, b: TensorProxy) -> bool:
    """Return whether the product of the transposed operands is as good as the product itself.

    Torch computes the gradients of batches of matrices, and of einsum, which uses these, in one order, whatever
    the strides. On a CPU, where results are bitwise equal to eager's, so does forge: another order may round
    differently. A grouped product of a batch and a matrix groups columns, which must lie at multiples of 16 bytes; one
    of a matrix and a batch groups rows, which may lie anywhere.
    """
    if symbol is prims.grouped_mm:
        return a.ndim >= b.ndim
    return a.ndim == b.ndim >= 2 and (a.device.type != "cpu" or (a.ndim == 2 and symbol is clang.matmul))


def _keeps_positions(bound: BoundSymbol) -> bool:
    """Return whether a call computes each element of a matrix from those at its position, of matrices as large."""
    if bound.symbol is prims.convert_element_type:
        return True
    if bound.symbol is prims.sum:
        x, dims = bound.args[:2]
        return all(dim < x.ndim - 2 for dim in dims) and bound.output.ndim == x.ndim - len(dims)
    return bound.symbol in _SUMS and len(bound.inputs) == 2 and all(x.shape == bound.output.shape for x in bound.args)


def swap_last(x: TensorProxy) -> TensorProxy:
    """Return x with its last two dims exchanged."""
    return prims.permute(x, _exchanged(x.ndim))


def base_of_transposition(bound: BoundSymbol) -> TensorProxy | None:
    """Return the tensor whose last two dims a call exchanges."""
    call = _only_call(bound, prims.permute)
    if call is None:
        return None
    x, dims = (*call.args, *call.kwargs.values())
    return x if tuple(dims) == _exchanged(x.ndim) else None


def _only_call(bound: BoundSymbol, symbol: Symbol) -> BoundSymbol | None:
    """Return the call of a prim that a call consists of, if it consists of one."""
    while len(bound.subsymbols) == 1 and bound.symbol.rule is None:
        bound = bound.subsymbols[0]
    return bound if bound.symbol is symbol else None


def _exchanged(ndim: int) -> tuple[int, ...]:
    return (*range(ndim - 2), ndim - 1, ndim - 2)
