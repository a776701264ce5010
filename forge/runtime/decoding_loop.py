"""The decoding loop of transformers' `generate` for a jitted model: one program per token, without host waits.

transformers prepares each token's inputs in Python (slices, masks, positions), calls the model, and waits for the token
to see whether it ends the sequence; with its default cache, which grows, every call has new shapes. Here the
preparation is part of a program of fixed shapes, the cache is static, and the host reads whether a sequence ended one
token late, while the device computes the next one. Logits processors, sampling and stopping criteria are transformers'
own, unchanged, and run in the same order with the same random numbers. Beam search is transformers' too, with these
steps in place of the model. An encoder is one program, and its keys are computed once.

Generations that this loop does not support are left to transformers' loop (`_reason_against`).
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from forge.runtime.decoding_state import (
    GROWING,
    GROWING_SLIDING,
    STATIC,
    STATIC_SLIDING,
    State,
    States,
    growing_cache,
    is_recurrent,
    kind_of,
    kind_of_keys,
    parts_of,
    places_of,
    text_cache,
)
from forge.runtime.repeated_calls import CallRecorder, RepeatedCall
from forge.torch_internals import generation

CompileStep = Callable[[Callable, CallRecorder], Callable]
_log = logging.getLogger("forge.generate")
# beside those of `argument_names` and those that only a prompt has
_KNOWN = {"attention_mask", "cache_params", "past_key_values", "use_cache", "logits_to_keep", *generation.TOKEN_TYPES}
_UNCUT = 4096  # cache size up to which sliding-window layers cache the whole text


def decoding_loop(original: Any, module: Any, compile_step: CompileStep) -> "_Loop | None":
    """Return the loop of a jitted module for transformers' `generate`; None for other classes, and for versions of
    transformers with another loop than the one known here.

    Args:
        original: The module's class.
        module: The module, not jitted.
        compile_step: Compiles a function with the options of the jitted module, and has a recorder note its
            calls.
    """
    mixin = generation.generation_mixin(original)
    return None if mixin is None else _Loop(original, mixin, module, compile_step)


def loop_methods(original: Any) -> dict[str, Callable]:
    """Return transformers' methods that the loop overrides in the class of jitted modules of a class."""
    methods: dict[str, Callable] = {
        "_sample": lambda self, *args, **kwargs: self._forge_loop.sample(self, *args, **kwargs),
        "_beam_search": lambda self, *args, **kwargs: self._forge_loop.search_beams(self, *args, **kwargs),
    }
    encoding = generation.encoding_method(original)
    if encoding is not None:
        methods[encoding] = lambda self, *args, **kwargs: self._forge_loop.run_encoder(self, encoding, *args, **kwargs)
    return methods


class _Loop:
    """The loop of one jitted module. See decoding_loop for the arguments; mixin: transformers' GenerationMixin."""

    def __init__(self, original: Any, mixin: Any, module: Any, compile_step: CompileStep) -> None:
        self._original, self._mixin, self._module = original, mixin, module
        self._compile = compile_step
        self._step: Callable[..., torch.Tensor] | None = None  # compiled on first use
        self._recorder = CallRecorder()  # of its calls
        self._encode: Callable[..., Any] | None = None  # compiled on first use
        self._states = States(module)
        self._has_encoder = bool(module.config.is_encoder_decoder)

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
        """Return prompts continued by sampled tokens: transformers' `GenerationMixin._sample`."""
        if self._is_left(generation_config, stopping_criteria, synced_gpus, model_kwargs, input_ids, has_beams=False):
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
        embedded = _embedded_length(input_ids, model_kwargs)
        logits = self._prefill(model, input_ids, generation_config, model_kwargs)
        end = stopping_criteria.max_length
        choice = _Choice(generation_config, stopping_criteria, logits_processor, input_ids)
        stop = _Stop(
            input_ids.device,
            streamer,
            is_late=not generation.is_callers(model_kwargs[generation.cache_name(model_kwargs)]),
        )
        callbacks = (*logits_processor, *stopping_criteria, *([] if streamer is None else [streamer]))
        steps = self._steps(callbacks, model_kwargs, end, embedded)
        with generation.optimized_for_decoding(model):
            while True:
                tokens, input_ids = choice.extend(input_ids, logits)
                if stop(choice.unfinished, tokens) or input_ids.shape[1] >= end:
                    break
                logits = steps.logits_after(tokens, input_ids)
        undone = int(stop.ended_before())
        if undone:
            input_ids = input_ids[:, :-1]
            choice.undo()
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            steps.finish()
            return input_ids
        cache = steps.finish_with_cache(undone)
        outputs = {"scores": choice.scores, "logits": choice.logits, "past_key_values": cache}
        return generation.output_class(self._has_encoder)(sequences=input_ids, **outputs)

    def search_beams(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Return prompts continued by the best-scoring beams: transformers' `GenerationMixin._beam_search`, with the
        steps of this loop in place of the model."""
        if self._is_left(generation_config, stopping_criteria, synced_gpus, model_kwargs, input_ids, has_beams=True):
            beams = model
        else:
            callbacks = (*logits_processor, *stopping_criteria)
            steps = self._steps(callbacks, model_kwargs, stopping_criteria.max_length)
            prefill = functools.partial(self._prefill, model, input_ids, generation_config, model_kwargs)
            beams = generation.BeamModel(model, prefill, steps)
        outputs = generation.search_beams(
            self._original,
            beams,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            **model_kwargs,
        )
        if beams is model:
            return outputs
        if isinstance(outputs, torch.Tensor):
            steps.finish()
        else:
            outputs.past_key_values = steps.finish_with_cache()
        return outputs

    def run_encoder(self, model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a generation's arguments with the encoder's output, by one program. method: transformers' for it."""
        if hasattr(model, "hf_device_map"):  # hooks of the encoder move its input between devices
            instance = model
        else:
            encode = self._encode = self._encode or self._compile(_encode, CallRecorder())
            instance = generation.EncoderModel(model, functools.partial(encode, self._module))
        return generation.run_encoder(self._original, method, instance, *args, **kwargs)

    def _steps(self, callbacks: Iterable[Any], arguments: dict[str, Any], end: int, embedded: int = 0) -> "_Steps":
        """Return the steps of a generation. callbacks: the code that runs between them. See _Steps for the others."""
        step = self._step = self._step or self._compile(_step, self._recorder)
        may_repeat = all(map(_is_of_transformers, callbacks))  # the caller's may change the model
        recorder = self._recorder if may_repeat else None
        return _Steps(step, recorder, self._module, self._states, arguments, end + embedded, embedded)

    def _prefill(self, model: Any, input_ids: torch.Tensor, generation_config: Any, arguments: dict) -> torch.Tensor:
        """Return the logits of the prompt's last token. Sets the cache.

        A static cache that is not visible to others stays empty: attention without a mask is faster, and one program
        serves prompts of both caches.
        """
        name = generation.cache_name(arguments)
        cache = arguments[name]
        is_static = not {STATIC, STATIC_SLIDING}.isdisjoint(map(kind_of_keys, text_cache(cache).layers))
        if is_static and not generation.is_callers(cache):
            arguments[name] = growing_cache(self._module, cache)
        outputs = generation.prefill(model, input_ids, generation_config, arguments)
        arguments[name] = outputs[name]
        for each in (*generation.prompt_arguments(), "inputs_embeds"):
            arguments.pop(each, None)
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits.to(copy=True, dtype=torch.float32, device=input_ids.device)

    def _is_left(self, *generation: Any, has_beams: bool) -> bool:
        """Return whether a generation is left to transformers' loop. See _reason_against for the arguments."""
        reason = self._reason_against(*generation, has_beams=has_beams)
        if reason is not None:
            _log.info("generate runs in transformers' loop: %s", reason)
        return reason is not None

    def _reason_against(
        self,
        generation_config: Any,
        stopping_criteria: Any,
        synced_gpus: bool,
        arguments: dict[str, Any],
        input_ids: torch.Tensor,
        *,
        has_beams: bool,
    ) -> str | None:
        """Return why a generation is left to transformers' loop; None if it is not."""
        length = stopping_criteria.max_length
        if generation_config.prefill_chunk_size is not None or length is None:
            return "the prompt comes in chunks, or the text has no greatest length"
        config = self._module.config
        name = generation.own_method(self._original, self._mixin, config, length, has_beams=has_beams)
        if name is not None:
            return f"the model has its own {name}"
        if synced_gpus or generation_config.is_assistant:
            return "another process or model waits for each token"
        returned = generation_config.return_dict_in_generate
        if returned and (generation_config.output_attentions or generation_config.output_hidden_states):
            return "attentions or hidden states are returned"
        mask, positions = generation.argument_names(self._has_encoder)
        argument_names = _KNOWN | generation.prompt_arguments() | {mask, positions}
        if self._has_encoder:
            argument_names = argument_names | {"encoder_outputs"}
        elif not has_beams:
            argument_names = argument_names | {"inputs_embeds"}
        unknown = {name for name, each in arguments.items() if name not in argument_names and each is not None}
        if unknown or not arguments.get("use_cache"):
            return f"the model takes {', '.join(sorted(unknown))}" if unknown else "there is no cache"
        if any(each.ndim != 2 for each in map(arguments.get, {mask, "attention_mask"}) if each is not None):
            return f"{mask} does not have two dimensions"
        if self._has_encoder and not hasattr(arguments["encoder_outputs"], "last_hidden_state"):
            return "encoder_outputs is a tuple"
        length += _embedded_length(input_ids, arguments)
        return self._reason_against_cache(arguments.get(generation.cache_name(arguments)), length, returned)

    def _reason_against_cache(self, whole: Any, length: int, is_returned: bool) -> str | None:
        """Return why a cache is not replaced, and its generation left to transformers' loop."""
        cache, *of_encoder = parts_of(whole)
        layers = getattr(cache, "layers", ())
        kinds = set(map(kind_of_keys, layers))
        if generation.is_callers(whole):
            has_places = STATIC in kinds and kinds <= {STATIC, None} and places_of(cache) >= length - 1
            return None if has_places else "the caller's cache is not a static one with places for all tokens"
        growing, fixed = {None, GROWING, GROWING_SLIDING}, {None, STATIC, STATIC_SLIDING}
        if getattr(cache, "offloading", False) or not kinds or not (kinds <= growing or kinds <= fixed):
            names = ", ".join(sorted(set(map(kind_of, layers))))
            return f"the cache is {type(cache).__name__} of {names or 'no layers'}"
        if is_returned and (kinds != {GROWING} or any(map(is_recurrent, layers))):
            return "a cache that is static, or of windows or recurrences, is returned"
        if any(kind_of(layer) not in (GROWING, STATIC) for each in of_encoder for layer in each.layers):
            return "the keys of the encoder are cut to a window"
        if kinds != {None} and not generation.has_static_cache(self._module):
            return "transformers has no static cache for the model"
        windows = [each.sliding_window for each in layers if kind_of_keys(each) == GROWING_SLIDING]
        windows += [each.max_cache_len for each in layers if kind_of_keys(each) == STATIC_SLIDING]
        if windows and length > max(_UNCUT, 4 * min(windows)):
            return f"a cache of all {length} tokens is much larger than the window of {min(windows)}"
        return None


def _embedded_length(input_ids: torch.Tensor, arguments: dict[str, Any]) -> int:
    """Return the number of embeddings before the tokens of a prompt; 0 if they are the tokens' embeddings."""
    embeddings = arguments.get("inputs_embeds")
    return 0 if embeddings is None else max(embeddings.shape[1] - input_ids.shape[1], 0)


def _is_of_transformers(callback: Any) -> bool:
    """Return whether a processor, criterion or streamer is one of transformers' own."""
    return type(callback).__module__.partition(".")[0] == "transformers"


def _encode(module: Any, arguments: dict[str, Any]) -> Any:
    """Return the encoder's output; forge compiles this function."""
    return module.get_encoder()(**arguments)


def _step(module: Any, tokens: torch.Tensor, state: dict[str, Any], arguments: dict[str, Any]) -> torch.Tensor:
    """Return the logits after one more token, in float32, and advance the positions; forge compiles this function.

    Args:
        module: The model.
        tokens: (batch, 1), the last token.
        state: The arguments of the model that the state holds (`State.arguments`).
        arguments: The other arguments, which are the same for each token.
    """
    inputs = module.prepare_inputs_for_generation(tokens, next_sequence_length=1, **state, **arguments)
    logits: torch.Tensor = module(**inputs, return_dict=True).logits[:, -1].to(copy=True, dtype=torch.float32)
    for name in generation.NAMES_OF_POSITIONS:
        if name in state:
            state[name].add_(1)
    return logits


class _Steps:
    """The steps of one generation.

    Args:
        step: `_step`, compiled.
        recorder: The recorder of its programs; None: Dynamo checks its guards before each step.
        module: The model.
        states: The memory that the steps read and write.
        arguments: The model's, after the prompt.
        end: The maximal length of the text.
        embedded: The number of positions before the text's tokens that have only embeddings.
    """

    def __init__(
        self,
        step: Callable,
        recorder: CallRecorder | None,
        module: Any,
        states: "States",
        arguments: dict[str, Any],
        end: int,
        embedded: int,
    ) -> None:
        self._step, self._recorder, self._module = step, recorder, module
        self._states, self._arguments, self._end, self._embedded = states, arguments, end, embedded
        self._length = 0  # of the text at the last step
        self._state: State | None = None
        self._call: Callable[[torch.Tensor], torch.Tensor]  # of the state

    def logits_after(self, tokens: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits after a text, in float32. tokens: its last ones, of shape (batch,)."""
        before = self._state
        if self._embedded:
            input_ids = torch.nn.functional.pad(input_ids, (self._embedded, 0))
        if before is None:
            state = self._states.after_prompt(self._arguments, input_ids[:, :-1], self._end)
        else:
            state = before
        state = self._states.for_length(state, input_ids.shape[1], self._end)
        if state is not before:
            self._call = self._of_state(state)
            self._state = state
        self._length = input_ids.shape[1]
        return self._call(tokens[:, None])

    def reorder(self, rows: torch.Tensor) -> None:
        """Reorder the rows of the cache by indices of shape (batch,) for the next step. Beams of a prompt start equal,
        and share the encoder's output: only the rows of the text are permuted, once it has tokens."""
        if self._state is not None:
            self._state.reorder(rows, self._length)

    def _of_state(self, state: "State") -> Callable[[torch.Tensor], torch.Tensor]:
        arguments = state.arguments()

        def call(tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self._step(self._module, tokens, arguments, self._arguments)
            return logits

        return call if self._recorder is None else RepeatedCall(call, self._recorder)

    def finish_with_cache(self, undone: int = 0) -> Any:
        """Release the state to other generations. Return a growing cache of the text at the last step, less the undone
        tokens."""
        if self._state is None:
            return self._arguments[generation.cache_name(self._arguments)]
        cache = self._states.copied_cache(self._state, self._length - undone)
        self.finish()
        return cache

    def finish(self) -> None:
        """Release the state to other generations."""
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
        returned = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if returned and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if returned and config.output_logits else None
        self.unfinished = input_ids.new_ones(len(input_ids))

    def extend(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens, and the text with them; update which sequences are unfinished."""
        scores = self._processors(input_ids, logits)
        if self.scores is not None:
            self.scores = (*self.scores, scores.clone())  # a CUDA graph overwrites its logits
        if self.logits is not None:
            self.logits = (*self.logits, logits.clone())
        if self._draws:
            if self._device.type == "cuda":
                self._state = torch.cuda.get_rng_state(self._device)
            tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._pad is not None:
            tokens = tokens * self.unfinished + self._pad * (1 - self.unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        self.unfinished = self.unfinished & ~self._criteria(input_ids, self.scores)
        return tokens, input_ids

    def undo(self) -> None:
        """Undo the last draw, and restore the generator of random numbers to the state before it."""
        self.scores = None if self.scores is None else self.scores[:-1]
        self.logits = None if self.logits is None else self.logits[:-1]
        if self._state is not None:
            torch.cuda.set_rng_state(self._state, self._device)


class _Stop:
    """The host's knowledge of whether all sequences ended: on a GPU one token late, if the token after the last may be
    undone and nothing waits for tokens (`is_late`)."""

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
        stop = unfinished.max() == 0
        if not self._flags:
            return bool(stop)
        flag, event = self._flags[self._count % 2]
        flag.copy_(stop, non_blocking=True)
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
