"""Models of transformers that are asked for hidden states or attention weights are one program."""

from typing import Any

import pytest
import torch

import forge

transformers = pytest.importorskip("transformers", reason="the models are transformers'")
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}


def llama(**options: Any) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=50, **options)
    return transformers.LlamaForCausalLM(config).eval()


def assert_alike(ours: Any, theirs: Any, names: tuple[str, ...]) -> None:
    for name in names:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("asked", ["hidden_states", "attentions"])
def test_a_first_call_that_asks_for_more_results_is_one_graph(asked: str) -> None:
    model, ids = llama(attn_implementation="eager"), torch.randint(0, 50, (2, 7))
    jitted = forge.jit(model)
    results = [jitted(input_ids=ids, **{f"output_{asked}": True}) for _ in range(2)]
    for each in results:
        assert_alike(each, model(input_ids=ids, **{f"output_{asked}": True}), ("logits", asked))
    explanation = forge.explain(jitted)
    assert explanation.graphs == 1 and not explanation.graph_breaks


def test_a_later_call_that_asks_for_more_results_is_one_graph() -> None:
    model, ids = llama(), torch.randint(0, 50, (2, 7))
    jitted = forge.jit(model)
    assert_alike(jitted(input_ids=ids), model(input_ids=ids), ("logits",))
    asked = {"input_ids": ids, "output_hidden_states": True}
    assert_alike(jitted(**asked), model(**asked), ("logits", "hidden_states"))
    assert jitted(input_ids=ids).hidden_states is None
    assert not forge.explain(jitted).graph_breaks


def test_models_inside_of_a_model_install_their_own_hooks() -> None:
    text = {**SIZES, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": torch.tensor([[1, 5, 6, 2]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    jitted = forge.jit(model)
    ours, theirs = (each(**inputs, output_hidden_states=True) for each in (jitted, model))
    assert_alike(ours.vision_model_output, theirs.vision_model_output, ("hidden_states", "last_hidden_state"))
    assert_alike(ours.text_model_output, theirs.text_model_output, ("hidden_states", "last_hidden_state"))
    assert not forge.explain(jitted).graph_breaks
