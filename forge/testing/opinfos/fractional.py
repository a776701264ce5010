"""OpInfos of pooling over windows of random lengths."""

import torch
import torch.nn.functional as F

from forge.testing.opinfo import OpInfo, register_opinfo, sample
from forge.testing.opinfos.specs import calls, errors, t, wrong

for _count in (2, 3):
    _lengths = (8, 7, 9)[:_count]
    _x, _name = t(2, 3, *_lengths), f"fractional_max_pool{_count}d"
    register_opinfo(
        OpInfo(
            f"nn.functional.{_name}",
            getattr(F, _name),
            calls(
                sample(_x, 2, (3,) * _count),
                sample(_x, (2,) * _count, 4, return_indices=True),
                sample(t(3, *_lengths), 3, output_ratio=(0.5,) * _count),
                sample(_x, 2, 3, _random_samples=t(2, 3, _count, low=0, high=1)),
            ),
            errors(
                wrong(_x, 2, error=ValueError, match="either an output_size or an output_ratio"),
                wrong(t(1, 2, 3, *_lengths), 2, 3, match="Expected|expected"),
                wrong(_x, 2, (3,) * (_count + 1), match="a list of"),
                wrong(_x, 5, 6, match="too large"),
            ),
            dtypes=(torch.float32, torch.float64),
            symbols=(f"torch.nn.functional.{_name}_with_indices",),
        )
    )
