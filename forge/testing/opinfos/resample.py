"""OpInfos of interpolation, padding, sampling on a grid, and channels that become pixels."""

import torch
import torch.nn.functional as F

from forge.testing.table import op, sample, t, wrong

_LENGTHS = (7, 6, 5)
_WHOLE = (torch.float32, torch.float64)


_SMOOTH = (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2))
op(
    "nn.functional.interpolate",
    *[
        sample(t(2, 3, *_LENGTHS[:rank]), mode=mode, **size)
        for mode in ("nearest", "nearest-exact", "area")
        for rank in (1, 2, 3)
        for size in ({"scale_factor": 1.7}, {"size": 4})
    ],
    *[
        sample(t(2, 3, *_LENGTHS[:rank]), mode=mode, **how)
        for mode, rank in _SMOOTH
        for how in (
            {"scale_factor": 1.7},
            {"size": 4},
            {"scale_factor": 2.3, "align_corners": True},
            {"scale_factor": 1.7, "recompute_scale_factor": True},
        )
    ],
    [sample(t(2, 3, 4, 4), (3, 9)), sample(t(2, 3, 4, 4), scale_factor=(0.5, 2))],
    *[sample(t(2, 3, 8, 8), 3, mode=mode, antialias=True) for mode in ("bilinear", "bicubic")],
    wrong(t(2, 3, 4), error=ValueError, match="either size or scale_factor"),
    wrong(t(2, 3, 4), 2, 2, error=ValueError, match="only one of size"),
    wrong(t(2, 3, 4), (2, 2), error=ValueError, match="same number of spatial"),
    wrong(t(2, 3, 4), 2, mode="bilinear", error=NotImplementedError, match="does not go with"),
    wrong(t(2, 3, 4), 2, align_corners=True, error=ValueError, match="align_corners option"),
    wrong(t(2, 3, 4), 2, antialias=True, error=ValueError, match="Anti-alias"),
    wrong(t(2, 3, 4, 4), 0, match="greater than 0"),
    dtypes=_WHOLE,
)
op(
    "nn.functional.upsample",
    [sample(t(2, 3, 4, 4), scale_factor=2), sample(t(2, 3, 4, 4), (3, 5), mode="bilinear", align_corners=True)],
    wrong(t(2, 3, 4), error=ValueError, match="either size or scale_factor"),
    dtypes=_WHOLE,
)

_OWN = ("reflect", "replicate", "circular")
op(
    "nn.functional.pad",
    sample(t(2, 3, 4), (1, 2, -1, 3), value=2.5),
    sample(t(2, 3), (0, 0)),
    sample(t(3, 2).t(), (1, 1, 2, 0)),
    sample(t(), ()),
    *[sample(t(2, 3, 4), (1, 2), mode) for mode in _OWN],
    *[sample(t(3, 4), (1, 2), mode) for mode in _OWN],
    *[sample(t(2, 3, 4, 5), (1, 2, 0, 2), mode) for mode in _OWN],
    *[sample(t(2, 3, 4, 5, 4), (1, 2, 0, 2, 3, 1), mode) for mode in _OWN],
    *[sample(t(2, 3, 4, 5), (-1, 2, 1, -2), mode=mode) for mode in _OWN],
    wrong(t(2, 3), (1,), match="divisible by 2"),
    wrong(t(2, 3), (1,) * 6, match="two times the input dimension"),
    wrong(t(2, 3, 4), (4, 4), "reflect", match="less than the corresponding"),
    wrong(t(2, 3, 4), (5, 4), "circular", match="more than once"),
    wrong(t(2, 3, 4), (1, 1), "reflect", 1.0, match="take in value"),
    wrong(t(2, 3, 4), (1, 1), "mirror", error=NotImplementedError, match="non-constant padding"),
    wrong(t(2, 3, 4), (-3, -2), match="negative length"),
)

_MODES = ("bilinear", "nearest", "bicubic")
op(
    "nn.functional.grid_sample",
    *[
        sample(t(2, 3, 4, 5), t(2, 6, 7, 2, low=-1.5, high=1.5), mode, outside, align_corners=False)
        for mode in _MODES
        for outside in ("zeros", "border", "reflection")
    ],
    sample(t(2, 3, 4, 5, 6), t(2, 3, 6, 7, 3, low=-1.5, high=1.5), align_corners=True),
    wrong(t(2, 3, 4, 4), t(2, 3, 4, 3), match="in last dimension"),
    wrong(t(2, 3, 4, 4), t(1, 3, 4, 2), match="same batch size"),
    wrong(t(2, 3, 4, 4), t(2, 3, 4, 2), "cubic", error=ValueError, match="expected mode"),
    wrong(t(2, 3, 4, 4), t(2, 3, 4, 2), "nearest", "none", error=ValueError, match="expected padding_mode"),
    dtypes=_WHOLE,
)
op(
    "nn.functional.affine_grid",
    [sample(t(2, 2, 3), [2, 3, 4, 5], False), sample(t(2, 3, 4), [2, 3, 4, 5, 6], align_corners=True)],
    wrong(t(2, 3, 3), [2, 3, 4, 4], error=ValueError, match="Expected a batch of affine matrices"),
    wrong(t(2, 2, 3), [2, 3, 4], error=NotImplementedError, match="only supports 4D and 5D"),
    dtypes=_WHOLE,
)

op(
    "pixel_shuffle",
    [sample(t(2, 8, 3, 4), 2), sample(t(8, 3, 4), 2), sample(t(2, 2, 9, 1, 2), 3)],
    [wrong(t(2, 3, 4, 4), 2, match="divisible by the square"), wrong(t(4, 4), 2, match="at least 3 dimensions")],
    op=F.pixel_shuffle,
)
op(
    "pixel_unshuffle",
    [sample(t(2, 2, 4, 6), 2), sample(t(2, 6, 3), 3)],
    wrong(t(2, 3, 5, 4), 2, match="divisible by downscale_factor"),
    op=F.pixel_unshuffle,
)
op(
    "channel_shuffle",
    [sample(t(2, 8, 3, 4), 2), sample(t(2, 6, 3), 3)],
    wrong(t(2, 3, 4), 2, match="divisible by the number of groups|must be divisible by groups"),
    op=F.channel_shuffle,
)
