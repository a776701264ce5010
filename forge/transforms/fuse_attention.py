"""Attention that a model writes out becomes a call of scaled_dot_product_attention, if torch has a kernel for it.

    softmax(query @ key.transpose(-1, -2) / 8 + mask, -1) @ value
        = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1 / 8)

The kernel writes no scores to memory, and saves none for the backward. Products may be of matmul, bmm, baddbmm and
einsum. Scores may be scaled, converted, masked, and reshaped in their leading dims. Attention stays written out if it
drops weights, of which the kernel would draw others, and if anything else reads its scores or weights. A row whose
scores are all -inf is 0, where it is nan written out.

torch's kernels take queries of four dims. The leading dims of others, without heads or with windows, become two: of
attention that is written out, and of calls of scaled_dot_product_attention.

Source: torch/_inductor/fx_passes/fuse_attention.py, which has a pattern for each way to write it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.proxies import Dim
from forge.prims.core import same_shape
from forge.transforms.dce import live_calls
from forge.transforms.decompose_attention import ATTENTION, HasNoKernel
from forge.transforms.grad import active_names, is_differentiated
from forge.transforms.makers import Makers, count_reads, only_prim
from forge.transforms.replacement import record_as
from forge.transforms.result_strides import StandIns, Strides, results_to_restore
from forge.transforms.separate_sinks import SOFTMAX

_PRODUCTS = frozenset({torchlang.matmul, torchlang.bmm})
_ATTENDING = SOFTMAX | {ATTENTION}
_BROADCASTS = frozenset({prims.broadcast_in_dim, prims.full})  # of numbers and masks
_MATRIX = 2  # dims
_HEADS = 4  # dims of a query: batch, heads, length, width
_HIDDEN = -1e9  # added to a score in float32, it leaves nothing of the score
_HIDDEN_DOUBLE = -1e18  # the same in float64
_LOWEST = -1e30  # which float32 still holds times log2(e)

Shape = tuple[Dim, ...]


class _Product(NamedTuple):
    """A batched product of matrices.

    left, right: The factors; permuted to `left_order` and `right_order` if those are given, they are (*batch, rows,
        inner) and (*batch, inner, columns). order: The order of the result's dims, as of (*batch, rows, columns).
    """

    left: TensorProxy
    right: TensorProxy
    left_order: tuple[int, ...] | None = None
    right_order: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None


class _Mask(NamedTuple):
    """A mask of scores of a shape, which is added to them. One of bools hides scores where it is True, or where it is
    False; hidden ones are `value`."""

    tensor: TensorProxy
    scores: Shape
    hides: bool = False
    value: float = -math.inf


class _Scores(NamedTuple):
    """The scores of attention: scale * product + masks. shape: with batch and heads, if any form of them has these."""

    product: _Product
    scale: float
    masks: tuple[_Mask, ...]
    shape: Shape


class _Attention(NamedTuple):
    """Attention as a model writes it; `product` is that of its weights and the value."""

    scores: _Scores
    product: _Product

    @property
    def operands(self) -> tuple[list[TensorProxy], ...]:
        """The queries, keys, values, and masks."""
        query, key, *_ = self.scores.product
        return [query], [key], [self.product.right], [mask.tensor for mask in self.scores.masks]

    @property
    def has_gradients(self) -> bool:
        """True if kernels compute the right gradients of all rows. They save the logarithm of a row's sum, of which
        nothing is left if a large number is added to the whole row; and no gradient flows to scores that are filled."""
        return all(mask.tensor.dtype == torch.bool and mask.value == -math.inf for mask in self.scores.masks)

    def arguments(self, values: Mapping[str, TensorProxy]) -> dict[str, Any] | None:
        """Record the arguments of the call of attention, and return them; None if torch's function does not take them.

        values: Values to read in place of others, by name.
        """
        scores, product = self.scores, self.scores.product
        left, right, value = (values.get(x.name, x) for x in (product.left, product.right, self.product.right))
        if not left.dtype == right.dtype == value.dtype:
            return None
        masks = []
        for mask in scores.masks:
            tensor = _with_heads(values.get(mask.tensor.name, mask.tensor), mask.scores, scores.shape)
            if tensor is None or tensor.dtype not in (torch.bool, left.dtype):
                return None
            masks.append(tensor)
        order = product.right_order or tuple(range(right.ndim))
        query, key = (
            _permuted(left, product.left_order),
            _permuted(right, (*order[:-_MATRIX], order[-1], order[-_MATRIX])),
        )
        width = query.shape[-1]
        is_default = isinstance(width, int) and math.isclose(scores.scale, width**-0.5, rel_tol=1e-12)
        return _arguments(
            _batch_and_heads(scores.shape[:-_MATRIX]),
            (query, key, _permuted(value, self.product.right_order)),
            attn_mask=_joined(masks, scores.masks, left.dtype),
            is_causal=False,
            scale=None if is_default else scores.scale,
        )

    def result(self, result: TensorProxy) -> TensorProxy:
        """Return the result of a kernel in the dims of the model's."""
        return _permuted(clang.reshape(result, (*self.product.left.shape[:-1], result.shape[-1])), self.product.order)


class _Call(NamedTuple):
    """A call of attention whose queries do not have four dims."""

    query: TensorProxy
    key: TensorProxy
    value: TensorProxy
    mask: TensorProxy | None
    is_causal: bool
    scale: float | None

    @property
    def has_gradients(self) -> bool:
        """True: the call is the model's own."""
        return True

    @property
    def operands(self) -> tuple[list[TensorProxy], ...]:
        """The queries, keys, values, and masks."""
        return [self.query], [self.key], [self.value], [] if self.mask is None else [self.mask]

    def arguments(self, values: Mapping[str, TensorProxy]) -> dict[str, Any] | None:
        """As of attention that is written out."""
        mask, shape = self.mask, (*self.query.shape[:-1], self.key.shape[-_MATRIX])
        if mask is not None:
            mask = _with_heads(values.get(mask.name, mask), shape, shape)
            if mask is None:
                return None
        tensors = (values.get(each.name, each) for each in (self.query, self.key, self.value))
        others = {"attn_mask": mask, "is_causal": self.is_causal, "scale": self.scale}
        return _arguments(_batch_and_heads(shape[:-_MATRIX]), tensors, **others)

    def result(self, result: TensorProxy) -> TensorProxy:
        """Return the result of a kernel in the dims of the call's."""
        return clang.reshape(result, (*self.query.shape[:-1], self.value.shape[-1]))


def fuse_attention(
    trace: Trace,
    has_no_kernel: HasNoKernel,
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the trace with calls of attention where it is written out.

    Args:
        trace: The program.
        has_no_kernel: Decides for a call.
        strides: Returns torch's strides of the values of a trace, by name.
        in_torch: Returns whether a call runs as torch runs it.
    """
    if _ATTENDING.isdisjoint(bound.symbol for bound in trace.bound_symbols):
        return trace
    matcher, active, sites = _Matcher(trace, in_torch), active_names(trace), dict[str, _Attention | _Call]()
    for bound in trace.bound_symbols:
        attention = _call_of_other_rank(bound, in_torch) or matcher.match(bound)
        if attention is None:
            continue
        with recording(trace.derive("arguments"), clang.language):
            arguments = attention.arguments({})
        flows = _flows(attention, active, bound)
        if any(flows) and not attention.has_gradients:
            continue
        if arguments is None or has_no_kernel(arguments, flows):
            continue
        sites[bound.output.name] = attention
    if not sites:
        return trace
    restored = results_to_restore(trace, lambda bound: not sites.keys().isdisjoint(bound.outputs), strides)
    return trace if restored is None else _rewrite(trace, sites, restored)


def _flows(attention: _Attention | _Call, active: set[str], last: BoundSymbol) -> tuple[bool, ...]:
    """Return which of query, key, value and mask a gradient may flow to."""
    return tuple(is_differentiated(last) and any(x.name in active for x in each) for each in attention.operands)


def _rewrite(trace: Trace, sites: dict[str, _Attention | _Call], restored: dict[str, TensorProxy]) -> Trace:
    new = trace.derive("fuse_attention")
    stand_ins = StandIns(new, restored)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            attention = sites.get(bound.output.name) if isinstance(bound.output, TensorProxy) else None
            if attention is None:
                new.record(stand_ins.substitute(bound))
                continue
            output = stand_ins.values.get(bound.output.name, bound.output)
            with new.set_tags(bound.tags, bound.source):
                record_as(new, output, partial(_attend, attention, stand_ins.values))
        stand_ins.restore()
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


def _attend(attention: _Attention | _Call, values: Mapping[str, TensorProxy]) -> TensorProxy:
    arguments = attention.arguments(values)
    assert arguments is not None, "they were recorded before"
    return attention.result(ATTENTION(**arguments))


# matching


class _Matcher:
    def __init__(self, trace: Trace, in_torch: Callable[[BoundSymbol], bool]) -> None:
        self._makers = Makers(trace)
        self._reads = count_reads(trace)
        self._in_torch = in_torch

    def match(self, last: BoundSymbol) -> _Attention | None:
        """Return the attention whose last call, the product of weights and value, is this one."""
        for product in _products(last):
            if product.left_order is not None:
                continue
            x, shapes = product.left, [tuple(product.left.shape)]
            while (call := self._maker(x, last)) is not None and call.symbol not in SOFTMAX:
                operand = _converted(call)
                if operand is None:
                    break
                x = operand
                shapes.append(tuple(x.shape))
            if call is None or call.symbol not in SOFTMAX or not self._in_torch(call) or not self._in_torch(last):
                continue
            arguments = call.symbol.bind(call.args, call.kwargs)
            if arguments["dim"] in (-1, x.ndim - 1):
                scores = self._scores(arguments["input"], last, 1.0, (), shapes)
                return None if scores is None else _Attention(scores, product)
        return None

    def _maker(self, x: TensorProxy, last: BoundSymbol) -> BoundSymbol | None:
        """Return the call that computes a value which nothing else reads."""
        call = self._makers.calls.get(x.name)
        is_own = call is not None and self._reads[x.name] == 1 and isinstance(call.output, TensorProxy)
        return call if is_own and call is not None and call.mode == last.mode else None

    def _scores(
        self, x: TensorProxy, last: BoundSymbol, scale: float, masks: tuple[_Mask, ...], shapes: list[Shape]
    ) -> _Scores | None:
        """Return the scores whose remaining operations, masks and scale come before these."""
        call, shapes = self._maker(x, last), [*shapes, tuple(x.shape)]
        if call is None:
            return None
        product, addend, factor = self._product(call)
        if product is not None:
            if addend is not None:
                masks = (*masks, _Mask(addend, shapes[-1]))
            if not self._in_torch(call) or (addend is not None and scale != 1):
                return None
            with_heads = [shape for shape in shapes if len(shape) == _HEADS]
            return _Scores(self._with_base(product), scale * factor, masks, (with_heads or shapes)[0])
        operand = _converted(call)
        if operand is not None:
            return self._scores(operand, last, scale, masks, shapes)
        operand, factor = _scaled(call)
        if operand is not None:
            return self._scores(operand, last, scale * factor, masks, shapes)
        masked = self._masked(call, shapes[-1], scale)
        if masked is not None:
            return self._scores(masked[0], last, scale, (*masks, masked[1]), shapes)
        for operand, mask in _sums(call) if scale == 1 else ():
            result = self._scores(operand, last, scale, (*masks, _Mask(mask, shapes[-1])), shapes)
            if result is not None:
                return result
        return None

    def _product(self, call: BoundSymbol) -> tuple[_Product | None, TensorProxy | None, float]:
        """Return the product that a call computes, what it adds to it, and the factor of the product."""
        if call.symbol is torchlang.baddbmm:
            arguments = call.symbol.bind(call.args, call.kwargs)
            addend, left, right, beta, alpha = (
                arguments[name] for name in ("input", "batch1", "batch2", "beta", "alpha")
            )
            if beta in (0, 1) and isinstance(alpha, (int, float)):
                return _Product(left, right), addend if beta else None, alpha
        return next((each for each in _products(call) if each.order is None), None), None, 1.0

    def _with_base(self, product: _Product) -> _Product:
        """Return the product of scores with the key that was transposed for it."""
        maker = self._makers.prim(product.right.name)
        if product.right_order is not None or maker is None or maker.symbol is not prims.permute:
            return product
        key, order = maker.args
        return product._replace(right=key, right_order=tuple(order))

    def _masked(self, call: BoundSymbol, shape: Shape, scale: float) -> tuple[TensorProxy, _Mask] | None:
        """Return the scores and the mask of a call that fills scores with a number."""
        if call.symbol not in (torchlang.masked_fill, torchlang.where):
            return None
        first, second, third = call.symbol.bind(call.args, call.kwargs).values()
        if call.symbol is torchlang.masked_fill:
            scores, mask, number, hides = first, second, self._number(third), True
        else:
            mask, hides = first, not isinstance(self._number(second), TensorProxy)
            scores, number = (third, self._number(second)) if hides else (second, self._number(third))
        is_scores = isinstance(scores, TensorProxy) and same_shape(scores.shape, shape)
        is_number = isinstance(number, (int, float)) and scale > 0 and number * scale <= _hidden(call.output.dtype)
        is_filled = is_scores and is_number and mask.dtype == torch.bool
        return (scores, _Mask(mask, shape, hides, number * scale)) if is_filled else None

    def _number(self, value: Any) -> Any:
        """Return a number, or that of which a tensor is full."""
        maker = self._makers.prim(value.name) if isinstance(value, TensorProxy) else None
        return maker.args[1] if maker is not None and maker.symbol is prims.full else value


def _hidden(dtype: torch.dtype) -> float:
    return _HIDDEN_DOUBLE if dtype == torch.float64 else _HIDDEN


def _converted(call: BoundSymbol) -> TensorProxy | None:
    """Return the values that a call converts to another dtype, or reshapes in their leading dims."""
    prim = only_prim(call, _BROADCASTS)
    if prim is None or prim.symbol not in (prims.convert_element_type, prims.reshape):
        return None
    x: TensorProxy = prim.args[0]
    is_matrix = same_shape(x.shape[-_MATRIX:], prim.output.shape[-_MATRIX:])
    return x if is_matrix and x.dtype.is_floating_point and prim.output.dtype.is_floating_point else None


def _scaled(call: BoundSymbol) -> tuple[TensorProxy | None, float]:
    """Return the values that a call multiplies or divides by a number, and the factor."""
    prim = only_prim(call, _BROADCASTS)
    if prim is None or prim.symbol not in (prims.mul, prims.div):
        return None, 1.0
    x, number = prim.args
    if prim.symbol is prims.mul and not isinstance(x, TensorProxy):
        x, number = number, x
    is_scaled = isinstance(x, TensorProxy) and type(number) in (int, float) and math.isfinite(number) and number != 0
    return (x, number if prim.symbol is prims.mul else 1 / number) if is_scaled else (None, 1.0)


def _sums(call: BoundSymbol) -> Iterator[tuple[TensorProxy, TensorProxy]]:
    """Yield the terms of a sum, in both orders: the one that may be scores, of the sum's shape, and the mask."""
    prim = only_prim(call, _BROADCASTS)
    if prim is None or prim.symbol is not prims.add or call.symbol is not torchlang.add:
        return
    one, other, alpha = (call.symbol.bind(call.args, call.kwargs)[name] for name in ("input", "other", "alpha"))
    if not isinstance(one, TensorProxy) or not isinstance(other, TensorProxy) or alpha != 1 or one is other:
        return
    for scores, mask in ((one, other), (other, one)):
        if same_shape(scores.shape, call.output.shape) and mask.dtype.is_floating_point:
            yield scores, mask


def _products(call: BoundSymbol) -> Iterator[_Product]:
    """Yield the products of batches of matrices that a call computes: of einsum, with the factors in both orders."""
    if call.symbol in _PRODUCTS:
        left, right = list(call.symbol.bind(call.args, call.kwargs).values())[:2]
        if left.ndim == right.ndim > _MATRIX and same_shape(left.shape[:-_MATRIX], right.shape[:-_MATRIX]):
            yield _Product(left, right)
    elif call.symbol is torchlang.einsum and isinstance(call.args[0], str):
        factors = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
        terms, _, result = call.args[0].replace(" ", "").partition("->")
        labels = terms.split(",")
        if len(factors) == len(labels) == 2 and all(each.isalpha() for each in (*labels, result)):
            for first, second in ((0, 1), (1, 0)):
                product = _einsum(factors[first], factors[second], labels[first], labels[second], result)
                if product is not None:
                    yield product


def _einsum(left: TensorProxy, right: TensorProxy, of_left: str, of_right: str, result: str) -> _Product | None:
    """Return the product of matrices that dims of these labels have; None for another sum of products."""
    batch = [label for label in result if label in of_left and label in of_right]
    inner, rows, columns = (
        "".join(label for label in of_left if label in of_right and label not in result),
        "".join(label for label in of_left if label not in of_right),
        "".join(label for label in of_right if label not in of_left),
    )
    orders = (*batch, rows, inner), (*batch, inner, columns), (*batch, rows, columns)
    if not batch or any(len(label) != 1 for label in (inner, rows, columns)):
        return None
    if any(
        len(set(each)) != len(each) or set(each) != set(order)
        for each, order in zip((of_left, of_right, result), orders, strict=True)
    ):
        return None  # a diagonal, or a sum over one factor's dim
    sizes = [(left.shape[of_left.index(label)], right.shape[of_right.index(label)]) for label in (*batch, inner)]
    if not same_shape(*zip(*sizes, strict=True)):
        return None
    places = [tuple(map(of_left.index, orders[0])), tuple(map(of_right.index, orders[1]))]
    places.append(tuple(map(orders[2].index, result)))
    return _Product(left, right, *(None if order == tuple(range(len(order))) else order for order in places))


def _call_of_other_rank(call: BoundSymbol, in_torch: Callable[[BoundSymbol], bool]) -> _Call | None:
    """Return a call of attention whose queries do not have four dims, if its leading dims can be two."""
    if call.symbol is not ATTENTION or not in_torch(call):
        return None
    query, key, value, mask, dropout, is_causal, scale, enable_gqa = call.symbol.bind(call.args, call.kwargs).values()
    leading = [x.shape[:-_MATRIX] for x in (query, key, value)]
    is_one_batch = query.ndim not in (_MATRIX, _HEADS) and all(same_shape(leading[0], each) for each in leading)
    return None if dropout or enable_gqa or not is_one_batch else _Call(query, key, value, mask, is_causal, scale)


# the call


def _arguments(heads: Shape, tensors: Iterable[TensorProxy], **others: Any) -> dict[str, Any]:
    """Return the arguments of a call. heads: the batch and the heads of the query, key and value, `tensors`."""
    rows = (clang.reshape(x, (*heads, *x.shape[-_MATRIX:])) for x in tensors)
    return {**dict(zip(("query", "key", "value"), rows, strict=True)), "dropout_p": 0.0, "enable_gqa": False, **others}


def _batch_and_heads(dims: Shape) -> Shape:
    """Return leading dims as two: those of windows, say, are heads of a kernel."""
    first, *others = dims
    return first, math.prod(others)


def _permuted(x: TensorProxy, order: tuple[int, ...] | None) -> TensorProxy:
    return x if order is None or order == tuple(range(x.ndim)) else prims.permute(x, order)


def _with_heads(mask: TensorProxy, scores: Shape, shape: Shape) -> TensorProxy | None:
    """Return the mask of scores as one of the same scores reshaped to `shape`, with heads; None if there is none."""
    if mask.ndim <= _MATRIX:
        return _of_rank(mask, _MATRIX)  # torch's kernels take no others of fewer dims than the scores
    mask = _of_rank(mask, len(scores))
    batch, leading = shape[:-_MATRIX], mask.shape[:-_MATRIX]
    if same_shape(leading, (1,) * len(leading)):
        leading = (1, 1)
    elif same_shape(scores[:-_MATRIX], leading):
        leading = _batch_and_heads(batch)
    elif same_shape(scores[:-_MATRIX], batch) and _folds(leading[1:], batch[1:]):
        leading = _batch_and_heads(leading)
    else:
        return None
    return clang.reshape(mask, (*leading, *mask.shape[-_MATRIX:]))


def _folds(leading: Shape, dims: Shape) -> bool:
    """Return whether a mask's dims can be one: it has all of the scores', or none."""
    return len(dims) == 1 or same_shape(leading, (1,) * len(dims)) or same_shape(leading, dims)


def _of_rank(mask: TensorProxy, rank: int) -> TensorProxy:
    return clang.reshape(mask, ((1,) * (rank - mask.ndim) + tuple(mask.shape)))


def _joined(masks: list[TensorProxy], matches: tuple[_Mask, ...], dtype: torch.dtype) -> TensorProxy | None:
    """Return a mask of bools, or the sum of all masks."""
    if len(masks) == 1 and masks[0].dtype == torch.bool and matches[0].value == -math.inf:
        return clang.logical_not(masks[0]) if matches[0].hides else masks[0]
    added = [_additive(mask, match, dtype) for mask, match in zip(masks, matches, strict=True)]
    return reduce(clang.add, added) if added else None


def _additive(mask: TensorProxy, match: _Mask, dtype: torch.dtype) -> TensorProxy:
    """Return a mask that is added to the scores. Kernels of a GPU multiply it, by more than finfo.min bears: nan in a
    row of these alone."""
    if mask.dtype != torch.bool:
        is_bounded = mask.device.type == "cpu" or dtype == torch.float16
        return mask if is_bounded else clang.maximum(mask, _LOWEST)
    hidden = mask if match.hides else clang.logical_not(mask)
    value = match.value if match.value == -math.inf else max(match.value, _LOWEST)
    return torchlang.masked_fill(torchlang.zeros_like(mask, dtype=dtype), hidden, value)
