"""Models with random weights, and their texts, for tests of `generate`."""

from typing import Any

import torch


def with_random_weights(model: Any, std: float = 0.2) -> Any:
    """Return a model whose texts do not repeat one token."""
    for each in model.parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=std)
    return model


def tokens_of(model: Any, prompt: dict[str, Any], new: int, **options: Any) -> torch.Tensor:
    """Return a model's text of some new tokens, with the same random numbers at each call."""
    torch.manual_seed(1)
    return model.generate(**prompt, max_new_tokens=new, disable_compile=True, **options)
