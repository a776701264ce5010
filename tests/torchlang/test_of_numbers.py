"""torch's functions of two numbers (sizes), and sizes that are 0-d tensors."""

from collections.abc import Callable

import pytest
import torch

import forge

PROGRAMS: dict[str, Callable] = {
    "a size by two": lambda x: x + torch.div(x.shape[0], 2, rounding_mode="floor"),
    "towards zero": lambda x: x + torch.div(-x.shape[1], 2, rounding_mode="trunc"),
    "floor_divide": lambda x: x * torch.floor_divide(x.shape[0], 2),
    "a sum and a true division": lambda x: x * torch.add(x.shape[0], x.shape[1]) + torch.true_divide(x.shape[1], 2),
    "a product and a difference": lambda x: x * torch.mul(x.shape[0], 0.5) - torch.sub(x.shape[1], 1),
    "a size of a view": lambda x: x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), 2, -1) * 2,
    "a view that is returned": lambda x: x.reshape(torch.div(x.shape[0], 2, rounding_mode="floor"), 2, -1),
    "a size less one": lambda x: x.new_ones(torch.div(x.shape[0], 2, rounding_mode="trunc") - 1, 3) * x.sum(),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_functions_of_sizes_are_eagers(name: str, dynamic: bool | None) -> None:
    function = PROGRAMS[name]
    jitted = forge.jit(function, dynamic=dynamic)
    for shape in ((4, 3), (6, 5)):
        x = torch.randn(shape, requires_grad=True)
        ours, eager = jitted(x), function(x)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in (ours, eager)])
    torch._dynamo.reset()
