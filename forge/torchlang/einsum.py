"""The function torch.einsum."""

from collections.abc import Sequence
from typing import Any

import torch

from forge import clang
from forge.ir import TensorProxy
from forge.prims.core import torch_check
from forge.torchlang.core import check_tensor, torchsymbol


@torchsymbol(torch.einsum)
def einsum(equation: str | TensorProxy, *operands: Any) -> TensorProxy:
    """Return the sum of products that an equation describes ("ij,jk->ik", or operand, dims, …, output dims).

    Raises: RuntimeError for an equation that does not fit its operands. Source: torch.einsum.
    """
    if isinstance(equation, str):
        one_list = len(operands) == 1 and isinstance(operands[0], (tuple, list))
        factors = list(operands[0] if one_list else operands)
        terms, output = _read_equation(equation, len(factors))
    else:
        factors, terms, output = _read_sublists((equation, *operands))
    torch_check(len(factors) > 0, lambda: "einsum: must provide at least one operand")
    check_tensor("einsum", **{f"operands[{i}]": operand for i, operand in enumerate(factors)})
    return clang.contract("einsum", factors, *_place_ellipsis(factors, terms, output))


def _read_equation(equation: str, count: int) -> tuple[list[list], list | None]:
    """Return each operand's labels and the output's, "..." included; None for an implied output."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_read_term(term, equation) for term in left.split(",")]
    torch_check(
        len(terms) == count,
        lambda: (
            f"einsum: more operands were provided than specified in the equation, or fewer: {equation!r} has "
            f"{len(terms)}, but {count} were given"
        ),
    )
    return terms, _read_term(right, equation) if arrow else None


def _read_term(term: str, equation: str) -> list:
    labels: list = []
    before, ellipsis, after = term.partition("...")
    for part in (before, after):
        for letter in part:
            torch_check(
                letter.isascii() and letter.isalpha(),
                lambda letter=letter: (
                    f"einsum: invalid subscript given in {equation!r}: {letter!r}, subscripts must be in [a-zA-Z]"
                ),
            )
            labels.append(letter)
        if part is before and ellipsis:
            labels.append("...")
            ellipsis = ""
    return labels


def _read_sublists(arguments: tuple) -> tuple[list, list[list], list | None]:
    """Return the operands, their labels and the output's from einsum(x, [0, 1], y, [1, 2], [0, 2])."""
    operands = list(arguments[0 : len(arguments) - 1 : 2])
    terms = [_read_sublist(dims) for dims in arguments[1 : 2 * len(operands) : 2]]
    return operands, terms, _read_sublist(arguments[-1]) if len(arguments) % 2 else None


def _read_sublist(dims: Sequence) -> list:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    for dim in dims:
        torch_check(
            dim is Ellipsis or 0 <= dim < len(names),
            lambda dim=dim: f"einsum: sublist {list(dims)} has {dim}, but subscripts must be in [0, 52)",
        )
    return ["..." if dim is Ellipsis else names[dim] for dim in dims]


def _place_ellipsis(operands: Sequence[TensorProxy], terms: list[list], output: list | None) -> tuple[list, tuple]:
    """Return labels for every dim; those of an ellipsis are counted from the last dim, so that they broadcast."""
    widest, placed = 0, []
    for operand, labels in zip(operands, terms, strict=True):
        explicit = len(labels) - labels.count("...")
        hidden = operand.ndim - explicit
        torch_check(
            hidden == 0 or (hidden > 0 and "..." in labels),
            lambda operand=operand, labels=labels: (
                f"einsum: the number of subscripts in the equation "
                f"({''.join(labels)}) does not match the number of dimensions of operand {operand}"
            ),
        )
        widest = max(widest, hidden)
        placed.append(_expand_ellipsis(labels, hidden))
    if output is None:
        all_labels = [label for labels in terms for label in labels if label != "..."]
        once = sorted(label for label in set(all_labels) if all_labels.count(label) == 1)
        output = ["...", *once] if any("..." in labels for labels in terms) else once
    for label in output:
        torch_check(
            output.count(label) == 1 and (label == "..." or any(label in labels for labels in terms)),
            lambda label=label: f"einsum: output subscript {label} must appear once there, and in an operand",
        )
    return placed, _expand_ellipsis(output, widest)


def _expand_ellipsis(labels: list, count: int) -> tuple:
    hidden = [f"...{i}" for i in range(count, 0, -1)]
    return tuple(each for label in labels for each in (hidden if label == "..." else [label]))
