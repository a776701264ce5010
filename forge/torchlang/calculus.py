"""The numerical calculus of torch: integrals by the trapezoidal rule, derivatives by differences, along dims."""

from collections.abc import Sequence
from typing import Any

import torch

from forge import clang, prims
from forge.ir import NUMBER_TYPES, Number, Symbol, TensorProxy, check
from forge.prims.core import check_dim, check_dims, same, statically_true, torch_check
from forge.torchlang.core import check_tensor, torchsymbol

Parts = tuple[TensorProxy, ...]
Spacing = complex | Sequence[Number] | Sequence[TensorProxy] | None


# integrals


def _check_numbers(op: str, **arguments: Any) -> None:
    for name, tensor in arguments.items():
        check_tensor(op, **{name: tensor})
        torch_check(
            tensor.dtype != torch.bool,
            lambda name=name: f"{op}: received a bool input for `{name}`, but bool is not supported",
        )


def _steps(op: str, y: TensorProxy, x: TensorProxy, dim: int) -> TensorProxy:
    """Return the distances between the points x, in a shape that broadcasts with y's."""
    if x.ndim == 1:
        torch_check(
            same(x.shape[0], y.shape[dim]),
            lambda: f"{op}: There must be one `x` value for each sample point, but x is {x} and y is {y} along {dim}",
        )
        x = clang.reshape(x, [x.shape[0] if i == dim else 1 for i in range(y.ndim)])
    elif x.ndim < y.ndim:
        x = clang.reshape(x, (*(1,) * (y.ndim - x.ndim), *x.shape))
    return clang.sub(clang.slice_in_dim(x, dim, 1, None), clang.slice_in_dim(x, dim, 0, -1))


def _areas(op: str, y: TensorProxy, x: TensorProxy | None, dx: Number | None, dim: int) -> TensorProxy:
    """Return twice the area between each two neighbours."""
    sides = clang.add(clang.slice_in_dim(y, dim, 0, -1), clang.slice_in_dim(y, dim, 1, None))
    return clang.mul(sides, _steps(op, y, x, dim)) if x is not None else clang.mul(sides, dx)


def _along(op: str, y: TensorProxy, x: TensorProxy | None, dx: Number | None, dim: int) -> tuple[Number | None, int]:
    """Return (dx, 1 unless dx or x is given; the dim counted from the front)."""
    _check_numbers(op, y=y, **({} if x is None else {"x": x}))
    check(x is None or dx is None, lambda: f"{op}: x and dx are given, but only one may be", TypeError)
    check(y.ndim > 0, lambda: f"{op}: Dimension specified as {dim} but tensor has no dimensions: {y}", IndexError)
    return 1 if x is None and dx is None else dx, check_dim(op, dim, y.ndim)


def _trapezoid(name: str) -> Symbol:
    def body(y: TensorProxy, x: TensorProxy | None = None, *, dx: Number | None = None, dim: int = -1) -> TensorProxy:
        dx, dim = _along(name, y, x, dx, dim)
        if statically_true(y.shape[dim] == 0):
            return prims.full((*y.shape[:dim], *y.shape[dim + 1 :]), 0, y.dtype, y.device)
        if x is None:
            ends = clang.add(clang.select(y, dim, 0), clang.select(y, dim, -1))
            return (clang.sum(y, dim) - ends * 0.5) * dx
        return clang.div(clang.sum(_areas(name, y, x, dx, dim), dim), 2)

    body.__name__, body.__doc__ = name, "The integral of y along `dim`, at points x or `dx` apart, by trapezoids."
    return torchsymbol(getattr(torch, name))(body)


trapezoid, trapz = _trapezoid("trapezoid"), _trapezoid("trapz")


@torchsymbol(torch.cumulative_trapezoid)
def cumulative_trapezoid(
    y: TensorProxy, x: TensorProxy | None = None, *, dx: Number | None = None, dim: int = -1
) -> TensorProxy:
    """Return the integral of y from its first point to each later one, along `dim`."""
    dx, dim = _along("cumulative_trapezoid", y, x, dx, dim)
    areas = _areas("cumulative_trapezoid", y, x, dx, dim)
    if clang.category(areas.dtype) < 2:
        areas = clang.convert(areas, torch.int64)
    return clang.div(prims.cumsum(areas, dim), 2)


# derivatives


def _spacings(spacing: Spacing, dims: tuple[int, ...], has_dim: bool, ndim: int) -> list[Any]:
    """Return one spacing, a number or a vector of coordinates, for each dim."""
    if spacing is None or isinstance(spacing, NUMBER_TYPES):
        return [1 if spacing is None else spacing] * len(dims)
    torch_check(
        len(spacing) == len(dims),
        lambda: (
            "torch.gradient expected spacing to be unspecified, a scalar or a list of the length of "
            f"{'dim' if has_dim else f'self.dim() = {ndim}'}, but got {len(spacing)} spacings for {len(dims)} dims"
        ),
    )
    return list(spacing)


def _check_gradient(input: TensorProxy, dims: tuple[int, ...], edge_order: int) -> None:
    torch_check(input.dtype != torch.uint8, lambda: f"torch.gradient does not support uint8 input: {input}")
    torch_check(
        edge_order in (1, 2),
        lambda: f"torch.gradient only supports edge_order=1 and edge_order=2, but got {edge_order}",
    )
    for dim in dims:
        torch_check(
            not statically_true(input.shape[dim] < edge_order + 1),
            lambda dim=dim: (
                f"torch.gradient expected each dimension size to be at least edge_order+1 = {edge_order + 1}, "
                f"but dim {dim} of {input} is not"
            ),
        )


@torchsymbol(torch.gradient)
def gradient(
    input: TensorProxy, *, spacing: Spacing = None, dim: int | Sequence[int] | None = None, edge_order: int = 1
) -> Parts:
    """Return the derivative along each of `dim` (all by default) by finite differences.

    spacing: the distance between neighbours, for all dims or for each, or the coordinates of the elements. edge_order:
    the order of accuracy of the first and the last derivative. Source: numpy.gradient, B. Fornberg, Math. Comp. 51
    (1988).
    """
    dims = range(input.ndim) if dim is None else clang.as_tuple(dim)
    dims = check_dims("gradient", tuple(dims), input.ndim)
    _check_gradient(input, dims, edge_order)
    spacings = _spacings(spacing, dims, dim is not None, input.ndim)
    return tuple(_derivative(input, each, by, edge_order) for each, by in zip(dims, spacings, strict=True))


def _derivative(f: TensorProxy, dim: int, spacing: Any, edge_order: int) -> TensorProxy:
    if isinstance(spacing, TensorProxy):
        torch_check(
            spacing.ndim == 1,
            lambda: f"torch.gradient expected each element of spacing to have one dimension, but got {spacing}",
        )
        return _at_positions(f, dim, spacing, edge_order)
    return _gradient_even_spacing(f, dim, spacing, edge_order)


def _gradient_even_spacing(f: TensorProxy, dim: int, h: Number, edge_order: int) -> TensorProxy:
    """Return central differences, one-sided at the ends."""

    def at(start: int, stop: int | None) -> TensorProxy:
        return clang.slice_in_dim(f, dim, start, stop)

    inner = clang.div(clang.sub(at(2, None), at(0, -2)), 2 * h)
    if edge_order == 1:
        first, last = clang.sub(at(1, 2), at(0, 1)), clang.sub(at(-1, None), at(-2, -1))
    else:
        first = at(0, 1) * -1.5 + at(1, 2) * 2 - at(2, 3) * 0.5
        last = at(-1, None) * 1.5 - at(-2, -1) * 2 + at(-3, -2) * 0.5
    return clang.cat([clang.div(first, h), inner, clang.div(last, h)], dim)


def _at_positions(f: TensorProxy, dim: int, places: TensorProxy, edge_order: int) -> TensorProxy:
    """Return the slopes of parabolas through three neighbours; for edge_order 1, at the ends, of lines through two."""
    shape = [-1 if i == dim else 1 for i in range(f.ndim)]

    def at(x: TensorProxy, start: int, stop: int | None) -> TensorProxy:
        return clang.slice_in_dim(x, dim, start, stop)

    steps = clang.reshape(
        clang.sub(clang.slice_in_dim(places, 0, 1, None), clang.slice_in_dim(places, 0, 0, -1)), shape
    )
    slopes = clang.div(clang.sub(at(f, 1, None), at(f, 0, -1)), steps)
    before, after = at(steps, 0, -1), at(steps, 1, None)
    inner = (at(slopes, 0, -1) * after + at(slopes, 1, None) * before) / (before + after)
    first, last = at(slopes, 0, 1), at(slopes, -1, None)
    if edge_order == 2:
        first = first + (first - at(inner, 0, 1))
        last = last + (last - at(inner, -1, None))
    return clang.cat([first, inner, last], dim)
