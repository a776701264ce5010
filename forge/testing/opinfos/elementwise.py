"""OpInfos of the elementwise family."""

from collections.abc import Iterator

import torch

from forge.testing.opinfo import FLOATS, ErrorSample, OpInfo, Sample, register_opinfo, sample


def unary_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """A vector, a matrix, a 0-d tensor, an empty one, a transposed one."""
    for shape in ((5,), (2, 3), (), (0, 3)):
        yield sample(info.tensor(shape, device, dtype))
    yield sample(info.tensor((3, 4), device, dtype).t())


def unary_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """A number where a tensor is wanted."""
    yield ErrorSample(sample([1.0]), TypeError, "must be a tensor|must be Tensor")


register_opinfo(OpInfo("exp2", torch.exp2, unary_samples, unary_errors, dtypes=FLOATS))
