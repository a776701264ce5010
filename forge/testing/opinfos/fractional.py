"""OpInfos of pooling over windows of random lengths."""

import torch

from forge.testing.table import op, sample, t, wrong

for _count in (2, 3):
    _lengths = (8, 7, 9)[:_count]
    _x, _name = t(2, 3, *_lengths), f"fractional_max_pool{_count}d"
    op(
        f"nn.functional.{_name}",
        sample(_x, 2, (3,) * _count),
        sample(_x, (2,) * _count, 4, return_indices=True),
        sample(t(3, *_lengths), 3, output_ratio=(0.5,) * _count),
        sample(_x, 2, 3, _random_samples=t(2, 3, _count, low=0, high=1)),
        wrong(_x, 2, error=ValueError, match="either an output_size or an output_ratio"),
        wrong(t(1, 2, 3, *_lengths), 2, 3, match="Expected|expected"),
        wrong(_x, 2, (3,) * (_count + 1), match="a list of"),
        wrong(_x, 5, 6, match="too large"),
        dtypes=(torch.float32, torch.float64),
        symbols=(f"torch.nn.functional.{_name}_with_indices",),
    )
