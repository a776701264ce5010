"""A language model with quantized weights: its logits, and what it generates."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge.capture.handles import handle_of
from forge.quantize import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly, Quantization

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
TRANSFORMS = pytest.mark.parametrize(
    "transform", [Int8WeightOnly(), Int4WeightOnly(32), Float8WeightOnly()], ids=["int8", "int4", "fp8"]
)


def models(transform: Quantization) -> tuple[LlamaForCausalLM, LlamaForCausalLM, LlamaForCausalLM]:
    """The jitted model, one in eager with the values of its weights, and the original."""
    torch.manual_seed(0)
    original = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    jitted = forge.jit(original, transforms=[transform], cache=False)
    eager = copy.deepcopy(original)
    eager.lm_head.weight = torch.nn.Parameter(eager.lm_head.weight.detach().clone())
    eager.load_state_dict(forge.original_state_dict(jitted))
    return jitted, eager, original


@TRANSFORMS
@pytest.mark.usefixtures("compiled_regions")
def test_logits_differ_by_what_quantization_changes(transform: Quantization) -> None:
    jitted, eager, original = models(transform)
    for length in (12, 1, 3):
        with torch.no_grad():
            actual, dequantized, exact = (each(PROMPT[:, :length]).logits for each in (jitted, eager, original))
        torch.testing.assert_close(actual, dequantized)
        assert (actual - exact).abs().max() > 10 * (actual - dequantized).abs().max()
    explained = forge.explain(jitted)
    assert not (explained.opaque_calls or explained.graph_breaks or handle_of(jitted).eager)


@TRANSFORMS
def test_generate_gives_the_tokens_of_the_dequantized_weights(transform: Quantization) -> None:
    jitted, eager, _ = models(transform)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "attention_mask": torch.ones_like(PROMPT),
        "pad_token_id": 0,
    }
    expected = eager.generate(PROMPT, disable_compile=True, **options)
    assert torch.equal(jitted.generate(PROMPT, **options), expected)
