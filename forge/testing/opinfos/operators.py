"""OpInfos of the operators of aten that are no function of torch."""

from typing import Any

import torch

from forge.testing.opinfo import ALL, FLOATS, Sample
from forge.testing.table import op, sample, t, wrong
from forge.torch_internals.versions import TORCH

aten = torch.ops.aten

op(
    "aten.alias",
    [sample(t(2, 3)), sample(t()), sample(t(0, 2)), sample(t(2, 3).t())],
    wrong(3, match="Expected a value of type 'Tensor' for argument 'self'"),
    dtypes=(*ALL, torch.complex64),
)

op(
    "aten._to_copy",
    sample(t(2, 3)),
    sample(t(0)),
    sample(t(2, 3), dtype=torch.float64),
    sample(t(2, 3, 4, 5), dtype=torch.float64, memory_format=torch.channels_last),
    sample(t(2, 3).t(), device=torch.device("cpu")),
    wrong(t(2, 3), layout=torch.sparse_coo, error=NotImplementedError, match="dense", stricter="forge has no others"),
    dtypes=(*FLOATS, torch.complex64),
)


def _backward(*mask: bool, lengths: tuple[int, ...] = (5,), **changes: Any) -> Sample:
    """Return the row of a convolution of 4 to 6 channels with a kernel of 3."""
    count = len(lengths)
    how: dict[str, Any] = {"stride": [1], "padding": [0], "dilation": [1]}
    how |= {"transposed": False, "output_padding": [0], "groups": 1} | changes
    groups, transposed = how["groups"], how["transposed"]
    weight = t(4, 6 // groups, *(3,) * count) if transposed else t(6, 4 // groups, *(3,) * count)
    longer = 2 if transposed else -2
    out = t(2, 6, *(length + longer for length in lengths))
    return sample(out, t(2, 4, *lengths), weight, [6], *how.values(), list(mask))


op(
    "aten.convolution_backward",
    _backward(True, True, True),
    _backward(True, False, False, lengths=(5, 4)),
    _backward(False, True, False, lengths=(5, 4), groups=2),
    _backward(True, True, False, lengths=(4, 3), transposed=True),
    _backward(True, True, False, lengths=(4, 3, 3), stride=[1, 1, 1]),
    wrong(
        *(t(2, 3, 4), 2, t(3, 3, 1), None, [1], [0], [1], False, [0], 1, [True] * 3),
        error=TypeError,
        match="argument 'input' must be Tensor, not int",
        stricter="torch's dispatcher raises RuntimeError for whatever has another type",
    ),
    dtypes=(torch.float32, torch.float64),
)


def _grid_row(*lengths: int, mode: int, mask: tuple[bool, bool] = (True, True)) -> Sample:
    """Return the row of 3 places in a volume of these lengths."""
    rank = len(lengths)
    places = (1,) * (rank - 1) + (3,)
    return sample(t(2, 1, *places), t(2, 1, *lengths), t(2, *places, rank, low=-0.9, high=0.9), mode, 0, False, [*mask])


for _rank, _calls in {
    2: [_grid_row(4, 3, mode=0), _grid_row(4, 3, mode=2), _grid_row(4, 3, mode=0, mask=(False, True))],
    3: [_grid_row(3, 4, 2, mode=0)],
}.items():
    op(
        f"aten.grid_sampler_{_rank}d_backward",
        _calls,
        wrong(
            *(t(2, 1, 3), t(2, 1, 4), t(2, 3, 1), 0, 0, False, [True, True]), match="dims|dimensions|5D input|4D input"
        ),
        dtypes=(torch.float32, torch.float64),
        gradient=TORCH >= (2, 13),  # torch 2.11 has no second derivative of it
        op=getattr(aten, f"grid_sampler_{_rank}d_backward").default,
    )
