"""OpInfos of functions that join tensors, split them, and repeat their elements."""

from functools import partial

from forge.testing.opinfo import ALL, Directive
from forge.testing.table import ints, op, register_computed, sample, t, wrong

_op = partial(op, dtypes=ALL)


_op(
    "cat",
    sample([t(2, 3), t(4, 3)]),
    sample((t(2, 3), t(2, 1), t(2, 0)), -1),
    sample([t(3)], dim=0),
    sample([t(0), t(2, 3)], dim=-2),
    sample([t(2, 3), t(2, 3).double()], 1),
    sample([t(2, 3), t(3, 2).t()], 1),
    wrong([t(2, 3), t(2, 4)], match="Sizes of tensors must match"),
    wrong([t()], match="zero-dimensional"),
    wrong([t(2)], 1, error=IndexError, match="out of range"),
)
_op(
    "stack",
    sample([t(2, 3), t(2, 3)]),
    sample([t(2, 3), t(3, 2).t()], -1),
    sample((t(), t(), t()), dim=0),
    sample([t(0, 2)], 1),
    wrong([t(2), t(3)], match="expects each tensor to be equal size"),
    wrong([t(2)], 2, error=IndexError, match="out of range"),
)
_stacks = [sample([t(2, 3), t(2, 3)]), sample([t(3), t(3)]), sample((t(2, 3, 4), t(2, 3, 4)))]
_bad_stack = [wrong([t(2, 3), t(4, 5)], match="Sizes of tensors must match")]
_op("hstack vstack dstack column_stack", _stacks, _bad_stack)


# parts

_splits = [
    sample(t(5, 3), 2),
    sample(t(5, 3), [1, 4]),
    sample(t(4, 6), (2, 0, 4), -1),
    sample(t(4, 6).t(), 6),
    sample(t(0, 3), 2),
]
_bad_split = [wrong(t(5), [1, 2], match="sum exactly to 5"), wrong(t(), 2, match="at least a 1-dimensional tensor")]
_op("split Tensor.split", _splits, _bad_split)
_op(
    "split_with_sizes",
    [sample(t(5, 3), [1, 4]), sample(t(5, 3), [1, 2], dim=1)],
    wrong(t(5), [1, 2], match="sum exactly to 5"),
)
_op(
    "chunk",
    [sample(t(5, 3), 2), sample(t(5, 3), 4, -1), sample(t(0, 3), 2), sample(t(6), chunks=3, dim=0)],
    [wrong(t(5), 0, match="to be greater than 0"), wrong(t(), 1, match="at least a 1-dimensional tensor")],
)
_tensor_splits = [sample(t(4, 6, 8), 2), sample(t(4, 6, 8), (1, 3)), sample(t(4, 6, 8), [2, 2, -1])]
_op(
    "tensor_split",
    _tensor_splits,
    [sample(t(5), 3), sample(t(2, 5), 3, dim=-1)],
    [wrong(t(5), 0, match="must be larger than 0"), wrong(t(), 1, match="at least a 1-dimensional tensor")],
)
_op("hsplit vsplit dsplit", _tensor_splits, wrong(t(5, 7, 9), 2, match="not divisible by the split_size"))
_op(
    "unbind",
    [sample(t(3, 2)), sample(t(3, 2), -1), sample(t(2)), sample(t(0, 2))],
    wrong(t(2), 1, error=IndexError, match="out of range"),
)


# repetition

_repeats = [
    sample(t(2, 3), (2, 1)),
    sample(t(2, 3), (2, 1, 3)),
    sample(t(3), (1,)),
    sample(t(), (2, 2)),
    sample(t(2, 3), (0, 2)),
]
_op(
    "Tensor.repeat",
    _repeats,
    wrong(t(2, 3), (2,), match="can not be smaller than number of dimensions"),
    wrong(t(2), (-1,), match="negative dimension"),
)
_bad_tile = [wrong(t(2), (-1,), match="negative dimension")]
_tiles = [sample(t(2, 3), (2,)), sample(t(3), (2, 1, 2))]
_op("tile Tensor.tile", _tiles, _bad_tile)
_op(
    "repeat_interleave",
    [sample(t(2, 3), 2), sample(t(2, 3), 2, 1), sample(t(2, 3), 0, dim=0), sample(t(), 3)],
    wrong(t(2), -1, match="[Rr]epeats must be non-negative"),
    wrong(t(2), 2, 1, error=IndexError, match="out of range"),
)


_op(
    "repeat_interleave.by_a_tensor",
    sample(t(3), ints(1, 0, 2), output_size=3),
    sample(t(2, 3), ints(2, 1), 0, output_size=3),
    sample(t(4, 3).t(), ints(2).int(), dim=1, output_size=8),
    sample(t(2, 2), ints(2).view(()), output_size=8),
    sample(ints(1, 0, 2), output_size=3),
    sample(t(0), ints(), output_size=0),
    wrong(t(3), t(3), output_size=3, match="must be 0-dim or 1-dim|not implemented"),
    wrong(t(3), ints(1, 2), output_size=3, match="must have the same size"),
    directives=(
        Directive(
            "skip",
            "expanded repeats have another sum than output_size, which stops a GPU: device-side assert triggered",
            test="test_strided[expanded]",
            devices=("cuda",),
        ),
    ),
)


_op(
    "diff",
    sample(t(3, 5)),
    sample(t(3, 5), 2, 0),
    sample(t(3, 5), dim=-1, prepend=t(3, 1)),
    sample(t(3, 5), prepend=t(3, 1), append=t(3, 2)),
    sample(t(4), 3),
    sample(t(3, 5), 0),
    [wrong(t(), match="at least one-dimensional"), wrong(t(3), -1, match="order must be non-negative")],
)

register_computed("split Tensor.split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind".split())
