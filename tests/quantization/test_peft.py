"""Models with LoRA adapters of peft: compiled whole, switched without recompilation, trained on quantized weights."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge.capture.handles import handle_of
from forge.quantize import Int4WeightOnly, Int8WeightOnly, Quantization
from forge.runtime.quantized_linear import QuantizedLinear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed")

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(18).view(2, 9)


def adapter() -> "peft.LoraConfig":
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_alpha=8, init_lora_weights=False)


def model() -> nn.Module:
    """Return a Llama with two adapters."""
    torch.manual_seed(0)
    found = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), adapter())
    found.add_adapter("second", adapter())
    found.set_adapter("default")  # as later: the first state of a layer shares objects that Dynamo guards
    return found.eval()


def compare(jitted: nn.Module, eager: nn.Module) -> int:
    """Compare with eager, and return the number of graphs that were compiled so far."""
    with torch.no_grad():
        assert_close(jitted(TOKENS).logits, eager(TOKENS).logits, rtol=1e-4, atol=1e-5)
    history, explained = handle_of(jitted).history, forge.explain(jitted)
    assert not (explained.opaque_calls or explained.graph_breaks or handle_of(jitted).eager)
    return history.graphs


def test_an_adapter_that_comes_back_is_not_compiled_again() -> None:
    eager = model()
    jitted = forge.jit(eager, fullgraph=True)
    graphs = []
    for name in ("default", "second", "default", "second"):
        jitted.set_adapter(name)
        graphs.append(compare(jitted, eager))
    assert graphs == [1, 2, 2, 2]
    for _ in range(2):
        with jitted.disable_adapter():
            graphs.append(compare(jitted, eager))
        graphs.append(compare(jitted, eager))
    assert graphs[4:] == [3, 3, 3, 3]
    for _ in range(2):
        jitted.merge_adapter()
        graphs.append(compare(jitted, eager))
        jitted.unmerge_adapter()
        graphs.append(compare(jitted, eager))
    assert graphs[8:] == [4, 4, 4, 4]


def test_an_adapter_of_several_is_added() -> None:
    eager = model()
    jitted = forge.jit(eager, fullgraph=True)
    compare(jitted, eager)
    jitted.add_weighted_adapter(["default", "second"], [0.3, 0.7], "mixed", combination_type="linear")
    graphs = []
    for name in ("mixed", "default", "mixed", "default"):
        jitted.set_adapter(name)
        graphs.append(compare(jitted, eager))
    assert graphs == [2, 3, 3, 3]


def test_new_weights_of_an_adapter_are_no_other_program() -> None:
    eager = model()
    jitted = forge.jit(eager, fullgraph=True)
    compare(jitted, eager)
    with torch.no_grad():
        for name, each in jitted.named_parameters():
            if "lora_" in name:
                each.mul_(0.5)
    assert compare(jitted, eager) == 1


@pytest.mark.parametrize("transform", [None, Int8WeightOnly(), Int4WeightOnly(16)], ids=["plain", "int8", "int4"])
def test_adapters_are_trained(transform: Quantization | None) -> None:
    jitted = forge.jit(model(), transforms=[] if transform is None else [transform], fullgraph=True)
    eager = copy.deepcopy(jitted._forge_module)
    if transform is not None:
        layer = jitted.base_model.model.model.layers[0].self_attn
        assert isinstance(layer.q_proj.base_layer, QuantizedLinear)
        assert type(layer.q_proj.lora_A["default"]) is nn.Linear
    for each in (jitted, eager):
        optimizer = torch.optim.SGD([x for x in each.parameters() if x.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
    trained = dict(eager.named_parameters())
    for name, each in jitted.named_parameters():
        if each.requires_grad:
            assert_close(each.grad, trained[name].grad, rtol=1e-3, atol=1e-5)
        else:
            assert each.grad is None
