"""Index expressions of static lengths are simplified once per process, strides without the functions of lengths."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing

import forge
from forge.torch_internals.inductor import simplified_indices
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.inductor.simplified_indices import remember_simplified, stride_of_named_lengths

x, y, length = (sympy.Symbol(name, integer=True) for name in ("x", "y", "length"))
STATIC = SimpleNamespace(replacements={})


@pytest.fixture
def simplified(monkeypatch: pytest.MonkeyPatch) -> list[sympy.Expr]:
    """Return the expressions that Inductor has simplified."""
    seen: list[sympy.Expr] = []
    monkeypatch.setattr(simplified_indices, "_cache", {})
    monkeypatch.setattr(remember_simplified, "original", lambda sizes, index, ranges: seen.append(index) or -index)
    return seen


def test_an_expression_is_simplified_once(simplified: list[sympy.Expr]) -> None:
    results = [remember_simplified.replacement(STATIC, index, {x: 8, y: sympy.Integer(4)}) for index in (x + y, x + y)]
    assert results == [-x - y] * 2
    assert simplified == [x + y]


@pytest.mark.parametrize(
    ("sizes", "index", "ranges"),
    [
        (SimpleNamespace(replacements={length: 3}), x + y, {x: 8, y: 4}),
        (STATIC, x + length, {x: 8, y: 4}),
        (STATIC, x + y, {x: length, y: 4}),
    ],
    ids=["a length that turned out", "a length", "a range"],
)
def test_symbolic_lengths_are_simplified_each_time(
    simplified: list[sympy.Expr], sizes: SimpleNamespace, index: sympy.Expr, ranges: dict
) -> None:
    for _ in range(2):
        remember_simplified.replacement(sizes, index, ranges)
    assert simplified == [index] * 2


def test_other_ranges_are_another_question(simplified: list[sympy.Expr]) -> None:
    for ranges in ({x: 8}, {x: 4}):
        remember_simplified.replacement(STATIC, x + 1, ranges)
    assert simplified == [x + 1] * 2


def test_no_more_is_remembered_than_told(simplified: list[sympy.Expr], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplified_indices, "_MOST", 2)
    for step in range(5):
        remember_simplified.replacement(STATIC, x + step, {x: 8})
    assert len(simplified_indices._cache) <= 2


def test_regions_share_what_is_simplified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplified_indices, "_cache", {})
    seen: list[tuple] = []
    original: Callable = remember_simplified.original
    monkeypatch.setattr(
        remember_simplified,
        "original",
        lambda sizes, index, ranges: seen.append((index, *ranges.items())) or original(sizes, index, ranges),
    )

    def program(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.group_norm(images, 4).relu()
        return torch.nn.functional.group_norm(torch.conv2d(normed, weight), 4).relu()

    given = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 1, 1)
    jitted = forge.jit(program, executors=["inductor", "torch"], cache=False)
    with inductor_config.patch(force_disable_caches=True):
        torch.testing.assert_close(jitted(*given), program(*given), rtol=1e-4, atol=1e-4)
    assert seen
    assert len(seen) == len(set(seen))


halves, chunks = FloorDiv(length, 2), FloorDiv(length + Mod(64 - Mod(length, 64), 64), 64)


@pytest.mark.parametrize(
    ("index", "vector"),
    [
        (x + 16 * y, None),
        (x * halves + y, 16),
        (halves * y + FloorDiv(x, 4), 8),
        (chunks * y + ModularIndexing(x, 1, chunks), None),
        (ModularIndexing(x + chunks * y, 2, 16) + length, 16),
        (FloorDiv(x, halves) + x * halves - halves * x, 16),
        (FloorDiv(x, 16) * chunks + ModularIndexing(x, 1, 16), 16),
        (chunks, 16),
        (length, None),
    ],
)
def test_a_stride_is_found_without_the_functions_of_lengths(index: sympy.Expr, vector: int | None) -> None:
    original, patched = stride_of_named_lengths.original, stride_of_named_lengths.replacement
    seen: list[sympy.Expr] = []

    def recorded(index: sympy.Expr, *others: Any) -> sympy.Expr:
        seen.append(index)
        return original(index, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stride_of_named_lengths, "original", recorded)
        found = patched(index, x, vector)
    assert sympy.simplify(found - original(index, x, vector)) == 0
    functions = {each for expression in seen for each in expression.atoms(sympy.Function)}
    assert all(each.has(x) for each in functions)
