"""OpInfos of the shape family."""

from collections.abc import Callable
from functools import partial

import torch

from forge.testing.opinfo import ALL
from forge.testing.table import ints, mask, on_a_clone, op, register_computed, sample, t, unary, wrong

DIM = "out of range"

_op = partial(op, dtypes=ALL)


_out_of_range = [wrong(t(2, 3), 5, error=IndexError, match=DIM)]
_bad_shape = [wrong(t(2, 3), (4, 2), match="is invalid for input of size")]

_varied = [sample(t(2, 6), 3, -1), sample(t(2, 6), [4, 3])]
_op(
    "reshape",
    sample(t(2, 6), (3, 4)),
    sample(t(2, 6), (-1,)),
    sample(t(2, 6), (2, -1, 3)),
    sample(t(2, 6), (2, 6)),
    sample(t(0, 3), (3, 0)),
    sample(t(1), ()),
    _bad_shape,
)
_op("Tensor.reshape Tensor.view", _varied, _bad_shape)
_likes = [sample(t(2, 6), t(4, 3)), sample(t(0), t(0, 2))]
_bad_like = [wrong(t(2, 3), t(4), match="is invalid for input of size")]
_op("Tensor.view_as Tensor.reshape_as", _likes, _bad_like)
_op(
    "flatten",
    unary((2, 3, 4), (), (0, 3)),
    [sample(t(2, 3, 4), 1), sample(t(2, 3, 4), 0, -2), sample(t(2, 3, 4), start_dim=1, end_dim=1)],
    [wrong(t(2, 3), 1, 0, match="cannot come after"), wrong(t(2, 3), 4, error=IndexError, match=DIM)],
)
_no_tensor = [wrong([1.0], error=TypeError, match="must be Tensor|must be a tensor|expected Tensor")]
_op("ravel", unary((2, 3), (), (0, 3)), _no_tensor)
_op(
    "unflatten",
    [sample(t(2, 6), 1, (2, 3)), sample(t(2, 6), -1, (-1, 2)), sample(t(6, 2), dim=0, sizes=[3, 2])],
    [wrong(t(2, 6), 1, (4, 2), match="don't multiply up"), wrong(t(2, 6), 1, (), match="must be non-empty")],
)
_op("unsqueeze", *(sample(t(2, 3), dim) for dim in (0, 1, 2, -1, -3)), sample(t(), 0), _out_of_range)
_op(
    "squeeze",
    unary((1, 2, 1, 3), (), (1, 1)),
    [sample(t(1, 2, 1), 0), sample(t(1, 2, 1), 1), sample(t(1, 2, 1), (0, -1)), sample(t(), -1)],
    _out_of_range,
)
_bad_expand = [wrong(t(2, 3), (2, 4), match="expanded size"), wrong(t(2, 3), (3,), match="number of sizes provided")]
_op(
    "Tensor.expand Tensor.broadcast_to broadcast_to",
    sample(t(2, 1), (2, 3)),
    sample(t(3), (2, 3)),
    sample(t(), (2,)),
    sample(t(1, 3), (0, 3)),
    sample(t(2, 1), (4, -1, 3)),
    _bad_expand,
)
_op("Tensor.expand_as", sample(t(2, 1), t(2, 3)), sample(t(3), t(4, 3)), wrong(t(2), t(2, 3), match="expanded size"))
_op(
    "broadcast_tensors",
    [sample(t(2, 1), t(3)), sample(t(), t(2, 0), t(1, 1))],
    wrong(t(2), t(3), match="must match the size of tensor b"),
)
_op(
    "meshgrid",
    sample(t(2), t(3), indexing="ij"),
    sample(t(2), t(3), t(4), indexing="xy"),
    sample(t(), t(2), indexing="ij"),
    sample(t(2), indexing="xy"),
    wrong(t(2), t(3), indexing="ab", match="indexing must be one of"),
    wrong(t(2, 2), t(3), indexing="ij", match="Expected 0D or 1D tensor"),
)
_op("atleast_1d atleast_2d atleast_3d", unary((), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 4)), sample(t(), t(2)), _no_tensor)


# another order of dims

_swaps = [
    sample(t(2, 3), 0, 1),
    sample(t(2, 3, 4), -1, 0),
    sample(t(2, 3), 1, 1),
    sample(t(), 0, -1),
    sample(t(0, 2), 0, 1),
]
_bad_swap = [wrong(t(2, 3), 0, 2, error=IndexError, match=DIM)]
_op("transpose swapaxes", _swaps, _bad_swap)
_permutes = [sample(t(2, 3, 4), (2, 0, 1)), sample(t(2, 3), (0, 1)), sample(t(2, 0, 4), (-1, 0, 1)), sample(t(), ())]
_bad_permute = [
    wrong(t(2, 3), (0,), match="number of dims don't match"),
    wrong(t(2, 3), (0, 0), match="name a dim twice"),
    wrong(t(2, 3), (0, 2), error=IndexError, match=DIM),
]
_op("permute", _permutes, _bad_permute)
_op("Tensor.permute", sample(t(2, 3, 4), 2, 0, 1), sample(t(2, 3), dims=(1, 0)), _bad_permute)
_moves = [sample(t(2, 3, 4), 0, 2), sample(t(2, 3, 4), (0, 1), (-1, 0)), sample(t(2, 3), 1, 1)]
_op(
    "movedim moveaxis",
    _moves,
    wrong(t(2, 3), (0, 1), (0,), match="Invalid source or destination"),
    wrong(t(2, 3), 0, 3, error=IndexError, match=DIM),
)
_op("t", unary((2, 3), (3,), ()), wrong(t(2, 3, 4), match="expects a tensor with <= 2 dim"))
_matrices = unary((2, 3), (4, 2, 3), (2, 0))
_op("adjoint", _matrices, wrong(t(3), match="only supported on matrices"))


def _attribute(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def get(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)

    get.__name__ = name
    return get


_no_matrix = [wrong(t(3), match="only supported on matrices")]
_no_attribute = [wrong("x", error=AttributeError, match="has no attribute")]
_op("Tensor.T", unary((2, 3), (3,), ()), _no_attribute, op=_attribute("T"))
_op("Tensor.mT", unary((2, 3), (4, 2, 3), ()), _no_matrix, op=_attribute("mT"))
_op("Tensor.H", unary((2, 3), (0, 2)), _no_matrix, op=_attribute("H"))
_op("Tensor.mH", _matrices, _no_matrix, op=_attribute("mH"))


# parts

_op(
    "select",
    [sample(t(2, 3), 0, 1), sample(t(2, 3), -1, -3), sample(t(4), 0, 2), sample(t(3, 4).t(), 1, 0)],
    wrong(t(2, 3), 0, 2, error=IndexError, match="out of bounds|out of range"),
    wrong(t(), 0, 0, error=IndexError, match="0-dim tensor"),
)
NARROW_ERRORS = [
    wrong(t(4), 0, 3, 2, match="exceeds dimension size"),
    wrong(t(4), 0, 5, 0, error=IndexError, match=DIM),
    wrong(t(4), 0, 0, -1, match="non-negative"),
]
_op(
    "narrow",
    sample(t(4, 3), 0, 1, 2),
    sample(t(4, 3), -1, -2, 2),
    sample(t(4), 0, 4, 0),
    sample(t(4), dim=0, start=0, length=4),
    NARROW_ERRORS,
)
_op(
    "narrow.at_a_tensor",
    sample(t(4, 3), 0, ints(1).view(()), 2),
    sample(t(3, 4).t(), -1, ints(-2).view(()), 2),
    sample(t(4), 0, start=ints(4).view(()), length=0),
    wrong(t(4), 0, ints(1, 2), 2, match="0-dim integral Tensor"),
    wrong(t(4), 0, mask(), 2, match="0-dim integral Tensor"),
)
_op(
    "ops.aten.slice",
    sample(t(5, 3)),
    sample(t(5, 3), 0, 1, 4, 2),
    sample(t(5, 3), 1, -2),
    sample(t(5), 0, 3, 1),
    sample(t(5), 0, -10, 9223372036854775807),
    wrong(t(5), 2, 0, 1, error=IndexError, match=DIM),
    op=torch.ops.aten.slice.Tensor,
)
_op(
    "diagonal",
    unary((3, 4), (2, 3, 4), (0, 3)),
    [sample(t(3, 4), 1), sample(t(3, 4), -5), sample(t(2, 3, 4), offset=-1, dim1=2, dim2=0)],
    wrong(t(2, 3), 0, 1, 1, match="cannot be identical"),
)
_op(
    "Tensor.unfold",
    [sample(t(7), 0, 3, 2), sample(t(2, 5), -1, 2, 1), sample(t(4, 3), 0, 4, 1)],
    [wrong(t(3), 0, 4, 1, match="maximum size"), wrong(t(3), 0, 1, 0, match="step is 0")],
)


# copies in other orders

_flips = [sample(t(2, 3), (0,)), sample(t(2, 3), (0, -1)), sample(t(2, 3), ()), sample(t(0, 3), (0,))]
_bad_flip = [wrong(t(2, 3), (2,), error=IndexError, match=DIM)]
_op("flip", _flips, _bad_flip)
_op("Tensor.flip", sample(t(2, 3), 0, 1), _bad_flip)
_op("fliplr", unary((2, 3), (2, 3, 4)), wrong(t(3), match="Input must be >= 2-d"))
_op("flipud", unary((2, 3), (3,)), wrong(t(), match="Input must be >= 1-d"))
_op(
    "roll",
    sample(t(2, 3), 1),
    sample(t(2, 3), 4, 1),
    sample(t(2, 3, 4), (1, -1), (0, -1)),
    sample(t(0, 3), 1, 0),
    sample(t(3), 0, 0),
    wrong(t(2, 3), (1, 2), (0,), match="must align"),
)
_op(
    "rot90",
    unary((2, 3), (2, 3, 4)),
    *(sample(t(2, 3), k, (1, 0)) for k in (-1, 0, 2, 3)),
    [wrong(t(3), match="expected total dims >= 2"), wrong(t(2, 3), 1, (0,), match="expected total rotation dims")],
)
_triangles = [*unary((3, 4), (2, 3, 3), (0, 3)), sample(t(3, 4), 1), sample(t(3, 4), diagonal=-2)]
_no_matrices = [wrong(t(3), match="must have at least 2 dim")]
_op("tril triu", _triangles, _no_matrices)
_op(
    "diag_embed",
    unary((3,), (2, 3)),
    [sample(t(2, 3), 1), sample(t(2, 3), offset=-1, dim1=0, dim2=2)],
    wrong(t(2, 3), 0, 1, 1, match="cannot be identical"),
)
_op(
    "diag",
    unary((3,), (3, 4)),
    [sample(t(3), 2), sample(t(3, 4), -1)],
    wrong(t(2, 3, 4), match="Supports 1D or 2D tensors"),
)


# the same elements

_op(
    "Tensor.contiguous",
    unary((2, 3), (), (0, 3)),
    sample(t(2, 3, 4, 5), memory_format=torch.channels_last),
    wrong(t(2), memory_format="x", error=TypeError, match="memory_format"),
)
_op("clone", unary((2, 3), (), (0, 3)), sample(t(2, 3).t(), memory_format=torch.contiguous_format), _no_tensor)
_op("detach", unary((2, 3), ()), _no_tensor, gradient=False)


def _written_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Return a clone of x, changed through a view that has no inverse of its own."""
    out = x.clone()
    out.diagonal().fill_(1)
    return out


_op("detach_", unary((2, 3), ()), wrong(None, error=AttributeError, match="clone"), gradient=False, wrap=on_a_clone)


def _written_parts(x: torch.Tensor) -> torch.Tensor:
    """Return a clone of x, changed through some of several views; eager allows that without gradients only."""
    out = x.clone()
    out.chunk(2, -1)[0].fill_(0)
    out.unbind(0)[1].fill_(1)
    return out


_matrices_written = [sample(t(3, 4)), sample(t(4, 3).t())]
_op("diagonal.written", _matrices_written, wrong(t(3), error=IndexError, match="out of range"), op=_written_diagonal)
_op(
    "chunk.written",
    _matrices_written,
    wrong(t(), match="at least a 1-dimensional tensor"),
    gradient=False,
    op=_written_parts,
)

register_computed(
    """reshape Tensor.reshape Tensor.view Tensor.view_as Tensor.reshape_as flatten ravel unflatten unsqueeze squeeze
    Tensor.expand Tensor.broadcast_to broadcast_to Tensor.expand_as broadcast_tensors meshgrid atleast_1d atleast_2d
    atleast_3d transpose swapaxes permute Tensor.permute movedim moveaxis t adjoint Tensor.T Tensor.mT Tensor.H
    Tensor.mH select narrow ops.aten.slice diagonal Tensor.unfold diag Tensor.contiguous""".split()
)
