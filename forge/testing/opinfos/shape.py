"""OpInfos of the shape family."""

from collections.abc import Callable
from typing import Any

import torch

from forge.testing.opinfo import ALL, ErrorGenerator, OpInfo, SampleGenerator, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, method, of_input, register_computed

DIM = "out of range"


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, dtypes=ALL, **known))


def _method(name: str, samples: SampleGenerator, wrong: ErrorGenerator) -> None:
    _register(f"Tensor.{name}", method(name), samples, wrong, symbols=(f"torch.Tensor.{name}",))


_out_of_range = errors((lambda make: sample(make(2, 3), 5), IndexError, DIM))
_bad_shape = errors((lambda make: sample(make(2, 3), (4, 2)), RuntimeError, "is invalid for input of size"))

_reshapes = cases(
    lambda make: sample(make(2, 6), (3, 4)),
    lambda make: sample(make(2, 6), (-1,)),
    lambda make: sample(make(2, 6), (2, -1, 3)),
    lambda make: sample(make(2, 6), (2, 6)),
    lambda make: sample(make(0, 3), (3, 0)),
    lambda make: sample(make(1), ()),
)
_varied = cases(lambda make: sample(make(2, 6), 3, -1), lambda make: sample(make(2, 6), [4, 3]))
_register("reshape", torch.reshape, _reshapes, _bad_shape)
_method("reshape", _varied, _bad_shape)
_method("view", _varied, _bad_shape)
_likes = cases(lambda make: sample(make(2, 6), make(4, 3)), lambda make: sample(make(0), make(0, 2)))
_bad_like = errors((lambda make: sample(make(2, 3), make(4)), RuntimeError, "is invalid for input of size"))
_method("view_as", _likes, _bad_like)
_method("reshape_as", _likes, _bad_like)
_register(
    "flatten",
    torch.flatten,
    cases(
        *of_input((2, 3, 4), (), (0, 3)),
        lambda make: sample(make(2, 3, 4), 1),
        lambda make: sample(make(2, 3, 4), 0, -2),
        lambda make: sample(make(2, 3, 4), start_dim=1, end_dim=1),
    ),
    errors(
        (lambda make: sample(make(2, 3), 1, 0), RuntimeError, "cannot come after"),
        (lambda make: sample(make(2, 3), 4), IndexError, DIM),
    ),
)
_no_tensor = errors((lambda make: sample([1.0]), TypeError, "must be Tensor|must be a tensor|expected Tensor"))
_register("ravel", torch.ravel, cases(*of_input((2, 3), (), (0, 3))), _no_tensor)
_register(
    "unflatten",
    torch.unflatten,
    cases(
        lambda make: sample(make(2, 6), 1, (2, 3)),
        lambda make: sample(make(2, 6), -1, (-1, 2)),
        lambda make: sample(make(6, 2), dim=0, sizes=[3, 2]),
    ),
    errors(
        (lambda make: sample(make(2, 6), 1, (4, 2)), RuntimeError, "don't multiply up"),
        (lambda make: sample(make(2, 6), 1, ()), RuntimeError, "must be non-empty"),
    ),
)
_register(
    "unsqueeze",
    torch.unsqueeze,
    cases(
        *(lambda make, dim=dim: sample(make(2, 3), dim) for dim in (0, 1, 2, -1, -3)), lambda make: sample(make(), 0)
    ),
    _out_of_range,
)
_register(
    "squeeze",
    torch.squeeze,
    cases(
        *of_input((1, 2, 1, 3), (), (1, 1)),
        lambda make: sample(make(1, 2, 1), 0),
        lambda make: sample(make(1, 2, 1), 1),
        lambda make: sample(make(1, 2, 1), (0, -1)),
        lambda make: sample(make(), -1),
    ),
    _out_of_range,
)
_expands = cases(
    lambda make: sample(make(2, 1), (2, 3)),
    lambda make: sample(make(3), (2, 3)),
    lambda make: sample(make(), (2,)),
    lambda make: sample(make(1, 3), (0, 3)),
    lambda make: sample(make(2, 1), (4, -1, 3)),
)
_bad_expand = errors(
    (lambda make: sample(make(2, 3), (2, 4)), RuntimeError, "expanded size"),
    (lambda make: sample(make(2, 3), (3,)), RuntimeError, "number of sizes provided"),
)
_method("expand", _expands, _bad_expand)
_method("broadcast_to", _expands, _bad_expand)
_register("broadcast_to", torch.broadcast_to, _expands, _bad_expand)
_method(
    "expand_as",
    cases(lambda make: sample(make(2, 1), make(2, 3)), lambda make: sample(make(3), make(4, 3))),
    errors((lambda make: sample(make(2), make(2, 3)), RuntimeError, "expanded size")),
)
_register(
    "broadcast_tensors",
    torch.broadcast_tensors,
    cases(lambda make: sample(make(2, 1), make(3)), lambda make: sample(make(), make(2, 0), make(1, 1))),
    errors((lambda make: sample(make(2), make(3)), RuntimeError, "must match the size of tensor b")),
)
_register(
    "meshgrid",
    torch.meshgrid,
    cases(
        lambda make: sample(make(2), make(3), indexing="ij"),
        lambda make: sample(make(2), make(3), make(4), indexing="xy"),
        lambda make: sample(make(), make(2), indexing="ij"),
        lambda make: sample(make(2), indexing="xy"),
    ),
    errors(
        (lambda make: sample(make(2), make(3), indexing="ab"), RuntimeError, "indexing must be one of"),
        (lambda make: sample(make(2, 2), make(3), indexing="ij"), RuntimeError, "Expected 0D or 1D tensor"),
    ),
)
for _name in ("atleast_1d", "atleast_2d", "atleast_3d"):
    _register(
        _name,
        getattr(torch, _name),
        cases(*of_input((), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 4)), lambda make: sample(make(), make(2))),
        _no_tensor,
    )


# another order of dims

_swaps = cases(
    lambda make: sample(make(2, 3), 0, 1),
    lambda make: sample(make(2, 3, 4), -1, 0),
    lambda make: sample(make(2, 3), 1, 1),
    lambda make: sample(make(), 0, -1),
    lambda make: sample(make(0, 2), 0, 1),
)
_bad_swap = errors((lambda make: sample(make(2, 3), 0, 2), IndexError, DIM))
_register("transpose", torch.transpose, _swaps, _bad_swap)
_register("swapaxes", torch.swapaxes, _swaps, _bad_swap)
_permutes = cases(
    lambda make: sample(make(2, 3, 4), (2, 0, 1)),
    lambda make: sample(make(2, 3), (0, 1)),
    lambda make: sample(make(2, 0, 4), (-1, 0, 1)),
    lambda make: sample(make(), ()),
)
_bad_permute = errors(
    (lambda make: sample(make(2, 3), (0,)), RuntimeError, "number of dims don't match"),
    (lambda make: sample(make(2, 3), (0, 0)), RuntimeError, "name a dim twice"),
    (lambda make: sample(make(2, 3), (0, 2)), IndexError, DIM),
)
_register("permute", torch.permute, _permutes, _bad_permute)
_method(
    "permute",
    cases(lambda make: sample(make(2, 3, 4), 2, 0, 1), lambda make: sample(make(2, 3), dims=(1, 0))),
    _bad_permute,
)
_moves = cases(
    lambda make: sample(make(2, 3, 4), 0, 2),
    lambda make: sample(make(2, 3, 4), (0, 1), (-1, 0)),
    lambda make: sample(make(2, 3), 1, 1),
)
_bad_move = errors(
    (lambda make: sample(make(2, 3), (0, 1), (0,)), RuntimeError, "Invalid source or destination"),
    (lambda make: sample(make(2, 3), 0, 3), IndexError, DIM),
)
_register("movedim", torch.movedim, _moves, _bad_move)
_register("moveaxis", torch.moveaxis, _moves, _bad_move)
_register(
    "t",
    torch.t,
    cases(*of_input((2, 3), (3,), ())),
    errors((lambda make: sample(make(2, 3, 4)), RuntimeError, "expects a tensor with <= 2 dim")),
)
_matrices = cases(*of_input((2, 3), (4, 2, 3), (2, 0)))
_register(
    "adjoint",
    torch.adjoint,
    _matrices,
    errors((lambda make: sample(make(3)), RuntimeError, "only supported on matrices")),
)


def _attribute(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def get(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)

    get.__name__ = name
    return get


_no_matrix = errors((lambda make: sample(make(3)), RuntimeError, "only supported on matrices"))
_no_attribute = errors((lambda make: sample("x"), AttributeError, "has no attribute"))
_register("Tensor.T", _attribute("T"), cases(*of_input((2, 3), (3,), ())), _no_attribute, symbols=("torch.Tensor.T",))
_register(
    "Tensor.mT", _attribute("mT"), cases(*of_input((2, 3), (4, 2, 3), ())), _no_matrix, symbols=("torch.Tensor.mT",)
)
_register("Tensor.H", _attribute("H"), cases(*of_input((2, 3), (0, 2))), _no_matrix, symbols=("torch.Tensor.H",))
_register("Tensor.mH", _attribute("mH"), _matrices, _no_matrix, symbols=("torch.Tensor.mH",))


# parts

_register(
    "select",
    torch.select,
    cases(
        lambda make: sample(make(2, 3), 0, 1),
        lambda make: sample(make(2, 3), -1, -3),
        lambda make: sample(make(4), 0, 2),
        lambda make: sample(make(3, 4).t(), 1, 0),
    ),
    errors(
        (lambda make: sample(make(2, 3), 0, 2), IndexError, "out of bounds|out of range"),
        (lambda make: sample(make(), 0, 0), IndexError, "0-dim tensor"),
    ),
)
_register(
    "narrow",
    torch.narrow,
    cases(
        lambda make: sample(make(4, 3), 0, 1, 2),
        lambda make: sample(make(4, 3), -1, -2, 2),
        lambda make: sample(make(4), 0, 4, 0),
        lambda make: sample(make(4), dim=0, start=0, length=4),
    ),
    errors(
        (lambda make: sample(make(4), 0, 3, 2), RuntimeError, "exceeds dimension size"),
        (lambda make: sample(make(4), 0, 5, 0), IndexError, DIM),
        (lambda make: sample(make(4), 0, 0, -1), RuntimeError, "non-negative"),
    ),
)
_register(
    "narrow.at_a_tensor",
    torch.narrow,
    cases(
        lambda make: sample(make(4, 3), 0, make.places(1).view(()), 2),
        lambda make: sample(make(3, 4).t(), -1, make.places(-2).view(()), 2),
        lambda make: sample(make(4), 0, start=make.places(4).view(()), length=0),
    ),
    errors(
        (lambda make: sample(make(4), 0, make.places(1, 2), 2), RuntimeError, "0-dim integral Tensor"),
        (lambda make: sample(make(4), 0, make.mask(), 2), RuntimeError, "0-dim integral Tensor"),
    ),
)
_register(
    "ops.aten.slice",
    torch.ops.aten.slice.Tensor,
    cases(
        lambda make: sample(make(5, 3)),
        lambda make: sample(make(5, 3), 0, 1, 4, 2),
        lambda make: sample(make(5, 3), 1, -2),
        lambda make: sample(make(5), 0, 3, 1),
        lambda make: sample(make(5), 0, -10, 9223372036854775807),
    ),
    errors((lambda make: sample(make(5), 2, 0, 1), IndexError, DIM)),
)
_register(
    "diagonal",
    torch.diagonal,
    cases(
        *of_input((3, 4), (2, 3, 4), (0, 3)),
        lambda make: sample(make(3, 4), 1),
        lambda make: sample(make(3, 4), -5),
        lambda make: sample(make(2, 3, 4), offset=-1, dim1=2, dim2=0),
    ),
    errors((lambda make: sample(make(2, 3), 0, 1, 1), RuntimeError, "cannot be identical")),
)
_method(
    "unfold",
    cases(
        lambda make: sample(make(7), 0, 3, 2),
        lambda make: sample(make(2, 5), -1, 2, 1),
        lambda make: sample(make(4, 3), 0, 4, 1),
    ),
    errors(
        (lambda make: sample(make(3), 0, 4, 1), RuntimeError, "maximum size"),
        (lambda make: sample(make(3), 0, 1, 0), RuntimeError, "step is 0"),
    ),
)


# copies in other orders

_flips = cases(
    lambda make: sample(make(2, 3), (0,)),
    lambda make: sample(make(2, 3), (0, -1)),
    lambda make: sample(make(2, 3), ()),
    lambda make: sample(make(0, 3), (0,)),
)
_bad_flip = errors((lambda make: sample(make(2, 3), (2,)), IndexError, DIM))
_register("flip", torch.flip, _flips, _bad_flip)
_method("flip", cases(lambda make: sample(make(2, 3), 0, 1)), _bad_flip)
_register(
    "fliplr",
    torch.fliplr,
    cases(*of_input((2, 3), (2, 3, 4))),
    errors((lambda make: sample(make(3)), RuntimeError, "Input must be >= 2-d")),
)
_register(
    "flipud",
    torch.flipud,
    cases(*of_input((2, 3), (3,))),
    errors((lambda make: sample(make()), RuntimeError, "Input must be >= 1-d")),
)
_register(
    "roll",
    torch.roll,
    cases(
        lambda make: sample(make(2, 3), 1),
        lambda make: sample(make(2, 3), 4, 1),
        lambda make: sample(make(2, 3, 4), (1, -1), (0, -1)),
        lambda make: sample(make(0, 3), 1, 0),
        lambda make: sample(make(3), 0, 0),
    ),
    errors((lambda make: sample(make(2, 3), (1, 2), (0,)), RuntimeError, "must align")),
)
_register(
    "rot90",
    torch.rot90,
    cases(
        *of_input((2, 3), (2, 3, 4)),
        *(lambda make, k=k: sample(make(2, 3), k, (1, 0)) for k in (-1, 0, 2, 3)),
    ),
    errors(
        (lambda make: sample(make(3)), RuntimeError, "expected total dims >= 2"),
        (lambda make: sample(make(2, 3), 1, (0,)), RuntimeError, "expected total rotation dims"),
    ),
)
_triangles = cases(
    *of_input((3, 4), (2, 3, 3), (0, 3)),
    lambda make: sample(make(3, 4), 1),
    lambda make: sample(make(3, 4), diagonal=-2),
)
_no_matrices = errors((lambda make: sample(make(3)), RuntimeError, "must have at least 2 dim"))
_register("tril", torch.tril, _triangles, _no_matrices)
_register("triu", torch.triu, _triangles, _no_matrices)
_register(
    "diag_embed",
    torch.diag_embed,
    cases(
        *of_input((3,), (2, 3)),
        lambda make: sample(make(2, 3), 1),
        lambda make: sample(make(2, 3), offset=-1, dim1=0, dim2=2),
    ),
    errors((lambda make: sample(make(2, 3), 0, 1, 1), RuntimeError, "cannot be identical")),
)
_register(
    "diag",
    torch.diag,
    cases(*of_input((3,), (3, 4)), lambda make: sample(make(3), 2), lambda make: sample(make(3, 4), -1)),
    errors((lambda make: sample(make(2, 3, 4)), RuntimeError, "Supports 1D or 2D tensors")),
)


# the same elements

_method(
    "contiguous",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(2, 3, 4, 5), memory_format=torch.channels_last)),
    errors((lambda make: sample(make(2), memory_format="x"), TypeError, "memory_format")),
)
_register(
    "clone",
    torch.clone,
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(2, 3).t(), memory_format=torch.contiguous_format)),
    _no_tensor,
)
_register("detach", torch.detach, cases(*of_input((2, 3), ())), _no_tensor, gradient=False)


def _written_diagonal(x: torch.Tensor) -> torch.Tensor:
    """A clone of x, changed through a view that has no inverse of its own."""
    out = x.clone()
    out.diagonal().fill_(1)
    return out


def _detached_clone(x: torch.Tensor) -> torch.Tensor:
    """A clone of x, detached in place."""
    return x.clone().detach_()


_register(
    "detach_",
    _detached_clone,
    cases(*of_input((2, 3), ())),
    errors((lambda make: sample(None), AttributeError, "clone")),
    gradient=False,
    symbols=("torch.detach_",),
)


def _written_parts(x: torch.Tensor) -> torch.Tensor:
    """A clone of x, changed through some of several views; eager allows that without gradients only."""
    out = x.clone()
    out.chunk(2, -1)[0].fill_(0)
    out.unbind(0)[1].fill_(1)
    return out


_matrices_written = cases(lambda make: sample(make(3, 4)), lambda make: sample(make(4, 3).t()))
_register(
    "diagonal.written",
    _written_diagonal,
    _matrices_written,
    errors((lambda make: sample(make(3)), IndexError, "out of range")),
    symbols=("torch.diagonal",),
)
_register(
    "chunk.written",
    _written_parts,
    _matrices_written,
    errors((lambda make: sample(make()), RuntimeError, "at least a 1-dimensional tensor")),
    symbols=("torch.chunk",),
    gradient=False,
)

register_computed(
    """reshape Tensor.reshape Tensor.view Tensor.view_as Tensor.reshape_as flatten ravel unflatten unsqueeze squeeze
    Tensor.expand Tensor.broadcast_to broadcast_to Tensor.expand_as broadcast_tensors meshgrid atleast_1d atleast_2d
    atleast_3d transpose swapaxes permute Tensor.permute movedim moveaxis t adjoint Tensor.T Tensor.mT Tensor.H
    Tensor.mH select narrow ops.aten.slice diagonal Tensor.unfold diag Tensor.contiguous""".split()
)
