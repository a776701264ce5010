"""A language model with quantized weights: its logits, and its generated text."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge.capture.handles import handle_of
from forge.quantize import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly, Quantization
from tests.markers import slow_except

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT = torch.arange(3, 15)[None]
TRANSFORMS: dict[str, Quantization] = {"int8": Int8WeightOnly(), "int4": Int4WeightOnly(32), "fp8": Float8WeightOnly()}


def models(name: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM, LlamaForCausalLM]:
    """Return the jitted model, an eager one with the values of its weights, and the original."""
    torch.manual_seed(0)
    original = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    jitted = forge.jit(original, transforms=[TRANSFORMS[name]], cache=False)
    eager = copy.deepcopy(original)
    eager.lm_head.weight = torch.nn.Parameter(eager.lm_head.weight.detach().clone())
    eager.load_state_dict(forge.original_state_dict(jitted))
    return jitted, eager, original


@pytest.mark.parametrize("name", slow_except(TRANSFORMS, "int4"))
@pytest.mark.usefixtures("compiled_regions")
def test_logits_differ_by_what_quantization_changes(name: str) -> None:
    jitted, eager, original = models(name)
    for length in (12, 1, 3):
        with torch.no_grad():
            actual, dequantized, exact = (each(PROMPT[:, :length]).logits for each in (jitted, eager, original))
        torch.testing.assert_close(actual, dequantized)
        assert (actual - exact).abs().max() > 10 * (actual - dequantized).abs().max()
    explained = forge.explain(jitted)
    assert not (explained.opaque_calls or explained.graph_breaks or handle_of(jitted).eager)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.one_in(3)
def test_generate_gives_the_tokens_of_the_dequantized_weights(name: str) -> None:
    jitted, eager, _ = models(name)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "attention_mask": torch.ones_like(PROMPT),
        "pad_token_id": 0,
    }
    expected = eager.generate(PROMPT, disable_compile=True, **options)
    assert torch.equal(jitted.generate(PROMPT, **options), expected)
