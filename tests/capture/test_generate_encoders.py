"""transformers' `generate` of a jitted encoder-decoder, by the loop of forge: the tokens of eager, and few programs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import forge
from forge.capture.handles import handle_of
from forge.runtime import decoding_state
from tests.capture.generations import check_streams, tokens_of, with_random_weights
from tests.markers import slow_except

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
    "decoder_start_token_id": 2, "bos_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART | {"forced_bos_token_id": 21},
    "marian": _BART,
    "mbart": _BART,
    "pegasus": _BART,
}
_GREEDY = {"do_sample": False, "repetition_penalty": 1.3}
_SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 0.9}


def _model(family: str = "t5", **others: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 9, **_FAMILIES[family], **others}
    return with_random_weights(AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **sizes)).eval())


def _whisper(**others: Any) -> Any:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=96, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=50,
        max_target_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=9, decoder_start_token_id=2,
    )  # fmt: skip
    model = with_random_weights(WhisperForConditionalGeneration(config).eval(), std=0.3)
    settings = {"suppress_tokens": [11, 12], "begin_suppress_tokens": [13, 9], "no_timestamps_token_id": 60}
    for name, value in (settings | {"is_multilingual": False, "max_length": None} | others).items():
        setattr(model.generation_config, name, value)
    return model


def _source(batch: int, length: int, padding: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.randint(10, 90, (batch, length))
    if not padding:
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[0, -padding:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("family", slow_except(_FAMILIES, "t5"))
def test_tokens_are_those_of_eager_by_a_few_programs(family: str, left: Callable[[], list[str]]) -> None:
    model = _model(family)
    jitted = forge.jit(model)
    static = _GREEDY | {"cache_implementation": "static"}
    cases = [(10, 3, 40, _GREEDY), (21, 4, 44, _SAMPLED), (17, 0, 40, static), (70, 5, 50, _SAMPLED)]
    for length, padding, new, options in cases:
        source = _source(2, length, padding)
        expected = tokens_of(model, source, new, **options)
        assert torch.equal(tokens_of(jitted, source, new, **options), expected)
        assert len(expected.unique()) > 4
    history = handle_of(jitted, "test").history
    # the encoder and the first step, of sources with a mask and without, of one length and of any; a token of two sizes
    assert history.graphs <= 8
    assert not history.graph_breaks
    assert not left()


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"cache_implementation": "static"}, marks=pytest.mark.slow),
        pytest.param({"do_sample": True, "temperature": 0.8}, marks=pytest.mark.slow),
        pytest.param({"return_timestamps": True, "condition_on_prev_tokens": True}, marks=pytest.mark.slow),
        pytest.param(
            {
                "return_timestamps": True,
                "temperature": (0.0, 0.5),
                "logprob_threshold": -1.0,
                "no_speech_threshold": 0.6,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whisper_writes_the_tokens_of_eager(options: dict[str, Any], left: Callable[[], list[str]]) -> None:
    model = _whisper()
    frames = 260 if "return_timestamps" in options else 100  # several windows of 100
    sound = {"input_features": torch.randn(2, 8, frames), "attention_mask": torch.ones(2, frames, dtype=torch.long)}
    actual, expected = (tokens_of(each, sound, 60, **options) for each in (forge.jit(model), model))
    assert torch.equal(actual, expected)
    assert expected.shape[1] > 40
    assert not left()


@pytest.mark.slow
def test_encoder_is_a_program() -> None:
    model = _model()
    jitted = forge.jit(model)
    source = _source(2, 12)
    assert torch.equal(tokens_of(jitted, source, 1, **_GREEDY), tokens_of(model, source, 1, **_GREEDY))
    assert handle_of(jitted, "test").history.graphs == 2  # and the first step


@pytest.mark.slow
def test_prompt_of_the_decoder_and_its_padding_are_kept(left: Callable[[], list[str]]) -> None:
    model = _model("bart")
    start = torch.tensor([[2, 30, 31, 32], [2, 40, 41, 42]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    source = _source(2, 12) | {"decoder_input_ids": start, "decoder_attention_mask": mask}
    actual, expected = (tokens_of(each, source, 40, **_SAMPLED) for each in (forge.jit(model), model))
    assert torch.equal(actual, expected)
    assert torch.equal(expected[:, :4], start)
    assert not left()


@pytest.mark.slow
def test_text_longer_than_the_cache_goes_on_in_a_larger_one(grown: list[int]) -> None:
    model = _model(eos_token_id=None)
    source = _source(2, 12)
    options = _SAMPLED | {"return_dict_in_generate": True}
    actual, expected = (tokens_of(each, source, 400, **options) for each in (forge.jit(model), model))
    assert torch.equal(actual.sequences, expected.sequences)
    keys, wanted = (each.past_key_values.cross_attention_cache.layers[1].keys for each in (actual, expected))
    torch.testing.assert_close(keys, wanted)
    assert grown == [384, 512]


@pytest.mark.parametrize("kind", slow_except(["eos", "criterion", "max_length"], "eos"))
@pytest.mark.slow
@pytest.mark.slow
def test_texts_end_where_those_of_eager_do(kind: str, left: Callable[[], list[str]]) -> None:
    class EndsAfter(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return (input_ids[:, -1] % 7 == 3) & (input_ids.shape[1] > 14)

    model = _model(eos_token_id=[9, 11, 13, 15, 17, 19] if kind == "eos" else None)
    jitted = forge.jit(model)
    criteria = {"criterion": [EndsAfter()], "max_length": [MaxLengthCriteria(12)]}.get(kind, [])
    lengths = set()
    for seed in range(3):
        torch.manual_seed(seed)
        source = _source(2, 12)
        actual, expected = (
            tokens_of(each, source, 60, **_SAMPLED, stopping_criteria=criteria) for each in (jitted, model)
        )
        assert torch.equal(actual, expected)
        lengths.add(expected.shape[1])
    assert min(lengths) < 60
    assert not left()


@pytest.mark.slow
@pytest.mark.slow
def test_streamer_gets_each_token_once() -> None:
    check_streams(_model(), _source(1, 12, padding=0), **_GREEDY)


@pytest.mark.slow
def test_callers_states_of_the_encoder_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_state, "_memory_for", lambda device: 2**20)  # as on a GPU
    model = _whisper()
    jitted = forge.jit(model)
    sound = torch.randn(2, 1, 8, 100)
    outputs = model.get_encoder()(sound[0])
    before = outputs.last_hidden_state.clone()
    start = {"decoder_input_ids": torch.full((1, 1), 2)}
    texts = [tokens_of(each, {"encoder_outputs": copy.copy(outputs), **start}, 20) for each in (jitted, model)]
    assert torch.equal(*texts)
    other = {"input_features": sound[1], **start}
    assert torch.equal(tokens_of(jitted, other, 20), tokens_of(model, other, 20))
    assert torch.equal(outputs.last_hidden_state, before)


@pytest.mark.slow
def test_generations_of_other_lengths_use_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_state, "_memory_for", lambda device: 2**20)  # as on a GPU
    model = _model()
    jitted = forge.jit(model)
    for length in (30, 12, 50):  # leftovers of an earlier one are masked
        source = _source(2, length)
        assert torch.equal(tokens_of(jitted, source, 20, **_SAMPLED), tokens_of(model, source, 20, **_SAMPLED))
    assert len(jitted._forge_loop._states._free) == 1


def _caches(kind: str, model: Any) -> EncoderDecoderCache:
    if kind == "growing":
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    text, source = (StaticCache(config=model.config, max_cache_len=places) for places in (64, 12))
    return EncoderDecoderCache(text, source)


@pytest.mark.slow
@pytest.mark.slow
def test_callers_static_cache_holds_the_text(left: Callable[[], list[str]]) -> None:
    model = _model(eos_token_id=None)
    source = _source(1, 12, padding=0)
    caches = [_caches("static", model) for _ in range(2)]
    for each, cache in zip((model, forge.jit(model)), caches, strict=True):
        tokens_of(each, source, 20, **_GREEDY, past_key_values=cache)
    assert not left()
    for parts in ("self_attention_cache", "cross_attention_cache"):
        expected, actual = (getattr(cache, parts).layers for cache in caches)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)


@pytest.mark.slow
@pytest.mark.slow
def test_scores_and_the_cache_are_returned_as_by_eager(left: Callable[[], list[str]]) -> None:
    model = _model(eos_token_id=None)
    source = _source(2, 12)
    options = _SAMPLED | {"return_dict_in_generate": True, "output_scores": True}
    actual, expected = (tokens_of(each, source, 20, **options) for each in (forge.jit(model), model))
    assert not left()
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.scores, expected.scores)
    for part in ("self_attention_cache", "cross_attention_cache"):
        ours, theirs = (getattr(each.past_key_values, part).layers for each in (actual, expected))
        for layer, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close((layer.keys, layer.values), (wanted.keys, wanted.values))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_dict_in_generate": True, "output_attentions": True}, "attentions or hidden states are returned"),
        pytest.param({"past_key_values": "growing"}, "the caller's cache is not a static one", marks=pytest.mark.slow),
        pytest.param({"use_cache": False}, "there is no cache", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_other_generations_are_left_to_transformers(
    options: dict[str, Any], reason: str, left: Callable[[], list[str]]
) -> None:
    model = _model(eos_token_id=None)
    source = _source(1, 12, padding=0)
    texts = []
    for each in (model, forge.jit(model)):
        own = dict(options)
        if "past_key_values" in own:
            own["past_key_values"] = _caches(own["past_key_values"], model)
        text = tokens_of(each, source, 8, **_GREEDY, **own)
        texts.append(text if isinstance(text, torch.Tensor) else text.sequences)
    assert torch.equal(*texts)
    assert [reason in each for each in left()] == [True]


@pytest.mark.slow
@pytest.mark.slow
def test_model_with_its_own_preparation_is_left_to_transformers(left: Callable[[], list[str]]) -> None:
    kind = type(_model())

    class Own(kind):  # type: ignore[misc, valid-type]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**super().prepare_inputs_for_generation(*args, **kwargs), "output_attentions": False}

    model = with_random_weights(Own(_model().config).eval())
    source = _source(2, 12)
    assert torch.equal(tokens_of(forge.jit(model), source, 8, **_GREEDY), tokens_of(model, source, 8, **_GREEDY))
    assert ["its own prepare_inputs_for_generation" in each for each in left()] == [True]
