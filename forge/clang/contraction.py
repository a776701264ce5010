"""Sums of products over named dims, the basis of einsum, tensordot and bilinear."""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from forge import prims
from forge.clang.shape import permute, reshape, slice_in_dim
from forge.ir import Dim, TensorProxy
from forge.ir.proxies import hint_of
from forge.prims.core import same, statically_true, torch_check

__all__ = ["contract"]

Labels = tuple[object, ...]


def contract(op: str, operands: Sequence[TensorProxy], inputs: Sequence[Labels], output: Labels) -> TensorProxy:
    """Return the sum over every label that is not in `output` of the product of the operands.

    inputs: one label for each dim of each operand; a repeated one is the diagonal. Dims with the same label have the
    same length, or 1. The pairs are contracted along opt_einsum's path, if torch uses it.
    Raises: RuntimeError if lengths differ.
    """
    sizes = _lengths(op, operands, inputs)
    terms = [_simplify(operand, labels, sizes) for operand, labels in zip(operands, inputs, strict=True)]
    for pair in contraction_path([labels for _, labels in terms], output, sizes):
        factors = [terms.pop(i) for i in sorted(pair, reverse=True)][::-1]
        live = set(output).union(*[labels for _, labels in terms])
        terms.append(_contract_pair(factors[0], factors[1], live) if len(factors) == 2 else factors[0])
    x, labels = terms[0]
    x, labels = _sum_out(x, labels, set(output))
    x = permute(x, [labels.index(label) for label in output if label in labels])
    if len(labels) < len(output):
        dims = tuple(i for i, label in enumerate(output) if label in labels)
        x = prims.broadcast_in_dim(x, tuple(sizes[label] if label in labels else 1 for label in output), dims)
    return x


def contraction_path(inputs: Sequence[Labels], output: Labels, lengths: dict[object, Dim]) -> list[tuple[int, ...]]:
    """Return the order of pairs: opt_einsum's if torch would use it and it matters, else from left to right."""
    count = len(inputs)
    backend = torch.backends.opt_einsum
    if count > 2 and backend.is_available() and backend.enabled:
        optimizer = backend.get_opt_einsum()
        names = {label: optimizer.get_symbol(i) for i, label in enumerate(lengths)}
        terms = ["".join(names[label] for label in labels) for labels in inputs]
        equation = ",".join(terms) + "->" + "".join(names[label] for label in output if label in lengths)
        shapes = [tuple(hint_of(lengths[label]) for label in labels) for labels in inputs]
        path = optimizer.contract_path(equation, *shapes, shapes=True, optimize=backend.strategy)[0]
        return list(path)
    return [(0, 1), *((0, count - 1 - i) for i in range(1, count - 1))] if count > 1 else []


def _lengths(op: str, operands: Sequence[TensorProxy], inputs: Sequence[Labels]) -> dict[object, Dim]:
    sizes: dict[object, Dim] = {}
    for operand, labels in zip(operands, inputs, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            if label not in sizes or statically_true(sizes[label] == 1):
                sizes[label] = size
            torch_check(
                statically_true(size == 1) or same(sizes[label], size),
                lambda label=label, size=size, operand=operand: (
                    f"{op}: operands do not broadcast: subscript {label} is of length {sizes[label]} before, "
                    f"but {size} in {operand}"
                ),
            )
    return sizes


def _simplify(x: TensorProxy, labels: Labels, lengths: dict[object, Dim]) -> tuple[TensorProxy, Labels]:
    """Return the operand with diagonals for repeated labels, and without dims of length 1 that broadcast."""
    for label, count in Counter(labels).items():
        for _ in range(count - 1):
            x, labels = _diagonal(x, labels, label)
    stretched = [
        i
        for i, label in enumerate(labels)
        if statically_true(x.shape[i] == 1) and not statically_true(lengths[label] == 1)
    ]
    if stretched:
        x = prims.squeeze(x, tuple(stretched))
        labels = tuple(label for i, label in enumerate(labels) if i not in stretched)
    return x, labels


def _diagonal(x: TensorProxy, labels: Labels, label: object) -> tuple[TensorProxy, Labels]:
    """Merge the first two dims of `label` to their diagonal: every (n + 1)th element of the two flattened dims."""
    first = labels.index(label)
    second = labels.index(label, first + 1)
    rest = [i for i in range(x.ndim) if i not in (first, second)]
    size = x.shape[first]
    flat = reshape(permute(x, (*rest, first, second)), (*[x.shape[i] for i in rest], size * size))
    diagonal = slice_in_dim(flat, flat.ndim - 1, 0, None, size + 1)
    return diagonal, (*[labels[i] for i in rest], label)


def _sum_out(x: TensorProxy, labels: Labels, live: set[object]) -> tuple[TensorProxy, Labels]:
    dims = tuple(i for i, label in enumerate(labels) if label not in live)
    if not dims:
        return x, labels
    return prims.sum(x, dims), tuple(label for label in labels if label in live)


def _contract_pair(
    left: tuple[TensorProxy, Labels], right: tuple[TensorProxy, Labels], live: set[object]
) -> tuple[TensorProxy, Labels]:
    """Return the product of two terms, summed over the labels not in `live`: a batched matrix product, or a
    multiplication."""
    a, a_labels = _sum_out(*left, live | set(right[1]))
    b, b_labels = _sum_out(*right, live | set(left[1]))
    shared = [label for label in a_labels if label in b_labels]
    summed = [label for label in shared if label not in live]
    batch = [label for label in shared if label in live]
    a_only = [label for label in a_labels if label not in shared]
    b_only = [label for label in b_labels if label not in shared]
    a_lengths, b_lengths = dict(zip(a_labels, a.shape, strict=True)), dict(zip(b_labels, b.shape, strict=True))
    out = (*batch, *a_only, *b_only)
    if not summed:
        a = _arrange(a, a_labels, [*batch, *a_only], ())
        b = _arrange(b, b_labels, [*batch, *b_only], ())
        a = reshape(a, (*a.shape, *[1] * len(b_only)))
        b = reshape(b, (*b.shape[: len(batch)], *[1] * len(a_only), *b.shape[len(batch) :]))
        return a * b, out
    a = _arrange(a, a_labels, [*batch, *a_only, *summed], (len(batch), len(a_only)))
    b = _arrange(b, b_labels, [*batch, *summed, *b_only], (len(batch), len(summed)))
    product = prims.matmul(a, b)
    sizes = [*[a_lengths[label] for label in (*batch, *a_only)], *[b_lengths[label] for label in b_only]]
    return reshape(product, sizes), out


def _arrange(x: TensorProxy, labels: Labels, order: list[object], groups: tuple[int, ...]) -> TensorProxy:
    """Return x with its dims in `order`, and those of each group (a count of dims; the last takes the rest) merged."""
    x = permute(x, [labels.index(label) for label in order])
    if not groups:
        return x
    first, second = groups[0], groups[0] + groups[1]
    parts = [x.shape[:first], x.shape[first:second], x.shape[second:]]
    if not parts[0]:
        parts = parts[1:]
    return reshape(x, [math.prod(part) for part in parts])
