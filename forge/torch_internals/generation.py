"""The private parts of transformers' `generate` (transformers/generation/utils.py, 5.17 to 5.23)."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_PARAMETERS = {
    "_sample": {
        "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
        "model_kwargs",
    },
    "_prefill": {"input_ids", "generation_config", "model_kwargs", "is_first_iteration"},
}  # fmt: skip


def generation_mixin(model: type) -> Any:
    """Return transformers' class of `generate` among a class's bases; None where there is none, or another version's
    whose loop is not the one known here."""
    mixin = next((each for each in model.__mro__ if each.__module__ == "transformers.generation.utils"), None)
    for name, parameters in _PARAMETERS.items():
        method = getattr(model, name, None)
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            return None
    return mixin


def sample(model: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' loop of a class of models."""
    return model._sample(instance, *args, **kwargs)


def prefill(model: Any, input_ids: torch.Tensor, generation_config: Any, arguments: dict[str, Any]) -> Any:
    """Return the model's output for a prompt."""
    return model._prefill(input_ids, generation_config, arguments, is_first_iteration=True)


def optimized_for_decoding(model: Any) -> AbstractContextManager:
    """Return the scope in which transformers decodes: experts run by other functions in it."""
    enter = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if enter is None else enter()


def has_static_cache(model: Any) -> bool:
    """Return whether transformers has static caches for a model."""
    return bool(getattr(model, "_can_compile_fullgraph", False))


def is_callers(cache: Any) -> bool:
    """Return whether the caller of `generate` passed the cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def padding_token(generation_config: Any) -> torch.Tensor:
    """Return the token of sequences that ended."""
    token: torch.Tensor = generation_config._pad_token_tensor
    return token
