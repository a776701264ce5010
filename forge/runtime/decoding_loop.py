"""The decoding loop of transformers' `generate` for a jitted model: one program a token, for which no Python waits.

transformers prepares each token's inputs in Python (slices, masks, positions), calls the model, and waits for the token
to see whether it ends the sequence; with its default cache, which grows, every call has other shapes. Here the
preparation is part of a program of fixed shapes, the cache is a static one, and the host reads whether a sequence ended
one token late, while the device computes the next one. Logits processors, sampling and stopping criteria are
transformers' own, as they are given, and run in the same order with the same random numbers.

What this loop has no program for is left to transformers' loop (`_reason_against`).
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from forge.runtime.repeated_calls import CallRecorder, RepeatedCall
from forge.torch_internals import generation

CompileStep = Callable[[Callable, CallRecorder], Callable]
_log = logging.getLogger("forge.generate")

_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}  # arguments of the model
_STATIC, _SLIDING = "StaticLayer", "StaticSlidingWindowLayer"
_GROWING, _GROWING_SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"
_LEAST = 256  # places of a static cache
_AHEAD = 256  # tokens that a cache has room for at first
_UNCUT = 4096  # places up to which layers of a sliding window have a cache of the whole text
_MOST_OF_MEMORY = 16  # of the device's memory, the part that caches between two generations may take


def decoding_loop(original: Any, module: Any, compile_step: CompileStep) -> "_Loop | None":
    """Return the loop of a jitted module for transformers' `generate`; None for other classes, and for versions of
    transformers whose loop is not the one known here.

    Args:
        original: The module's class.
        module: The module, which is not jitted.
        compile_step: Returns a function that forge compiles, with the options of the jitted module, and whose calls
            a recorder notes.
    """
    mixin = generation.generation_mixin(original)
    return None if mixin is None else _Loop(original, mixin, module, compile_step)


def cache_places(length: int) -> int:
    """Return the places of the static cache for a length: a power of two, or one and a half of one, so that texts of
    many lengths share a few programs."""
    places = _LEAST
    while places < length:
        places = places * 3 // 2 if places & (places - 1) == 0 else places * 4 // 3
    return places


class _Loop:
    """The loop of one jitted module. See decoding_loop for the arguments; mixin: transformers' GenerationMixin."""

    def __init__(self, original: Any, mixin: Any, module: Any, compile_step: CompileStep) -> None:
        self._original, self._mixin, self._module = original, mixin, module
        self._compile = compile_step
        self._step: Callable[..., torch.Tensor] | None = None  # compiled once it is needed
        self._recorder = CallRecorder()  # of its calls
        self._states = _States(module)

    def sample(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
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
            return generation.sample(
                self._original,
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        step = self._step = self._step or self._compile(_step, self._recorder)
        logits = self._prefill(model, input_ids, generation_config, model_kwargs)
        end = stopping_criteria.max_length
        choice = _Choice(generation_config, stopping_criteria, logits_processor, input_ids)
        stop = _Stop(input_ids.device, streamer, is_late=not generation.is_callers(model_kwargs["past_key_values"]))
        callbacks = (*logits_processor, *stopping_criteria, *([] if streamer is None else [streamer]))
        may_repeat = all(map(_is_of_transformers, callbacks))  # the caller's may change the model
        steps = _Steps(step, self._recorder if may_repeat else None, self._module, self._states, model_kwargs, end)
        with generation.optimized_for_decoding(model):
            while True:
                tokens, input_ids = choice.extend(input_ids, logits)
                if stop(choice.unfinished, tokens) or input_ids.shape[1] >= end:
                    break
                logits = steps.logits_after(tokens, input_ids)
        if stop.ended_before():
            input_ids = input_ids[:, :-1]
            choice.undo()
        steps.finish()
        if streamer is not None:
            streamer.end()
        return input_ids

    def _prefill(self, model: Any, input_ids: torch.Tensor, generation_config: Any, arguments: dict) -> torch.Tensor:
        """Return the logits of the prompt's last token. Sets the cache.

        A static cache that nobody else sees is not filled: attention without a mask is faster, and one program takes
        prompts of both caches.
        """
        cache = arguments["past_key_values"]
        if not generation.is_callers(cache) and {_STATIC, _SLIDING} & set(map(_kind, cache.layers)):
            arguments["past_key_values"] = _of_transformers(cache, "DynamicCache")(config=_text_config(self._module))
        outputs = generation.prefill(model, input_ids, generation_config, arguments)
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
        if any(each is not None and each.ndim != 2 for each in (mask, positions)):
            return "attention_mask or position_ids does not have two dimensions"
        return self._reason_against_cache(arguments.get("past_key_values"), stopping_criteria.max_length)

    def _reason_against_cache(self, cache: Any, length: int) -> str | None:
        """Return why a cache is left as it is, to transformers' loop."""
        kinds = {_kind(each) for each in getattr(cache, "layers", ())}
        if generation.is_callers(cache):
            has_places = kinds == {_STATIC} and _places(cache) >= length - 1
            return None if has_places else "the caller's cache is not a static one with places for all tokens"
        growing, fixed = {_GROWING, _GROWING_SLIDING}, {_STATIC, _SLIDING}
        if getattr(cache, "offloading", False) or not kinds or not (kinds <= growing or kinds <= fixed):
            return f"the cache is {type(cache).__name__} of {', '.join(sorted(kinds)) or 'no layers'}"
        if not generation.has_static_cache(self._module):
            return "transformers has no static cache for the model"
        windows = [each.sliding_window for each in cache.layers if _kind(each) == _GROWING_SLIDING]
        windows += [each.max_cache_len for each in cache.layers if _kind(each) == _SLIDING]
        if windows and length > max(_UNCUT, 4 * min(windows)):
            return f"a cache of all {length} tokens is much larger than the window of {min(windows)}"
        return None


def _is_of_transformers(callback: Any) -> bool:
    """Return whether a processor, criterion or streamer is one of transformers' own."""
    return type(callback).__module__.partition(".")[0] == "transformers"


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


class _Steps:
    """The steps of one generation.

    Args:
        step: `_step`, compiled.
        recorder: That of its programs; None: Dynamo looks at the model before each step.
        module: The model.
        states: What the steps read and write.
        arguments: Of the model, after the prompt.
        end: The greatest length of the text.
    """

    def __init__(
        self,
        step: Callable,
        recorder: CallRecorder | None,
        module: Any,
        states: "_States",
        arguments: dict[str, Any],
        end: int,
    ) -> None:
        self._step, self._recorder, self._module = step, recorder, module
        self._states, self._arguments, self._end = states, arguments, end
        self._state: _State | None = None
        self._call: Callable[[torch.Tensor], torch.Tensor]  # of the state

    def logits_after(self, tokens: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits after a text, in float32. tokens: its last ones, of (batch,)."""
        before = self._state
        if before is None:
            state = self._states.after_prompt(self._arguments, input_ids[:, :-1], self._end)
        else:
            state = before
        state = self._states.for_length(state, input_ids.shape[1], self._end)
        if state is not before:
            self._arguments["past_key_values"] = state.cache
            self._call = self._of_state(state)
            self._state = state
        return self._call(tokens[:, None])

    def _of_state(self, state: "_State") -> Callable[[torch.Tensor], torch.Tensor]:
        def call(tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self._step(self._module, tokens, state.mask, state.positions, self._arguments)
            return logits

        return call if self._recorder is None else RepeatedCall(call, self._recorder)

    def finish(self) -> None:
        """Let other generations have the state."""
        if self._state is not None:
            self._states.put_back(self._state)


class _Choice:
    """The next tokens, by transformers' processors, sampling and criteria."""

    def __init__(self, config: Any, criteria: Any, processors: Callable, input_ids: torch.Tensor) -> None:
        self._processors, self._criteria, self._draws = processors, criteria, bool(config.do_sample)
        self._device = input_ids.device
        has_end = any(hasattr(each, "eos_token_id") for each in criteria)
        self._pad = generation.padding_token(config).to(self._device) if has_end else None
        self._state: torch.Tensor | None = None
        self.unfinished = input_ids.new_ones(len(input_ids))

    def extend(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens, and the text with them; set which sequences are unfinished."""
        scores = self._processors(input_ids, logits)
        if self._draws:
            if self._device.type == "cuda":
                self._state = torch.cuda.get_rng_state(self._device)
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._pad is not None:
            tokens = tokens * self.unfinished + self._pad * (1 - self.unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        self.unfinished = self.unfinished & ~self._criteria(input_ids, None)
        return tokens, input_ids

    def undo(self) -> None:
        """Give the generator of random numbers the state that it had before the last draw."""
        if self._state is not None:
            torch.cuda.set_rng_state(self._state, self._device)


class _Stop:
    """The host's knowledge of whether all sequences ended: on a GPU one token late, where the token after the last may
    be undone and nobody waits for tokens (`is_late`)."""

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


# what the steps read


class _State:
    """The memory that the steps of a generation read and write, which stays where it is, as CUDA graphs need it.

    cache: a static one. mask: (batch, places of the cache), of zeros for padding. positions: (batch, 1), those of the
    next tokens; None for a model that takes none. key: what another generation must have in common to go on with it.
    """

    def __init__(self, cache: Any, mask: torch.Tensor, positions: torch.Tensor | None, key: Any) -> None:
        self.cache, self.key = cache, key
        self.mask = mask.new_empty(len(mask), _places(cache))
        self.positions = None if positions is None else positions.new_empty(len(mask), 1)

    def start(self, mask: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Set the padding of the text so far, and the next tokens' positions."""
        length = min(mask.shape[1], self.mask.shape[1])
        self.mask.fill_(1)  # places that the text has not reached are seen by no query before it does
        self.mask[:, :length].copy_(mask[:, :length])
        if self.positions is not None:
            assert positions is not None
            self.positions.copy_(positions)

    @property
    def nbytes(self) -> int:
        """The bytes of the cache."""
        layers = [each for each in self.cache.layers if each.is_initialized]
        return sum(each.keys.nbytes + each.values.nbytes for each in layers)


class _States:
    """The states of generations of a module, and those of earlier ones whose memory later ones use, the last used
    last."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._free: list[_State] = []

    def after_prompt(self, arguments: dict[str, Any], prompt: torch.Tensor, end: int) -> _State:
        """Return the state after the prompt. arguments: of the model, after the prompt; the cache, the mask and the
        positions are taken out. end: the greatest length of the text."""
        cache, mask = arguments.pop("past_key_values"), arguments.pop("attention_mask", None)
        if mask is None:  # a program for both
            mask = torch.ones_like(prompt)
        positions = arguments.pop("position_ids", None)
        if positions is not None:
            positions = positions[:, -1:] + 1
        if generation.is_callers(cache):
            state = _State(cache, mask, positions, None)
            state.start(mask, positions)
            return state
        length = mask.shape[1]
        return self._filled(cache, mask, positions, length, cache_places(min(end, length + _AHEAD)))

    def for_length(self, state: _State, length: int, end: int) -> _State:
        """Return the state, or one that goes on in a larger cache where a text of this length has no place."""
        if state.key is None or length <= _places(state.cache):
            return state
        places = cache_places(min(end, 2 * length))
        larger = self._filled(state.cache, state.mask, state.positions, length - 1, places)
        self.put_back(state)
        return larger

    def put_back(self, state: _State) -> None:
        """Let another generation have a state, of those that together take a small part of a GPU's memory."""
        if state.key is None:
            return
        self._free.append(state)
        most = _memory_for(state.mask.device)
        while sum(each.nbytes for each in self._free) > most:
            self._free.pop(0)

    def _filled(
        self, cache: Any, mask: torch.Tensor, positions: torch.Tensor | None, length: int, places: int
    ) -> _State:
        """Return a state of some places with what a cache holds of a text of this length. A growing cache gives its
        tensors up."""
        first = next((each for each in cache.layers if each.is_initialized), None)
        key = (
            places,
            len(mask),
            mask.dtype,
            mask.device,
            positions is None,
            None if first is None else first.keys.dtype,
            torch.is_inference_mode_enabled(),  # whose tensors may not be written to elsewhere
        )
        state = next((each for each in self._free if each.key == key), None)
        if state is None:
            state = _State(_new_cache(self._module, cache, places), mask, positions, key)
        else:
            self._free.remove(state)
        for layer, source in zip(state.cache.layers, cache.layers, strict=True):
            if source.is_initialized:
                _fill(layer, source, length)
        state.start(mask, positions)
        return state


def _fill(layer: Any, source: Any, length: int) -> None:
    """Have a layer of a static cache hold what another cache's layer has of a text of this length."""
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


def _memory_for(device: torch.device) -> int:
    """Return the bytes of the states that stay between generations: none where no CUDA graph reads them."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory // _MOST_OF_MEMORY


def _text_config(module: Any) -> Any:
    return module.config.get_text_config(decoder=True)


def _new_cache(module: Any, cache: Any, places: int) -> Any:
    static, layer = (_of_transformers(cache, name) for name in ("StaticCache", _STATIC))
    empty = static(config=_text_config(module), max_cache_len=places)
    empty.layers = [layer(max_cache_len=places) for _ in cache.layers]  # windows too: a mask cuts them
    return empty


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
