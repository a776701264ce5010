"""transformers' beam search of a jitted model, with the steps of forge's loop: eager's tokens, few programs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import forge
from forge.capture.handles import handle_of
from tests.capture.generations import count_noted_calls, tokens_of, with_random_weights
from tests.markers import slow_except

_COMMON = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 9}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": 8, "bos_token_id": None,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_GREEDY = {"do_sample": False, "num_beams": 3}
_SAMPLED = {"do_sample": True, "num_beams": 2, "top_k": 20}


def _model(family: str = "llama", **others: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_COMMON, **(_LLAMA if family == "llama" else _T5))
    for name, value in others.items():
        setattr(config, name, value)
    auto = AutoModelForCausalLM if family == "llama" else AutoModelForSeq2SeqLM
    return with_random_weights(auto.from_config(config).eval())


def _prompt(model: Any, batch: int, length: int, padding: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.randint(10, 90, (batch, length))
    if not padding:
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[0, slice(-padding, None) if model.config.is_encoder_decoder else slice(padding)] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("family", slow_except(["llama", "t5"], "llama"))
def test_tokens_are_those_of_eager_by_a_few_programs(family: str, left: Callable[[], list[str]]) -> None:
    model = _model(family)
    jitted = forge.jit(model)
    several = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True}
    cases = [
        (2, 10, 3, 40, _GREEDY),
        (2, 21, 4, 44, _SAMPLED),
        (2, 17, 3, 40, _GREEDY | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
        (2, 17, 3, 40, _GREEDY | {"cache_implementation": "static"}),
        (1, 12, 0, 40, {"do_sample": False} | several),
    ]
    for batch, length, padding, new, options in cases:
        prompt = _prompt(model, batch, length, padding)
        expected = tokens_of(model, prompt, new, **options)
        assert torch.equal(tokens_of(jitted, prompt, new, **options), expected)
    assert handle_of(jitted, "test").history.graphs <= 8
    assert not handle_of(jitted, "test").history.graph_breaks
    assert not left()


@pytest.mark.slow
def test_scores_and_the_cache_are_returned_as_by_eager(left: Callable[[], list[str]]) -> None:
    model = _model(eos_token_id=None)
    prompt = _prompt(model, 2, 12)
    options = _GREEDY | {"return_dict_in_generate": True, "output_scores": True}
    actual, expected = (tokens_of(each, prompt, 20, **options) for each in (forge.jit(model), model))
    assert not left()
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.beam_indices, expected.beam_indices)
    torch.testing.assert_close((actual.sequences_scores, actual.scores), (expected.sequences_scores, expected.scores))
    for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))


def test_beams_change_places() -> None:
    """Without this, the tests here would pass with a cache whose rows are not permuted."""
    model = _model(eos_token_id=None)
    orders = []
    reorder = type(model)._beam_search.__globals__["DynamicCache"].reorder_cache
    prompt = _prompt(model, 2, 10)

    class Watched(type(model)):  # type: ignore[misc]
        def _reorder_cache(self, cache: Any, rows: torch.Tensor) -> Any:
            orders.append(rows.tolist())
            reorder(cache, rows)
            return cache

    watched = Watched(model.config).eval()
    watched.load_state_dict(model.state_dict())
    tokens_of(watched, prompt, 20, **_GREEDY)
    assert any(each != sorted(set(each)) for each in orders[1:])


@pytest.mark.slow
def test_text_longer_than_the_cache_goes_on_in_a_larger_one(grown: list[int]) -> None:
    model = _model(eos_token_id=None)
    prompt = _prompt(model, 1, 20)
    actual, expected = (tokens_of(each, prompt, 400, **_SAMPLED) for each in (forge.jit(model), model))
    assert torch.equal(actual, expected)
    assert grown == [384, 512]


def test_steps_run_the_program_alone_after_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = count_noted_calls(monkeypatch)
    model = _model(eos_token_id=None)
    jitted = forge.jit(model)
    prompt = _prompt(model, 2, 8)
    for _ in range(2):
        assert torch.equal(tokens_of(jitted, prompt, 20, **_GREEDY), tokens_of(model, prompt, 20, **_GREEDY))
    assert looked_at == [1, 1] * 2


@pytest.mark.slow
def test_model_that_reorders_its_cache_is_left_to_transformers(left: Callable[[], list[str]]) -> None:
    class Own(type(_model())):  # type: ignore[misc]
        def _reorder_cache(self, cache: Any, rows: torch.Tensor) -> Any:
            cache.reorder_cache(rows)
            return cache

    model = with_random_weights(Own(_model().config).eval())
    prompt = _prompt(model, 2, 12)
    assert torch.equal(tokens_of(forge.jit(model), prompt, 8, **_GREEDY), tokens_of(model, prompt, 8, **_GREEDY))
    assert ["its own _reorder_cache" in each for each in left()] == [True]
