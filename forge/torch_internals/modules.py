"""The parts of torch.nn.Module that have no public name."""

from collections.abc import Callable

import torch
from torch import nn


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters, by name. Source: torch.nn.Module.register_parameter."""
    return module._parameters


def set_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Replace a module's own parameters."""
    module._parameters = parameters


class Converted(nn.Module):
    """A module that decides how `to`, `half`, `cuda` and the like convert its tensors.

    Source: torch.nn.Module._apply, through which all of them go.
    """

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return a parameter or buffer after a conversion."""
        return function(x)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Converted":
        return super()._apply(lambda x: self.convert(fn, x), recurse)
