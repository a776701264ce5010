"""Strides of torch's kernels, for operators whose fake results have other strides.

The fake implementation of an operator, or its decomposition, need not lay out a result as the kernel does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from forge.ir import Number
from forge.ir.proxies import Dim
from forge.ir.strides import contiguous, has_expanded_dim, same, without_gaps
from forge.ir.structure import key_of
from forge.ir.unresolved import UnresolvedSymInt, decide
from forge.torch_internals.dispatch import disable_current_modes, schema_of
from forge.torch_internals.tensors import suggest_memory_format

aten = torch.ops.aten
_ALWAYS_IN_ROW_MAJOR = frozenset(
    {
        aten._log_softmax_backward_data.default,
        aten.isin.Tensor_Scalar,
        aten.isin.Tensor_Tensor,
        aten.rrelu_with_noise.default,
        aten.poisson.default,
        aten._standard_gamma.default,
        aten.normal.Tensor_Tensor,
        aten.normal.float_Tensor,
    }
)  # whatever the strides of their arguments
_BY_A_DECOMPOSITION = frozenset(
    {
        aten.binary_cross_entropy.default,
        aten.copysign.Tensor,
        aten.div.Tensor_mode,
        aten.floor_divide.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.heaviside.default,
        aten.logaddexp.default,
        aten.softplus_backward.default,
        aten.special_xlog1py.default,
        aten.xlogy.Tensor,
    }
)  # whose strides differ if its operands have different layouts


_BATCH_NORMS = frozenset(
    {
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_no_training,
        aten._batch_norm_with_update,
        aten.batch_norm_backward,
        aten.native_batch_norm_backward,
    }
)


def with_kernel_strides(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operator's fake results with the strides of its kernel, where these differ."""
    if func is aten.view.default and 1 in result.shape and is_static(args[0]) and is_static(result):
        viewed = _view_strides(args[0], result.shape)
        if result.stride() == viewed:
            return result
        return result.as_strided(result.shape, viewed, result.storage_offset())
    if func is aten.constant_pad_nd.default and _is_cut(*args[:2]):
        return _laid_out(result, _in_order(tuple(result.shape), [args[0].stride()]))
    if func is aten.log_sigmoid_forward.default and args[0].device.type == "cpu":
        return tuple([_laid_out(each, contiguous(tuple(each.shape))) for each in result])
    if func.overloadpacket in _BATCH_NORMS and args[0].device.type == "cpu":
        first, *rest = result
        return first if first is None else _in_suggested_order(first), *rest
    if func is aten._cudnn_rnn.default:
        first, *rest = result
        return _with_steps_first(first) if _is_batch_first(args) else first, *rest
    strides: tuple[Dim, ...]
    if func in _ALWAYS_IN_ROW_MAJOR:
        strides = contiguous(tuple(result.shape))
    elif func.overloadpacket is aten.native_dropout_backward:
        strides = torch.mul(*args[:2]).stride()
    elif isinstance(result, torch.Tensor) and _is_iterated(func, args, result):
        try:
            strides = _pointwise_strides(tuple(result.shape), _operands(func, args))
        except UnresolvedSymInt:
            return result
    elif func is aten.index.Tensor and _is_indexed_by_numbers(args[0], args[1], result):
        strides = _in_order(tuple(result.shape), _strides_of_indexed(args[0], args[1]))
    else:
        return result
    return _laid_out(result, strides)


def _laid_out(result: torch.Tensor, strides: tuple[Dim, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def in_row_major_order(x: torch.Tensor) -> bool:
    """Return whether a tensor has row-major strides, in dims of size 1 too; installs no guards."""
    return same(x.stride(), contiguous(tuple(x.shape)))


def _is_batch_first(args: tuple[Any, ...]) -> bool:
    """Return whether a call of aten._cudnn_rnn has an input (N, steps, features)."""
    *_, batch_first, _, _, _, batch_sizes, _ = args
    return batch_first and not batch_sizes


def _with_steps_first(x: torch.Tensor) -> torch.Tensor:
    """Return (N, steps, features) as cuDNN writes it: steps are outermost in memory."""
    steps_first = contiguous((x.shape[1], x.shape[0], x.shape[2]))
    return _laid_out(x, (steps_first[1], steps_first[0], steps_first[2]))


def _in_suggested_order(x: torch.Tensor) -> torch.Tensor:
    return _laid_out(x, contiguous(tuple(x.shape))) if in_no_suggested_order(x) else x


def in_no_suggested_order(x: torch.Tensor) -> bool:
    """Return whether a tensor is neither row-major nor a channels-last image: a kernel that allocates its result with
    `suggest_memory_format` makes it row-major."""
    if in_row_major_order(x):
        return False
    return x.ndim < 4 or (is_static(x) and suggest_memory_format(x) is torch.contiguous_format)


def is_static(x: torch.Tensor) -> bool:
    """Return whether no size and no stride of a tensor is symbolic."""
    return all(isinstance(each, int) for each in (*x.shape, *x.stride()))


def _view_strides(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a view. Dims of size 1 get those of torch's kernel, since they, too, decide whether an
    image counts as channels-last."""
    with disable_current_modes():
        return torch.empty_strided(x.shape, x.stride(), device="meta").view(shape).stride()


def _operands(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor | Number]:
    return [x for x, each in zip(args, schema_of(func).arguments, strict=False) if str(each.type) == "Tensor"]


def _is_iterated(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> bool:
    """Return whether the fake result of a pointwise operator differs from TensorIterator's: by a decomposition,
    which ignores dims of size 1 if one of the operands is a number, or in row-major order if one of them is
    expanded."""
    shape = tuple(result.shape)
    if len(shape) < 2 or _has(shape, 0):
        return False
    operands = _operands(func, args)
    wide = [x for x in operands if isinstance(x, torch.Tensor) and x.ndim]
    if func in _BY_A_DECOMPOSITION:
        return len({key_of(x.stride()) for x in wide}) > 1 or len(wide) < len(operands)
    if torch.Tag.pointwise not in func.tags:
        return False
    if len(wide) < len(operands):
        return _has(shape, 1) and all(same(tuple(x.shape), shape) for x in wide)
    return len(wide) > 1 and any(has_expanded_dim(x.stride()) for x in wide)


def _has(lengths: Iterable[Dim], number: int) -> bool:
    return any(isinstance(each, int) and each == number for each in lengths)


def _is_contiguous(x: torch.Tensor) -> bool:
    return x.is_contiguous() if is_static(x) else in_row_major_order(x)


def _pointwise_strides(shape: tuple[Dim, ...], operands: list[torch.Tensor | Number]) -> tuple[Dim, ...]:
    """Return the strides of a pointwise result: its dims are ordered in memory as in the operands.

    Raises UnresolvedSymInt if the order depends on symbolic sizes.

    Source: TensorIteratorBase::reorder_dimensions and fast_set_up (aten/src/ATen/TensorIterator.cpp).
    """
    if all(isinstance(x, torch.Tensor) and same(tuple(x.shape), shape) and _is_contiguous(x) for x in operands):
        return contiguous(shape)
    return _in_order(shape, [_broadcast_strides(x, shape) for x in operands if isinstance(x, torch.Tensor)])


def _is_indexed_by_numbers(x: torch.Tensor, indices: Sequence[torch.Tensor | None], result: torch.Tensor) -> bool:
    index_tensors = [each for each in indices if each is not None]
    if 0 in result.shape or not all(map(is_static, (x, result, *index_tensors))):
        return False
    return all(each.dtype in (torch.int32, torch.int64) for each in index_tensors)


def _strides_of_indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[tuple[Dim, ...]]:
    """Return the strides of the TensorIterator operands of x[indices]: x has stride 0 in the indices' dims, and each
    index in the others.

    Source: AdvancedIndex (aten/src/ATen/native/TensorAdvancedIndexing.cpp).
    """
    by_dim = {dim: each for dim, each in enumerate(indices) if each is not None}
    dims, index_tensors = list(by_dim), list(by_dim.values())
    shape = tuple(torch.broadcast_shapes(*(each.shape for each in index_tensors)))
    others = [dim for dim in range(x.ndim) if dim not in dims]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    before = [dim for dim in others if adjacent and dim < dims[0]]
    after = others[len(before) :]
    stepped = [_broadcast_strides(each, shape) for each in index_tensors]
    if x.device.type == "cuda" and len(set(stepped)) > 1:
        stepped = [contiguous(shape)] * len(stepped)
    own = (*[x.stride(dim) for dim in before], *[0] * len(shape), *[x.stride(dim) for dim in after])
    wide = (*[1] * len(before), *shape, *[1] * len(after))
    whole = (*[x.shape[dim] for dim in before], *shape, *[x.shape[dim] for dim in after])
    with disable_current_modes():
        placed = [torch.empty_strided(shape, strides, device="meta").reshape(wide) for strides in stepped]
        return [own, *[_broadcast_strides(each, whole) for each in placed]]


def _in_order(shape: tuple[Dim, ...], stepped: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Return the strides of a tensor whose dims have the memory order of operands of these strides.

    Raises UnresolvedSymInt if the order depends on symbolic sizes.
    """

    def slower(one: int, other: int) -> int:
        for strides in stepped:
            if has_expanded_dim((strides[one], strides[other])):
                continue
            if not same(strides[one], strides[other]):
                return 1 if decide(strides[one] > strides[other]) else -1
            if decide(shape[one] > shape[other]):
                return 1
        return 0

    order = list(range(len(shape)))[::-1]  # the fastest first
    for i in range(1, len(order)):
        place = i
        for before in range(i - 1, -1, -1):
            verdict = slower(order[before], order[place])
            if verdict < 0:
                break
            if verdict > 0:
                order[before], order[place] = order[place], order[before]
                place = before
    return without_gaps(shape, order)


def _is_cut(x: torch.Tensor, pads: Sequence[Dim]) -> bool:
    """Return whether a pad of or by symbolic sizes adds nothing: torch then clones the remainder, in the order of x's
    strides, and else lays it out in x's memory format.

    Raises UnresolvedSymInt if that depends on the sizes, or if the format follows strides of dims of size 1, which a
    view of symbolic sizes does not determine.
    """
    if in_row_major_order(x) or (is_static(x) and all(isinstance(pad, int) for pad in pads)):
        return False
    if x.ndim in (4, 5) and _has(tuple(x.shape), 1):
        raise UnresolvedSymInt("the memory format of a padded tensor follows strides that are not known")
    return not any(statically_known_true(pad > 0) for pad in pads) and all(decide(pad <= 0) for pad in pads)


def _broadcast_strides(x: torch.Tensor, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    missing = len(shape) - x.ndim
    dims = zip(x.shape, shape[missing:], x.stride(), strict=True)
    steps = [0 if _has((mine,), 1) and not _has((size,), 1) else step for mine, size, step in dims]
    return (*[0] * missing, *steps)
