"""The decoding loop of transformers' `generate` for a jitted model: one program a token, for which no Python waits.

transformers prepares each token's inputs in Python (slices, masks, positions), calls the model, and waits for the token
to see whether it ends the sequence; with its default cache, which grows, every call has other shapes. Here the
preparation is part of a program of fixed shapes, the cache is a static one, and the host reads whether a sequence ended
one token late, while the device computes the next one. Logits processors, sampling and stopping criteria are
transformers' own, as they are given, and run in the same order with the same random numbers.

What this loop has no program for is left to transformers' loop (`_reason_against`).
"""

import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

_log = logging.getLogger("forge.generate")

_PARAMETERS = {
    "_sample": {
        "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
        "model_kwargs",
    },
    "_prefill": {"input_ids", "generation_config", "model_kwargs", "is_first_iteration"},
}  # fmt: skip
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}  # arguments of the model
_STATIC, _SLIDING = "StaticLayer", "StaticSlidingWindowLayer"
_GROWING, _GROWING_SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"
_LEAST = 256  # places of a static cache
_AHEAD = 256  # tokens that a cache has room for at first
_UNCUT = 4096  # places up to which layers of a sliding window have a cache of the whole text
_MOST_OF_MEMORY = 16  # of the device's memory, the part that caches between two generations may take


def decoding_loop(original: type, module: nn.Module, compile_step: Callable[[Callable], Callable]) -> dict:
    """Return what a jitted module's class overrides for transformers' `generate`; nothing for other classes, and for
    versions of transformers whose loop is not the one known here.

    Args:
        original: The module's class.
        module: The module, which is not jitted.
        compile_step: Returns a function that forge compiles, with the options of the jitted module.
    """
    mixin = next((each for each in original.__mro__ if each.__module__ == "transformers.generation.utils"), None)
    if mixin is None:
        return {}
    for name, parameters in _PARAMETERS.items():
        method = getattr(original, name, None)
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            return {}
    loop = _Loop(original, mixin, module, compile_step)

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.sample(self, *args, **kwargs)

    return {"_sample": _sample}


def cache_places(length: int) -> int:
    """Return the places of the static cache for a length: a power of two, or one and a half of one, so that texts of
    many lengths share a few programs."""
    places = _LEAST
    while places < length:
        places = places * 3 // 2 if places & (places - 1) == 0 else places * 4 // 3
    return places


class _Loop:
    """The loop of one jitted module. See decoding_loop for the arguments; mixin: transformers' GenerationMixin."""

    def __init__(self, original: type, mixin: type, module: nn.Module, compile_step: Callable) -> None:
        self._original, self._mixin, self._module = original, mixin, module
        self._compile, self._compiled_step = compile_step, None
        self._caches = _Caches()

    def sample(  # noqa: PLR0913  the parameters of transformers
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Callable,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return prompts continued by tokens: transformers' `GenerationMixin._sample`."""
        reason = self._reason_against(generation_config, stopping_criteria, synced_gpus, model_kwargs)
        if reason is not None:
            _log.info("generate runs in transformers' loop: %s", reason)
            return self._original._sample(  # type: ignore[attr-defined]
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        if self._compiled_step is None:
            self._compiled_step = self._compile(_step)
        step = self._compiled_step
        logits = self._prefill(model, input_ids, generation_config, model_kwargs)
        end = stopping_criteria.max_length
        choice = _Choice(generation_config, stopping_criteria, logits_processor, input_ids.device)
        stop = _Stop(input_ids.device, streamer, is_late=not _is_visible(model_kwargs["past_key_values"]))
        state: _State | None = None
        with model._optimize_model_for_decode() if hasattr(model, "_optimize_model_for_decode") else nullcontext():
            while True:
                tokens, input_ids = choice.extend(input_ids, logits)
                if stop(choice.unfinished, tokens) or input_ids.shape[1] >= end:
                    break
                if state is None:
                    config = self._module.config.get_text_config(decoder=True)
                    state = _State(self._caches, config, model_kwargs, input_ids.shape[1] - 1, end)
                state.reserve(input_ids.shape[1])
                logits = step(self._module, tokens[:, None], state.mask, state.positions, state.arguments)
        if stop.ended_before():
            input_ids = input_ids[:, :-1]
            choice.undo()
        if state is not None:
            state.release()
        if streamer is not None:
            streamer.end()
        return input_ids

    def _prefill(self, model: Any, input_ids: torch.Tensor, generation_config: Any, arguments: dict) -> torch.Tensor:
        """Return the logits of the prompt's last token. Sets the cache.

        A static cache that nobody else sees is not filled: attention without a mask is faster, and one program takes
        prompts of both caches.
        """
        cache = arguments["past_key_values"]
        if not _is_visible(cache) and {_STATIC, _SLIDING} & set(map(_kind, cache.layers)):
            growing = _of_transformers(cache, "DynamicCache")
            arguments["past_key_values"] = growing(config=self._module.config.get_text_config(decoder=True))
        outputs = model._prefill(input_ids, generation_config, arguments, is_first_iteration=True)
        arguments["past_key_values"] = outputs.past_key_values
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits.to(copy=True, dtype=torch.float32, device=input_ids.device)

    def _reason_against(
        self, generation_config: Any, stopping_criteria: Any, synced_gpus: bool, arguments: dict[str, Any]
    ) -> str | None:
        """Return why a generation is left to transformers' loop; None: it is not."""
        for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
            if getattr(self._original, name) is not getattr(self._mixin, name):
                return f"the model has its own {name}"
        if self._module.config.is_encoder_decoder:
            return "the model has an encoder"
        if synced_gpus or generation_config.is_assistant:
            return "another process or model waits for each token"
        if generation_config.return_dict_in_generate:
            return "the scores and the cache are returned"
        if generation_config.prefill_chunk_size is not None or stopping_criteria.max_length is None:
            return "the prompt comes in chunks, or the text has no greatest length"
        unknown = {name for name, each in arguments.items() if name not in _KNOWN and each is not None}
        if unknown or not arguments.get("use_cache"):
            return f"the model takes {', '.join(sorted(unknown))}" if unknown else "there is no cache"
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if mask is None or mask.ndim != 2 or (positions is not None and positions.ndim != 2):
            return "attention_mask or position_ids does not have two dimensions"
        return self._reason_against_cache(arguments.get("past_key_values"), stopping_criteria.max_length)

    def _reason_against_cache(self, cache: Any, length: int) -> str | None:
        """Return why a cache is left as it is, to transformers' loop."""
        kinds = {_kind(each) for each in getattr(cache, "layers", ())}
        if _is_visible(cache):
            has_places = kinds == {_STATIC} and _places(cache) >= length - 1
            return None if has_places else "the caller's cache is not a static one with places for all tokens"
        growing, fixed = {_GROWING, _GROWING_SLIDING}, {_STATIC, _SLIDING}
        if getattr(cache, "offloading", False) or not kinds or not (kinds <= growing or kinds <= fixed):
            return f"the cache is {type(cache).__name__} of {', '.join(sorted(kinds)) or 'no layers'}"
        if not getattr(self._module, "_can_compile_fullgraph", False):
            return "transformers has no static cache for the model"
        windows = [each.sliding_window for each in cache.layers if _kind(each) == _GROWING_SLIDING]
        windows += [each.max_cache_len for each in cache.layers if _kind(each) == _SLIDING]
        if windows and length > max(_UNCUT, 4 * min(windows)):
            return f"a cache of all {length} tokens is much larger than the window of {min(windows)}"
        return None


def _step(
    module: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None, arguments: dict[str, Any]
) -> torch.Tensor:
    """Return the logits after one more token, in float32, and move the positions on. This is what forge compiles.

    Args:
        module: The model.
        tokens: (batch, 1), the last token.
        mask: (batch, places of the cache), which is 0 for padding.
        positions: (batch, 1), those of the tokens; None for a model that takes none.
        arguments: The others of the model's, which are the same at each token.
    """
    if positions is not None:
        arguments = {**arguments, "position_ids": positions}
    inputs = module.prepare_inputs_for_generation(tokens, next_sequence_length=1, attention_mask=mask, **arguments)
    logits: torch.Tensor = module(**inputs, return_dict=True).logits[:, -1].to(copy=True, dtype=torch.float32)
    if positions is not None:
        positions.add_(1)
    return logits


class _State:
    """What the steps of one generation read: the cache, the padding, the positions.

    config: the model's. arguments: of the model, with the cache, after the prompt; changed here. length: of the prompt.
    end: the greatest length of the text.
    """

    def __init__(self, caches: "_Caches", config: Any, arguments: dict[str, Any], length: int, end: int) -> None:
        self._caches, self._config, self._end = caches, config, end
        mask, positions = arguments.pop("attention_mask"), arguments.pop("position_ids", None)
        cache = arguments["past_key_values"]
        self._is_own = not _is_visible(cache)
        if self._is_own:
            cache = caches.filled(config, cache, length, cache_places(min(end, length + _AHEAD)))
            arguments["past_key_values"] = cache
        self.arguments = arguments
        self.mask = _padded(mask, _places(cache))
        self.positions = None if positions is None else positions[:, -1:] + 1
        if self.positions is not None and len(self.positions) < len(mask):
            self.positions = self.positions.expand(len(mask), 1).contiguous()

    def reserve(self, length: int) -> None:
        """Give the cache places for a text of this length."""
        cache = self.arguments["past_key_values"]
        if self._is_own and length > _places(cache):
            places = cache_places(min(self._end, 2 * length))
            grown = self._caches.filled(self._config, cache, length - 1, places)
            self._caches.put_back(cache)
            self.arguments["past_key_values"] = grown
            self.mask = _padded(self.mask, _places(grown))

    def release(self) -> None:
        """Let the next generation have the cache."""
        if self._is_own:
            self._caches.put_back(self.arguments["past_key_values"])


class _Choice:
    """The next tokens, by transformers' processors, sampling and criteria."""

    def __init__(self, config: Any, criteria: Any, processors: Callable, device: torch.device) -> None:
        self._processors, self._criteria, self._draws = processors, criteria, bool(config.do_sample)
        pad, self._has_end = config._pad_token_tensor, any(hasattr(each, "eos_token_id") for each in criteria)
        self._pad = None if pad is None else pad.to(device)
        self._state: torch.Tensor | None = None
        self._device = device
        self.unfinished: torch.Tensor | None = None

    def extend(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens, and the text with them; set which sequences are unfinished."""
        if self.unfinished is None:
            self.unfinished = input_ids.new_ones(input_ids.shape[0])
        scores = self._processors(input_ids, logits)
        if self._draws:
            if self._device.type == "cuda":
                self._state = torch.cuda.get_rng_state(self._device)
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._has_end:
            tokens = tokens * self.unfinished + self._pad * (1 - self.unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        self.unfinished = self.unfinished & ~self._criteria(input_ids, None)
        return tokens, input_ids

    def undo(self) -> None:
        """Give the generator of random numbers the state that it had before the last draw."""
        if self._state is not None:
            torch.cuda.set_rng_state(self._state, self._device)


class _Stop:
    """Whether all sequences ended, as the host knows it: on a GPU one token late, where the token after the last may be
    undone and nobody waits for tokens (`is_late`)."""

    def __init__(self, device: torch.device, streamer: Any, is_late: bool) -> None:
        self._streamer, self._ended = streamer, False
        self._flags: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if is_late and streamer is None and device.type == "cuda":
            with torch.cuda.device(device):
                self._flags = [(torch.zeros((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._count = 0

    def __call__(self, unfinished: torch.Tensor, tokens: torch.Tensor) -> bool:
        """Return whether all sequences ended."""
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        ended = unfinished.max() == 0
        if not self._flags:
            return bool(ended)
        flag, event = self._flags[self._count % 2]
        flag.copy_(ended, non_blocking=True)
        event.record(torch.cuda.current_stream(tokens.device))
        self._count += 1
        if self._count > 1:
            flag, event = self._flags[self._count % 2]
            event.synchronize()
            self._ended = bool(flag)
        return self._ended

    def ended_before(self) -> bool:
        """Return whether all sequences had ended before the last tokens."""
        return self._ended


# static caches


class _Caches:
    """The static caches of earlier generations, the last used last. Those of a GPU stay where they are, as CUDA graphs
    need them; together they take a small part of its memory."""

    def __init__(self) -> None:
        self._free: OrderedDict[tuple, list[Any]] = OrderedDict()

    def filled(self, config: Any, cache: Any, length: int, places: int) -> Any:
        """Return a static cache of some places with what a cache holds of a text of this length. A growing cache gives
        its tensors up."""
        layers = [each for each in cache.layers if each.is_initialized]
        key = (places, *((each.keys.shape[0], each.keys.dtype, each.keys.device) for each in layers[:1]))
        free = self._free.pop(key, [])
        static = free.pop() if free else _new_cache(config, cache, places)
        if free:
            self._free[key] = free
        static._forge_key = key
        for layer, source in zip(static.layers, cache.layers, strict=True):
            if not source.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            count = min(source.keys.shape[2], length)
            first = length - count  # a window has the last ones
            for whole, part in ((layer.keys, source.keys), (layer.values, source.values)):
                whole.zero_()  # a value that is not a number would outlast its mask
                whole[:, :, first:length].copy_(part[:, :, :count])
            layer.cumulative_length.fill_(length)
            if _kind(source) != _STATIC:
                source.keys = source.values = None
        return static

    def put_back(self, cache: Any) -> None:
        """Let another generation have a cache."""
        tensors = list(_tensors_of([cache]))
        if not tensors or tensors[0].device.type != "cuda":
            return
        self._free.setdefault(cache._forge_key, []).append(cache)
        self._free.move_to_end(cache._forge_key)
        most = torch.cuda.get_device_properties(tensors[0].device).total_memory // _MOST_OF_MEMORY
        while self._free and sum(each.nbytes for each in _tensors_of(sum(self._free.values(), []))) > most:
            self._free.popitem(last=False)


def _new_cache(config: Any, cache: Any, places: int) -> Any:
    static, layer = (_of_transformers(cache, name) for name in ("StaticCache", _STATIC))
    empty = static(config=config, max_cache_len=places)
    empty.layers = [layer(max_cache_len=places) for _ in cache.layers]  # windows too: a mask cuts them
    return empty


def _is_visible(cache: Any) -> bool:
    """Return whether the caller of `generate` holds the cache."""
    return bool(getattr(cache, "_is_user_defined", False))


def _tensors_of(caches: Sequence[Any]) -> Iterator[torch.Tensor]:
    for cache in caches:
        for layer in cache.layers:
            if layer.is_initialized:
                yield layer.keys
                yield layer.values


def _of_transformers(cache: Any, name: str) -> Any:
    """Return a class of transformers' module of caches."""
    base = next(each for each in type(cache).__mro__ if each.__name__ == "Cache")
    return getattr(sys.modules[base.__module__], name)


def _kind(layer: Any) -> str:
    """Return which of transformers' classes a cache's layer is of."""
    kind = type(layer)
    return kind.__name__ if kind.__module__ == "transformers.cache_utils" else f"{kind.__module__}.{kind.__name__}"


def _places(cache: Any) -> int:
    places: int = cache.layers[0].max_cache_len
    return places


def _padded(mask: torch.Tensor, places: int) -> torch.Tensor:
    """Return a mask with ones for the places that texts have not reached: no query sees them before they do."""
    return torch.cat([mask, mask.new_ones(len(mask), places - mask.shape[1])], dim=1)
