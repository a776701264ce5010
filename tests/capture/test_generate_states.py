"""The decoding loop of forge with caches other than those of keys and values, and with prompts with images."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import forge
from forge.capture.handles import handle_of
from forge.runtime import cuda_recorder, decoding_state
from forge.torch_internals import generation
from tests.capture.generations import tokens_of, with_random_weights
from tests.executors.test_cuda_graphs import Double
from tests.markers import slow_except

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
_RECURRENT: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "lfm2": ({"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, ({}, {})),
    "falcon_h1": (  # keys and states of recurrences in one layer
        {
            "head_dim": 8,
            "num_hidden_layers": 1,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
        ({}, {}, {"num_beams": 2}),
    ),
    "mamba": ({"state_size": 4, "num_hidden_layers": 1}, ({}, {})),
}
_IMAGE = 90


@pytest.mark.parametrize("family", slow_except(_RECURRENT, "lfm2", "mamba"))
@pytest.mark.one_in(2)
def test_recurrences_go_on_from_the_prompt(
    family: str, left: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_recorder, "_recorder", Double())
    monkeypatch.setattr(decoding_state, "_memory_for", lambda device: 2**20)  # as on a GPU
    torch.manual_seed(0)
    sizes, generations = _RECURRENT[family]
    config = AutoConfig.for_model(family, **{**_TEXT, **sizes})
    model = with_random_weights(AutoModelForCausalLM.from_config(config).eval())
    jitted = forge.jit(model, cuda_graphs=True)
    prompt = {"input_ids": torch.randint(10, 90, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    prompt["attention_mask"][0, :2] = 0
    for options in generations:
        actual, expected = (tokens_of(each, prompt, 8, do_sample=False, **options) for each in (jitted, model))
        assert torch.equal(actual, expected)
    assert not handle_of(jitted, "test").history.graph_breaks
    assert not left()


@pytest.mark.slow
def test_prompt_alone_has_images(left: Callable[[], list[str]]) -> None:
    torch.manual_seed(0)
    vision = {**_TEXT, "image_size": 32, "patch_size": 16}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=_IMAGE,
        vision_feature_layer=-1,
    )
    model = with_random_weights(transformers.LlavaForConditionalGeneration(config).eval())
    jitted = forge.jit(model)
    ids = torch.randint(10, 80, (2, 9))
    ids[:, 1:5] = _IMAGE
    images = [torch.randn(2, 3, 32, 32) for _ in "ab"]
    texts = [tokens_of(jitted, {"input_ids": ids, "pixel_values": each}, 8, do_sample=False) for each in images]
    expected = [tokens_of(model, {"input_ids": ids, "pixel_values": each}, 8, do_sample=False) for each in images]
    assert not torch.equal(*expected)
    assert all(map(torch.equal, texts, expected))
    assert not left()


def test_inputs_of_the_next_token() -> None:
    positions = torch.arange(4).expand(3, 2, 4)  # of Qwen's images: time, height and width
    types = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    arguments = {"position_ids": positions, "token_type_ids": types, "mm_token_type_ids": types, "use_cache": True}
    inputs = generation.next_inputs(arguments, "position_ids")
    assert torch.equal(inputs["position_ids"], torch.full((3, 2, 1), 4))
    assert torch.equal(inputs["token_type_ids"], torch.ones(2, 1, dtype=torch.long))
    assert torch.equal(inputs["mm_token_type_ids"], torch.zeros(2, 1, dtype=torch.long))
    assert types.any()
    assert arguments == {"use_cache": True}


@pytest.mark.parametrize(
    ("model", "length", "method"),
    [
        (transformers.Phi3ForCausalLM, 16, None),
        (transformers.Phi3ForCausalLM, 17, "prepare_inputs_for_generation"),
        (transformers.NemotronHForCausalLM, 17, None),
        (transformers.PaliGemmaForConditionalGeneration, 16, "prepare_inputs_for_generation"),
        (transformers.XLNetLMHeadModel, 16, "prepare_inputs_for_generation"),
    ],
)
def test_preparations_that_the_loop_can_run(model: Any, length: int, method: str | None) -> None:
    config = transformers.Phi3Config(original_max_position_embeddings=16)
    mixin = generation.generation_mixin(model)
    assert generation.own_method(model, mixin, config, length, has_beams=False) == method
