"""The memory of forge's decoding loop: caches, masks and the decoder's view of its encoder, at fixed shapes."""

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from forge.torch_internals import generation

STATIC, STATIC_SLIDING = "StaticLayer", "StaticSlidingWindowLayer"
GROWING, GROWING_SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"
_RECURRENT, _EMPTY = "LinearAttentionLayer", "DummyLayer"
_STATIC_AND_RECURRENT = "LinearAttentionAndStaticFullAttentionLayer"
# the class of layers with keys and values that have recurrent states, too
_KEYS_BESIDE_STATES = {
    "LinearAttentionAndFullAttentionLayer": GROWING,
    "LinearAttentionAndSlidingWindowAttentionLayer": GROWING_SLIDING,
    _STATIC_AND_RECURRENT: STATIC,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": STATIC_SLIDING,
}
_LEAST = 256  # the smallest size of a static cache
_LEAST_OF_PAIR = 64  # the same for both caches of an encoder-decoder, whose text begins with one token
_AHEAD = 256  # tokens that a cache has room for at first
_MOST_WITHOUT_KEYS = 4096  # columns of a mask if a cache has no keys, and therefore no size limit
_MOST_OF_MEMORY = 16  # caches between two generations take at most 1/16 of the device's memory


def cache_places(length: int, least: int = _LEAST) -> int:
    """Return the size of the static cache for a length: a power of two, or one and a half of one, so that texts of
    many lengths share a few programs."""
    places = least
    while places < length:
        places = places * 3 // 2 if places & (places - 1) == 0 else places * 4 // 3
    return places


class _Encoded(NamedTuple):
    """The results of an encoder, which a decoder reads.

    states: (batch, length, size), the last hidden states. mask: the encoder's input mask; None for a model without
    one. output: transformers' class for them.
    """

    states: torch.Tensor
    mask: torch.Tensor | None
    output: Any

    def with_padding(self, padding: int) -> "_Encoded":
        """Return memory for it and some padding."""
        batch, length, size = self.states.shape
        mask = None if self.mask is None else self.mask.new_empty(len(self.mask), self.mask.shape[1] + padding)
        return _Encoded(self.states.new_empty(batch, length + padding, size), mask, self.output)

    def key(self) -> tuple:
        """Return the key that another generation must share to reuse this memory."""
        return self.states.shape, self.states.dtype, None if self.mask is None else (self.mask.shape, self.mask.dtype)

    def hold(self, other: "_Encoded") -> None:
        """Copy another one, which may be shorter, into this memory; the mask hides the padding."""
        for whole, part in ((self.states, other.states), (self.mask, other.mask)):
            if whole is not None and part is not None:
                whole[:, part.shape[1] :].zero_()
                whole[:, : part.shape[1]].copy_(part)


class State:
    """The memory that the steps of a generation read and write, at fixed addresses as CUDA graphs need them.

    Args:
        cache: A static one; of an encoder-decoder with the keys and values of the encoder.
        name: The cache's name among the model's arguments.
        mask: (batch, length), with zeros for padding. The state's has a row as long as the cache.
        inputs: The model's arguments for the next tokens, by name, each of (..., batch, 1): positions and token types.
        encoded: The encoder's results that the decoder reads; None for other models.
        key: The key that another generation must share to reuse it.
    """

    def __init__(
        self,
        cache: Any,
        name: str,
        mask: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        encoded: _Encoded | None,
        key: Any,
    ) -> None:
        self.cache, self.name, self.encoded, self.key = cache, name, encoded, key
        self.source_length = 0  # of the encoder's input, without padding
        self.mask = mask.new_empty(len(mask), min(places_of(cache), _MOST_WITHOUT_KEYS))
        self.inputs = {name: torch.empty_like(each) for name, each in inputs.items()}

    def start(self, mask: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        """Set the padding of the text so far, and the arguments of the next tokens."""
        length = min(mask.shape[1], self.mask.shape[1])
        self.mask.fill_(1)  # causal attention hides positions that the text has not reached
        self.mask[:, :length].copy_(mask[:, :length])
        for name, each in inputs.items():
            self.inputs[name].copy_(each)

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments that are in this memory."""
        mask, _ = generation.argument_names(self.encoded is not None)
        arguments = {self.name: self.cache, mask: self.mask, **self.inputs}
        if self.encoded is not None:
            arguments["encoder_outputs"] = self.encoded.output(last_hidden_state=self.encoded.states)
            if self.encoded.mask is not None:
                arguments["attention_mask"] = self.encoded.mask
        return arguments

    def reorder(self, rows: torch.Tensor, length: int) -> None:
        """Reorder the rows of keys and values, or recurrent states, of a text of some length."""
        for layer in text_cache(self.cache).layers:
            for used in (*states_of(layer), *(each[:, :, :length] for each in keys_of(layer))):
                used.copy_(used.index_select(0, rows))

    @property
    def nbytes(self) -> int:
        """The bytes of the cache."""
        layers = [each for part in parts_of(self.cache) for each in part.layers]
        return sum(each.nbytes for layer in layers for each in tensors_of(layer))


class States:
    """The states of a module's current and earlier generations, whose memory is reused, ordered by last use."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._free: list[State] = []

    def after_prompt(self, arguments: dict[str, Any], prompt: torch.Tensor, end: int) -> State:
        """Return the state after the prompt. arguments: the model's, after the prompt; those that the state holds are
        removed. end: the maximal length of the text."""
        encoded = self._taken_encoded(arguments)
        name_of_mask, name_of_positions = generation.argument_names(encoded is not None)
        name, mask = generation.cache_name(arguments), arguments.pop(name_of_mask, None)
        cache = arguments.pop(name)
        if mask is None:  # one program for both
            mask = torch.ones_like(prompt)
        inputs = generation.next_inputs(arguments, name_of_positions)
        if name_of_positions not in inputs and generation.is_whisper(self._module):
            inputs[name_of_positions] = mask.long().sum(-1, keepdim=True)
        if generation.is_callers(cache):
            state = State(cache, name, mask, inputs, encoded, None)
            state.start(mask, inputs)
            return state
        length = mask.shape[1]
        places = cache_places(min(end, length + _AHEAD), _LEAST if encoded is None else _LEAST_OF_PAIR)
        state = self._filled(cache, name, mask, inputs, encoded, length, places)
        state.source_length = 0 if encoded is None else encoded.states.shape[1]
        return state

    def _taken_encoded(self, arguments: dict[str, Any]) -> _Encoded | None:
        """Remove the encoder's results from the model's arguments, and return them."""
        outputs = arguments.pop("encoder_outputs", None)
        if outputs is None:
            return None
        states, mask = outputs.last_hidden_state, arguments.pop("attention_mask", None)
        if generation.is_whisper(self._module):
            mask = None
        elif mask is None and generation.masks_encoder(self._module):  # one program for both
            mask = states.new_ones(states.shape[:2], dtype=torch.long)
        return _Encoded(states, mask, type(outputs))

    def _padding(self, encoded: _Encoded) -> int:
        """Return the padding of an encoder's states with which texts of many lengths share a few programs."""
        length = encoded.states.shape[1]
        return cache_places(length, _LEAST_OF_PAIR) - length if generation.masks_encoder(self._module) else 0

    def for_length(self, state: State, length: int, end: int) -> State:
        """Return the state, or a copy with a larger cache if a text of this length does not fit."""
        if state.key is None or length <= places_of(state.cache):
            return state
        places = cache_places(min(end, 2 * length))
        larger = self._filled(state.cache, state.name, state.mask, state.inputs, state.encoded, length - 1, places)
        larger.source_length = state.source_length
        self.put_back(state)
        return larger

    def copied_cache(self, state: State, length: int) -> Any:
        """Return a growing cache with a state's contents for a text of some length; the caller's cache unchanged."""
        if state.key is None:
            return state.cache
        cache = growing_cache(self._module, state.cache)
        for part, source in zip(parts_of(cache), parts_of(state.cache), strict=True):
            count = length if source is text_cache(state.cache) else state.source_length
            for index, layer in enumerate(source.layers):
                if layer.is_initialized:
                    part.update(layer.keys[:, :, :count], layer.values[:, :, :count], index)
        if cache is not text_cache(cache):
            cache.is_updated.update(state.cache.is_updated)
        return cache

    def put_back(self, state: State) -> None:
        """Release a state to other generations, if the idle ones take a small part of a GPU's memory."""
        if state.key is None:
            return
        self._free.append(state)
        most = _memory_for(state.mask.device)
        while sum(each.nbytes for each in self._free) > most:
            self._free.pop(0)

    def _filled(
        self,
        cache: Any,
        name: str,
        mask: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        encoded: _Encoded | None,
        length: int,
        places: int,
    ) -> State:
        """Return a state of some size with a cache's contents for a text of this length. A growing cache gives up its
        tensors."""
        memory = None if encoded is None else encoded.with_padding(self._padding(encoded))
        first = next((each for layer in text_cache(cache).layers for each in tensors_of(layer)), None)
        key = (
            places,
            len(mask),
            mask.dtype,
            mask.device,
            tuple((argument, each.shape) for argument, each in inputs.items()),
            None if memory is None else memory.key(),
            None if first is None else first.dtype,
            torch.is_inference_mode_enabled(),  # whose tensors may not be written to outside of it
        )
        state = next((each for each in self._free if each.key == key), None)
        if state is None:
            empty = _new_cache(self._module, cache, places, memory)
            state = State(empty, name, mask, inputs, memory, key)
        else:
            self._free.remove(state)
        for part, its_source in zip(parts_of(state.cache), parts_of(cache), strict=True):
            for layer, source in zip(part.layers, its_source.layers, strict=True):
                _fill(layer, source, length if part is text_cache(state.cache) else None)
        if state.encoded is not None and encoded is not None:
            state.encoded.hold(encoded)
        state.start(mask, inputs)
        return state


def _fill(layer: Any, source: Any, length: int | None) -> None:
    """Copy the contents of another cache's layer for a text of this length into a layer of a static cache; all its keys
    if the length is None."""
    for state, its_source in zip(states_of(layer), states_of(source), strict=True):
        state.copy_(its_source)
    if not keys_of(source):
        return
    if not layer.is_initialized:
        layer.lazy_initialization(source.keys, source.values)
    length = source.keys.shape[2] if length is None else length
    count = min(source.keys.shape[2], length)
    first = length - count  # a window has the last ones
    for whole, part in ((layer.keys, source.keys), (layer.values, source.values)):
        whole.zero_()  # NaNs would leak through the mask
        whole[:, :, first:length].copy_(part[:, :, :count])
    layer.cumulative_length.fill_(length)
    if kind_of_keys(source) != STATIC:
        source.keys = source.values = None


def _memory_for(device: torch.device) -> int:
    """Return the bytes of the states kept between generations: none if no CUDA graph reads them."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory // _MOST_OF_MEMORY


# transformers' caches


def text_cache(cache: Any) -> Any:
    """Return the part of a cache that grows with the text."""
    return getattr(cache, "self_attention_cache", cache)


def parts_of(cache: Any) -> tuple[Any, ...]:
    """Return the layer caches of a cache: two for an encoder-decoder, that of the text first."""
    is_pair = hasattr(cache, "self_attention_cache")
    return (cache.self_attention_cache, cache.cross_attention_cache) if is_pair else (cache,)


def growing_cache(module: Any, cache: Any) -> Any:
    """Return an empty growing cache for the model of another cache."""
    config = _text_config(module)
    caches = [of_transformers(cache, "DynamicCache")(config=config) for _ in parts_of(cache)]
    return caches[0] if len(caches) == 1 else of_transformers(cache, "EncoderDecoderCache")(*caches)


def _new_cache(module: Any, cache: Any, places: int, encoded: _Encoded | None) -> Any:
    """Return an empty static cache with as many layers as another one has."""
    sizes = [places] if encoded is None else [places, encoded.states.shape[1]]
    parts = [_new_part(module, part, size) for part, size in zip(parts_of(cache), sizes, strict=True)]
    if encoded is None:
        return parts[0]
    pair = of_transformers(cache, "EncoderDecoderCache")(*parts)
    pair.is_updated.update(cache.is_updated)  # the keys of the encoder are computed
    return pair


def _new_part(module: Any, cache: Any, places: int) -> Any:
    empty = of_transformers(cache, "StaticCache")(config=_text_config(module), max_cache_len=places)
    empty.layers = [_new_layer(cache, each, places) for each in cache.layers]
    return empty


def _new_layer(cache: Any, layer: Any, places: int) -> Any:
    """Return a static cache layer for a layer of a cache, without keys and with its recurrent states."""
    if kind_of_keys(layer) is None:
        return copy.deepcopy(layer)
    # sliding-window layers have room for the whole text too: a mask hides older tokens
    if not is_recurrent(layer):
        return of_transformers(cache, STATIC)(max_cache_len=places)
    count = layer.number_of_states
    new = of_transformers(cache, _STATIC_AND_RECURRENT)(max_cache_len=places, number_of_states=count)
    for name in vars(of_transformers(cache, _RECURRENT)(number_of_states=count)):
        setattr(new, name, copy.deepcopy(getattr(layer, name)))
    return new


def _text_config(module: Any) -> Any:
    return module.config.get_text_config(decoder=True)


def of_transformers(cache: Any, name: str) -> Any:
    """Return a class of transformers' module of caches."""
    base = next(each for each in type(cache).__mro__ if each.__name__ == "Cache")
    return getattr(sys.modules[base.__module__], name)


def kind_of(layer: Any) -> str:
    """Return the class of transformers that a cache's layer is an instance of."""
    kind = type(layer)
    return kind.__name__ if kind.__module__ == "transformers.cache_utils" else f"{kind.__module__}.{kind.__name__}"


def kind_of_keys(layer: Any) -> str | None:
    """Return the class of transformers that handles a layer's keys and values; None for a layer without."""
    kind = kind_of(layer)
    return None if kind in (_RECURRENT, _EMPTY) else _KEYS_BESIDE_STATES.get(kind, kind)


def is_recurrent(layer: Any) -> bool:
    """Return whether a cache's layer has recurrent states, with or without keys."""
    return kind_of(layer) in (_RECURRENT, *_KEYS_BESIDE_STATES)


def keys_of(layer: Any) -> list[torch.Tensor]:
    """Return a cache layer's keys and values; none before its first use."""
    return [] if kind_of_keys(layer) is None or layer.keys is None else [layer.keys, layer.values]


def states_of(layer: Any) -> list[torch.Tensor]:
    """Return a cache layer's recurrent states; none before its first use."""
    if not is_recurrent(layer):
        return []
    each_state = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [each for each in each_state if each is not None]


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a cache's layer."""
    return [*keys_of(layer), *states_of(layer)]


def places_of(cache: Any) -> int:
    """Return the capacity of a static cache in tokens: unlimited if no layer has keys."""
    layers = (each for each in text_cache(cache).layers if kind_of_keys(each) is not None)
    places: int = next((each.max_cache_len for each in layers), sys.maxsize)
    return places
