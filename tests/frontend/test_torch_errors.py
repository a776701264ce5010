"""The errors of torch for bad arguments come out of a jitted function with torch's own types."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

WRONG: dict[str, Callable] = {
    "a probability above 1": lambda x: F.dropout(x, 1.5),
    "a probability that is no number": lambda x: F.dropout(x, float("nan")),
    "a probability below 0, of channels": lambda x: F.dropout2d(x, -0.1),
    "one value for each channel in training": lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
    "a reduction that there is none of": lambda x: F.mse_loss(x, x, reduction="product"),
    "a dim out of range": lambda x: x.sum(7),
    "shapes that do not broadcast": lambda x: x + torch.ones(7),
    "a complex ceil": lambda x: torch.ceil(x * 1j),
    "a float index": lambda x: torch.gather(x, 0, x),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_raise_what_eager_raises(name: str) -> None:
    function, x = WRONG[name], torch.randn(2, 3, 4, 4)
    with pytest.raises(Exception) as eager:
        function(x)
    with pytest.raises(eager.type):
        forge.jit(function)(x)
    torch._dynamo.reset()
