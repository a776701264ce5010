"""The private parts of transformers' `generate` (transformers/generation/utils.py, 5.17 to 5.23)."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

_PARAMETERS = {
    "_sample": {
        "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
        "model_kwargs",
    },
    "_beam_search": {
        "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "model_kwargs",
    },
    "_prefill": {"input_ids", "generation_config", "model_kwargs", "is_first_iteration"},
}  # fmt: skip

# Whisper's preparation of a token's inputs counts the positions where it is not passed them, and does nothing else.
_WHISPER = "transformers.models.whisper.modeling_whisper"
# These models' preparation reads no token of the text but the last: it sets constants, or drops what a prompt has.
_PREPARATIONS = "bamba falcon_h1 falcon_mamba gemma3 gemma4 mamba mamba2 nemotron_h zamba zamba2".split()
# Theirs fills the cache anew once a text is longer than their short rotary embedding.
_PREPARATIONS_OF_SHORT_TEXTS = "phi3 phimoe".split()
# They run with static caches of layers that have keys and states of recurrences, for which transformers had no class.
_WITH_STATIC_CACHES = "falcon_h1 zamba zamba2".split()
NAMES_OF_POSITIONS = ("position_ids", "decoder_position_ids")
_OF_IMAGES = "mm_token_type_ids"
TOKEN_TYPES = ("token_type_ids", _OF_IMAGES)


def generation_mixin(model: type) -> Any:
    """Return transformers' class of `generate` among a class's bases; None where there is none, or another version's
    whose loop is not the one known here."""
    mixin = next((each for each in model.__mro__ if each.__module__ == "transformers.generation.utils"), None)
    for name, parameters in _PARAMETERS.items():
        method = getattr(model, name, None)
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            return None
    return mixin


def own_method(model: type, mixin: type, config: Any, length: int, *, has_beams: bool) -> str | None:
    """Return which of the methods that the loop runs or replaces a class of models has of its own, if what it does for
    texts of at most a length is not known here."""
    loop = ("_beam_search", "_reorder_cache") if has_beams else ("_sample",)
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", *loop):
        method = getattr(model, name, None)
        if method is not getattr(mixin, name, None) and not _is_known(method, config, length):
            return name
    return None


def _is_known(method: Any, config: Any, length: int) -> bool:
    """Return whether a model's own method does what the loop does, for texts of at most a length."""
    if method.__module__ == _WHISPER or method.__name__ != "prepare_inputs_for_generation":
        return bool(method.__module__ == _WHISPER)
    family = _family(method)
    is_short = length <= getattr(config, "original_max_position_embeddings", 0)
    return family in _PREPARATIONS or (family in _PREPARATIONS_OF_SHORT_TEXTS and is_short)


def _family(part: Any) -> str:
    """Return which family of transformers' models a class or function is from."""
    family: str = part.__module__.removeprefix("transformers.models.").partition(".")[0]
    return family


def is_whisper(model: Any) -> bool:
    """Return whether a model is Whisper, which counts positions in its decoder's mask, for which a step passes them,
    and whose decoder reads all that the encoder says, whatever the encoder's mask."""
    return type(model).prepare_inputs_for_generation.__module__ == _WHISPER


def argument_names(has_encoder: bool) -> tuple[str, str]:
    """Return the names of a model's mask and positions of the text that it generates."""
    return ("decoder_attention_mask", "decoder_position_ids") if has_encoder else ("attention_mask", "position_ids")


def cache_name(arguments: dict[str, Any]) -> str:
    """Return which of a model's arguments is its cache."""
    return "cache_params" if arguments.get("cache_params") is not None else "past_key_values"


def next_inputs(arguments: dict[str, Any], positions: str) -> dict[str, torch.Tensor]:
    """Return the arguments of the token after a text, of (..., batch, 1), and take the text's out of the arguments.
    positions: The name of its positions."""
    of_text = {name: arguments.pop(name, None) for name in (positions, *TOKEN_TYPES)}
    inputs: dict[str, torch.Tensor] = {name: each[..., -1:] for name, each in of_text.items() if each is not None}
    if positions in inputs:
        inputs[positions] = inputs[positions] + 1
    if _OF_IMAGES in inputs:  # a token that is written is no image's; of the other kind it has the last one's
        inputs[_OF_IMAGES] = torch.zeros_like(inputs[_OF_IMAGES])
    return inputs


def prompt_arguments() -> frozenset[str]:
    """Return the names of the arguments that a model is passed with a prompt alone: images, sounds and their sizes."""
    utils = sys.modules["transformers.generation.utils"]
    return frozenset(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))


def masks_encoder(model: Any) -> bool:
    """Return whether a decoder masks what it reads of its encoder: of a text, but not of frames."""
    return bool(model.config.is_encoder_decoder and model.main_input_name == "input_ids")


def sample(model: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' loop of a class of models."""
    return model._sample(instance, *args, **kwargs)


def output_class(has_encoder: bool) -> Any:
    """Return transformers' class of what `_sample` returns, of tokens and what else is asked for."""
    utils = sys.modules["transformers.generation.utils"]
    return utils.GenerateEncoderDecoderOutput if has_encoder else utils.GenerateDecoderOnlyOutput


def search_beams(model: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' beam search of a class of models. instance: A model, or a BeamModel."""
    return model._beam_search(instance, *args, **kwargs)


class BeamModel:
    """A model in transformers' beam search, with other code in the place of its calls.

    Args:
        model: The model.
        prefill: Returns the logits after the prompt, of (batch, vocabulary).
        steps: Has `logits_after(tokens, input_ids)`, which returns the logits after a text, and `reorder(rows)`, which
            says from which rows of the cache the next text goes on.
    """

    def __init__(self, model: Any, prefill: Callable[[], torch.Tensor], steps: Any) -> None:
        self._model, self._logits, self._steps = model, prefill, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, input_ids: torch.Tensor, return_dict: bool) -> Any:
        return _Logits(self._steps.logits_after(input_ids[:, -1], input_ids)[:, None])

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return _Logits(self._logits()[:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(self, outputs: Any, arguments: Any, **kwargs: Any) -> Any:
        return arguments

    def _reorder_cache(self, cache: Any, rows: torch.Tensor) -> Any:
        self._steps.reorder(rows)
        return cache


def run_encoder(model: Any, name: str, instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a class's method that runs the encoder. instance: A model, or an EncoderModel."""
    return getattr(model, name)(instance, *args, **kwargs)


def encoding_method(model: type) -> str | None:
    """Return which of transformers' methods runs the encoder of a class of models; None for a class with its own."""
    mixin = generation_mixin(model)
    for name in (
        "_prepare_text_encoder_decoder_kwargs_for_generation",
        "_prepare_encoder_decoder_kwargs_for_generation",
    ):
        method = getattr(model, name, None)
        if method is not None:
            return name if method is getattr(mixin, name, None) else None
    return None


class EncoderModel:
    """A model whose encoder is other code, for the method that runs the encoder.

    Args:
        model: The model.
        encode: Returns the encoder's output for a dictionary of its arguments.
    """

    def __init__(self, model: Any, encode: Callable[..., Any]) -> None:
        self._model, self._encode = model, encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_encoder(self) -> Any:
        return _Encoder(self._model.get_encoder().forward, self._encode)


class _Encoder:
    """forward: The encoder's, whose parameters say which arguments it takes."""

    def __init__(self, forward: Callable[..., Any], encode: Callable[..., Any]) -> None:
        self.forward, self._encode = forward, encode

    def __call__(self, **arguments: Any) -> Any:
        return self._encode(arguments)


class _Logits(NamedTuple):
    logits: torch.Tensor


def prefill(model: Any, input_ids: torch.Tensor, generation_config: Any, arguments: dict[str, Any]) -> Any:
    """Return the model's output for a prompt."""
    return model._prefill(input_ids, generation_config, arguments, is_first_iteration=True)


def optimized_for_decoding(model: Any) -> AbstractContextManager:
    """Return the scope in which transformers decodes: experts run by other functions in it."""
    enter = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if enter is None else enter()


def has_static_cache(model: Any) -> bool:
    """Return whether a model runs with transformers' static caches."""
    return bool(getattr(model, "_can_compile_fullgraph", False)) or _family(type(model)) in _WITH_STATIC_CACHES


def is_callers(cache: Any) -> bool:
    """Return whether the caller of `generate` passed the cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def padding_token(generation_config: Any) -> torch.Tensor:
    """Return the token of sequences that ended."""
    token: torch.Tensor = generation_config._pad_token_tensor
    return token
