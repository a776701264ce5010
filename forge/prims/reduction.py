"""Reduction and scan prims. Dims are counted from the front and are removed, unless the name says otherwise."""

import torch

from forge.ir import Symbol, TensorProxy, check, get_grad, put_grad, register_grad
from forge.prims.core import check_dim, check_dims, check_tensor, known, like, make_prim
from forge.prims.elementwise import ANY, NUMERIC, REAL, Accepts, check_dtype
from forge.prims.shape import broadcast_in_dim, flip


def _reduced_shape(x: TensorProxy, dims: tuple[int, ...]) -> list:
    return [length for dim, length in enumerate(x.shape) if dim not in dims]


def _reduction(
    name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None, identity: bool = True
) -> Symbol:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
        check_tensor(op, x=x)
        check_dtype(op, x, accepts)
        dims = check_dims(op, dims, x.ndim)
        if not identity:
            for dim in dims:
                check(
                    x.ndim == 0 or not known(x.shape[dim] == 0),
                    lambda dim=dim: f"{op}: Expected reduction dim {dim} to have non-zero size, but x is {x}",
                    IndexError,
                )
        return like(x, shape=_reduced_shape(x, dims), dtype=result)

    meta.__doc__ = f"{meaning} over `dims`.\n\nDtypes: {accepts.value}; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta)


sum = _reduction("sum", "the sum", accepts=NUMERIC)
prod = _reduction("prod", "the product", accepts=NUMERIC)
amax = _reduction("amax", "the maximum, nan if there is one", accepts=REAL, identity=False)
amin = _reduction("amin", "the minimum, nan if there is one", accepts=REAL, identity=False)
any = _reduction("any", "whether an element is not 0", accepts=ANY, result=torch.bool)
all = _reduction("all", "whether no element is 0", accepts=ANY, result=torch.bool)


def _arg_extremum(name: str, meaning: str) -> Symbol:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> TensorProxy:
        check_tensor(op, x=x)
        check_dtype(op, x, REAL)
        dim = check_dim(op, dim, x.ndim)
        return like(x, shape=_reduced_shape(x, (dim,)), dtype=torch.int64)

    meta.__doc__ = f"the index of {meaning} along `dim`.\n\nDtypes: x is real; out is int64."
    return make_prim(name, name, meta=meta)


argmax = _arg_extremum("argmax", "a maximum")
argmin = _arg_extremum("argmin", "a minimum")


def _scan(name: str, meaning: str) -> Symbol:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> TensorProxy:
        check_tensor(op, x=x)
        check_dtype(op, x, NUMERIC)
        check_dim(op, dim, x.ndim)
        return like(x)

    meta.__doc__ = f"the {meaning} of the elements so far along `dim`.\n\nDtypes: any but bool; out has the same."
    return make_prim(name, name, meta=meta)


cumsum = _scan("cumsum", "sum")
cumprod = _scan("cumprod", "product")


# gradient rules


def restore_dims(reduced: TensorProxy, x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """A value reduced over `dims` of x, repeated along them to x's shape."""
    kept = tuple(dim for dim in range(x.ndim) if dim not in dims)
    return broadcast_in_dim(reduced, x.shape, kept) if x.ndim else reduced


@register_grad(sum)
def _sum_grad(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    out = sum(x, dims)
    put_grad(x, restore_dims(get_grad(out), x, dims))
    return out


def _register_extremum(prim: Symbol) -> None:
    """Ties share the gradient evenly, as torch.amax does."""

    @register_grad(prim)
    def rule(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
        out = prim(x, dims)
        winners = (x == restore_dims(out, x, dims)).to(x.dtype)
        share = get_grad(out) / (sum(winners, dims) if x.ndim else winners)
        put_grad(x, winners * restore_dims(share, x, dims))
        return out


_register_extremum(amax)
_register_extremum(amin)


@register_grad(cumsum)
def _cumsum_grad(x: TensorProxy, dim: int) -> TensorProxy:
    out = cumsum(x, dim)
    g = get_grad(out)
    put_grad(x, flip(cumsum(flip(g, (dim,)), dim), (dim,)) if x.ndim else g)
    return out
