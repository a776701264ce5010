"""Pooling over windows of random lengths."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F

from forge import prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import torch_check
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.conv import per_dim

Ratio = float | Sequence[float]


def _sizes(
    op: str, input: TensorProxy, output_size: Lengths | None, output_ratio: Ratio | None, count: int
) -> tuple[Dim, ...]:
    check(
        output_size is not None or output_ratio is not None,
        lambda: f"{op} requires specifying either an output_size or an output_ratio",
    )
    if output_size is not None:
        return per_dim(op, "output_size", output_size, count)
    ratios = per_dim(op, "output_ratio", cast(Lengths, output_ratio), count)  # it copies numbers of any kind
    return tuple(torch.sym_int(n * ratio) for n, ratio in zip(input.shape[-count:], ratios, strict=True))


def _fractional_of(count: int, pool: Symbol, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        kernel_size: Lengths,
        output_size: Lengths | None = None,
        output_ratio: Ratio | None = None,
        return_indices: bool = False,
        _random_samples: TensorProxy | None = None,
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        """Return the largest values of windows that make an output of `output_size`, whose lengths are drawn.

        Shapes: input (N, C, *lengths) or (C, *lengths), _random_samples (N, C, rank) in [0, 1).
        """
        torch_check(
            input.ndim in (count + 1, count + 2),
            lambda: f"{op}: Expected {count + 1}D or {count + 2}D tensor, but got {input}",
        )
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        sizes = _sizes(op, input, output_size, output_ratio, count)
        if _random_samples is None:
            batch = 1 if input.ndim == count + 1 else input.shape[0]
            shape = (batch, input.shape[-count - 1], count)
            _random_samples = prims.uniform(shape, 0.0, 1.0, input.dtype, input.device)
        pooled = pool(input, kernel, sizes, _random_samples)
        return pooled if return_indices or op.endswith("indices") else pooled[0]

    return torchsymbol(function)(body)


fractional_max_pool2d = _fractional_of(2, prims.fractional_max_pool2d, F.fractional_max_pool2d)
fractional_max_pool3d = _fractional_of(3, prims.fractional_max_pool3d, F.fractional_max_pool3d)
fractional_max_pool2d_with_indices = _fractional_of(
    2, prims.fractional_max_pool2d, F.fractional_max_pool2d_with_indices
)
fractional_max_pool3d_with_indices = _fractional_of(
    3, prims.fractional_max_pool3d, F.fractional_max_pool3d_with_indices
)
