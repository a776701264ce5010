"""transformers' `generate` of a jitted model, by the loop of forge: the tokens of eager, and few programs."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, StoppingCriteria

import forge
from forge.capture.handles import handle_of
from forge.runtime import cuda_graphs, cuda_recorder, decoding_state
from forge.runtime.decoding_state import cache_places
from tests.capture.generations import check_streams, count_noted_calls, tokens_of, with_random_weights
from tests.executors.test_cuda_graphs import Double
from tests.markers import slow_except

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 1024, "head_dim": 8, "bos_token_id": None,
    "pad_token_id": 0, "eos_token_id": 9,
}  # fmt: skip
_OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {
        "sliding_window": 16, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": _OLD,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 16},
}  # fmt: skip
_GREEDY = {"do_sample": False}
_SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}


def _model(family: str = "llama", **others: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SIZES, **_FAMILIES.get(family, {}), **others})
    model = AutoModelForCausalLM.from_config(config).eval()
    return with_random_weights(model)


def _prompt(batch: int, length: int, padding: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.randint(10, 90, (batch, length))
    if not padding:
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("family", slow_except(_FAMILIES, "llama"))
def test_tokens_are_those_of_eager_by_a_few_programs(family: str, left: Any) -> None:
    model = _model(family)
    jitted = forge.jit(model)
    options = (_GREEDY, _SAMPLED, _GREEDY | {"cache_implementation": "static"}, _GREEDY | {"repetition_penalty": 1.3})
    for (length, padding, new), each in zip([(10, 3, 30), (21, 3, 14), (17, 2, 40), (10, 0, 25)], options, strict=True):
        prompt = _prompt(2, length, padding)
        assert torch.equal(tokens_of(jitted, prompt, new, **each), tokens_of(model, prompt, new, **each))
    history = handle_of(jitted, "test").history
    assert (
        history.graphs <= 4
    )  # for prompts: of one length, of any, without a mask if transformers drops it; for a token
    assert not history.graph_breaks
    assert not left()


@pytest.mark.slow
def test_text_longer_than_the_cache_goes_on_in_a_larger_one(grown: list[int]) -> None:
    model = _model(eos_token_id=None)
    jitted = forge.jit(model)
    prompt = _prompt(2, 20)
    actual, expected = (tokens_of(each, prompt, 400, **_GREEDY) for each in (jitted, model))
    assert torch.equal(actual, expected)
    assert grown == [384, 512]


def test_places_of_caches_are_few_and_enough() -> None:
    places = {cache_places(length) for length in range(1, 5000)}
    assert places == {256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144}
    assert all(length <= cache_places(length) <= max(256, 1.5 * length) for length in range(1, 5000))


@pytest.mark.parametrize("criterion", ["eos", "own"])
def test_sequences_end_where_those_of_eager_do(criterion: str) -> None:
    class EndsAfter(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return (input_ids[:, -1] % 7 == 3) & (input_ids.shape[1] > 14)

    model = _model(eos_token_id=[9, 11, 13, 15, 17, 19] if criterion == "eos" else None)
    jitted = forge.jit(model)
    options = {} if criterion == "eos" else {"stopping_criteria": [EndsAfter()]}
    lengths = set()
    for seed in range(4):
        torch.manual_seed(seed)
        prompt = _prompt(2, 12)
        actual, expected = (tokens_of(each, prompt, 60, **_SAMPLED, **options) for each in (jitted, model))
        assert torch.equal(actual, expected)
        lengths.add(expected.shape[1])
    assert min(lengths) < 72


def test_steps_run_the_program_alone_after_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = count_noted_calls(monkeypatch)
    model = _model(eos_token_id=None)
    prompt = _prompt(2, 8)
    jitted = forge.jit(model)
    for _ in range(2):
        assert torch.equal(tokens_of(jitted, prompt, 20, **_GREEDY), tokens_of(model, prompt, 20, **_GREEDY))
    assert looked_at == [1, 1] * 2


class _ReplacesWeight(StoppingCriteria):
    """A criterion that never stops, and that replaces the model's output weight once the text has 14 tokens."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        if input_ids.shape[1] == 14:
            self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().roll(1, 0))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_weights_that_the_callers_code_replaces_meanwhile_are_those_of_the_next_token() -> None:
    model = _model(eos_token_id=None)
    other = copy.deepcopy(model)
    prompt = _prompt(2, 8)
    actual = tokens_of(forge.jit(model), prompt, 16, stopping_criteria=[_ReplacesWeight(model)], **_GREEDY)
    plain = tokens_of(copy.deepcopy(other), prompt, 16, **_GREEDY)
    assert torch.equal(actual, tokens_of(other, prompt, 16, stopping_criteria=[_ReplacesWeight(other)], **_GREEDY))
    assert not torch.equal(actual, plain)


def test_streamer_gets_each_token_once() -> None:
    check_streams(_model(), _prompt(1, 12, padding=0), **_GREEDY)


@pytest.mark.slow
def test_several_texts_of_a_prompt_are_those_of_eager() -> None:
    model = _model()
    prompt = _prompt(2, 12)
    actual, expected = (
        tokens_of(each, prompt, 20, **_SAMPLED, num_return_sequences=3) for each in (forge.jit(model), model)
    )
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_callers_static_cache_holds_the_text() -> None:
    model = _model(eos_token_id=None)
    prompt = _prompt(1, 12, padding=0)
    caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    for each, cache in zip((model, forge.jit(model)), caches, strict=True):
        tokens_of(each, prompt, 20, **_GREEDY, past_key_values=cache)
    assert int(caches[1].get_seq_length()) == int(caches[0].get_seq_length()) == 31
    for actual, expected in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(actual.keys, expected.keys)


_RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def test_scores_and_the_cache_are_returned_as_by_eager(left: Any) -> None:
    model = _model(eos_token_id=None)
    prompt = _prompt(2, 12)
    actual, expected = (tokens_of(each, prompt, 20, **_SAMPLED, **_RETURNED) for each in (forge.jit(model), model))
    assert not left()
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close((actual.scores, actual.logits), (expected.scores, expected.logits))
    for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))


def test_prompts_may_be_embeddings(left: Any) -> None:
    """They have several lengths, with padding, alone or together with their tokens."""
    model = _model(eos_token_id=None)
    jitted, embed = forge.jit(model), model.get_input_embeddings()
    for length, padding, new in ((10, 3, 30), (21, 3, 14), (17, 2, 40)):
        prompt = _prompt(2, length, padding)
        embedded = {"inputs_embeds": embed(prompt["input_ids"]).detach(), "attention_mask": prompt["attention_mask"]}
        for given in (embedded, prompt | embedded):
            actual, expected = (tokens_of(each, given, new, **_GREEDY, **_RETURNED) for each in (jitted, model))
            assert torch.equal(actual.sequences, expected.sequences)
            for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
                torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
    assert handle_of(jitted, "test").history.graphs <= 4
    assert not left()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "attentions or hidden states are returned"),
        (
            {"return_dict_in_generate": True, "cache_implementation": "static"},
            "a cache that is static, or of windows or recurrences, is returned",
        ),
        pytest.param(
            {"past_key_values": DynamicCache()}, "the caller's cache is not a static one", marks=pytest.mark.slow
        ),
        ({"past_key_values": "short"}, "the caller's cache is not a static one"),
        pytest.param({"use_cache": False}, "there is no cache", marks=pytest.mark.slow),
        pytest.param({"prefill_chunk_size": 4}, "the prompt comes in chunks", marks=pytest.mark.slow),
        pytest.param({"prompt_lookup_num_tokens": 2}, None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(3)
def test_other_generations_are_left_to_transformers(options: dict[str, Any], reason: str | None, left: Any) -> None:
    model = _model(eos_token_id=None)
    prompt = _prompt(1, 12, padding=0)
    texts = []
    for each in (model, forge.jit(model)):
        own = copy.deepcopy(options)
        if own.get("past_key_values") == "short":
            own["past_key_values"] = StaticCache(config=model.config, max_cache_len=12)
            own["use_cache"] = True
            with pytest.raises(Exception, match="index"):
                tokens_of(each, prompt, 8, **_GREEDY, **own)
            continue
        text = tokens_of(each, prompt, 8, **_GREEDY, **own)
        texts.append(text if isinstance(text, torch.Tensor) else text.sequences)
    assert not texts or torch.equal(*texts)
    assert [each for each in left() if reason is None or reason not in each] == []
    assert bool(left()) is (reason is not None)


def test_generations_replay_the_graph_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_recorder, "_recorder", Double())
    monkeypatch.setattr(decoding_state, "_memory_for", lambda device: 2**20)  # as on a GPU
    model = _model(eos_token_id=None)
    jitted = forge.jit(model, cuda_graphs=True)

    def replayed() -> int:
        """Return the number of replayed runs of the last recording."""
        return max((each._runs for each in graphs), default=0)

    graphs: list[cuda_graphs.Graph] = []
    create = cuda_graphs.Graph.__init__
    monkeypatch.setattr(
        cuda_graphs.Graph, "__init__", lambda self, *a, **k: graphs.append(self) or create(self, *a, **k)
    )
    for number in range(4):
        prompt = _prompt(2, 12 + number)
        assert torch.equal(tokens_of(jitted, prompt, 30, **_GREEDY), tokens_of(model, prompt, 30, **_GREEDY))
        if number == 0:
            forge.finish_compiling(jitted)
        elif number == 1:
            recordings, before = sum(each.recordings for each in graphs), replayed()
    assert sum(each.recordings for each in graphs) == recordings
    assert replayed() == before + 2 * 29


@pytest.mark.slow
def test_generations_in_inference_mode_and_outside_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_state, "_memory_for", lambda device: 2**20)  # as on a GPU
    model = _model(eos_token_id=None)
    jitted = forge.jit(model)
    prompt = _prompt(2, 12)
    expected = tokens_of(model, prompt, 8, **_GREEDY)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(tokens_of(jitted, prompt, 8, **_GREEDY), expected)


@pytest.mark.slow
def test_numerics_of_eager_keep_the_growing_cache() -> None:
    model = _model()
    jitted = forge.jit(model, numerics="eager")
    assert "_sample" not in vars(type(jitted))
    prompt = _prompt(2, 12)
    assert torch.equal(tokens_of(jitted, prompt, 12, **_GREEDY), tokens_of(model, prompt, 12, **_GREEDY))
