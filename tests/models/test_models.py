"""Unmodified models run as in eager: outputs, every gradient, buffers; in one graph, without opaque calls."""

import copy
import os
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import forge
from tests.models.zoo import MODELS

os.environ["HF_HUB_OFFLINE"] = "1"

# An operator of the transformers library; a view that asks for strides, which a trace does not have.
OPAQUE = {
    "qwen3_moe": ["torch.ops.transformers.grouped_mm_fallback"],
    "phimoe": ["torch.ops.transformers.grouped_mm_fallback"],
    "led": ["torch.Tensor.as_strided"],
}
# Its encoder asks tensors which tokens attend globally: .item() ends a graph.
BREAKS = {"led"}
# Earlier releases of the library choose the layers to drop by a random number, which breaks the graph.
ONE_GRAPH = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def build(name: str, training: bool, device: str = "cpu") -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and its arguments, the same for one name each time."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    arguments = _pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, arguments)
    return model.train(training).to(device), arguments


@pytest.fixture(autouse=True)
def full_precision():
    """cuDNN's convolutions compute in TF32 by default, which differs between algorithms."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def outputs(result: Any) -> list[torch.Tensor]:
    """The tensors of a model's result, in order."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def loss_of(result: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of its first output."""
    own = getattr(result, "loss", None)
    return own if own is not None else outputs(result)[0].float().square().mean()


def difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    """The largest difference relative to the scale of eager's values."""
    scale = max(eager.double().abs().max().item(), 1e-3) if eager.numel() else 1.0
    return (ours.double() - eager.double()).abs().max().item() / scale if eager.numel() else 0.0


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_eager(name, device, training, meta_checked):
    model, arguments = build(name, training, device)
    eager = copy.deepcopy(model)
    jitted = forge.jit(model)
    torch.manual_seed(1)
    expected = eager(**arguments)
    torch.manual_seed(1)
    actual = jitted(**arguments)
    for ours, theirs in zip(outputs(actual), outputs(expected), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert difference(ours.detach(), theirs.detach()) < 1e-4
    loss_of(expected).backward()
    loss_of(actual).backward()
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if theirs.grad is not None:
            assert difference(ours.grad, theirs.grad) < 1e-3, key
    for (key, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, key=key: f"{key}: {text}")
    told = forge.explain(jitted)
    assert told.eager == []
    assert (told.graphs == 1) is (name not in BREAKS) or not ONE_GRAPH, told.graph_breaks
    assert sorted(set(told.opaque_calls)) == OPAQUE.get(name, [])
    assert meta_checked


@pytest.fixture
def meta_checked(monkeypatch):
    """Compares forge's metadata of every value with Dynamo's fake tensors while the test runs."""
    from forge.frontend import dynamo

    compared = []
    original = dynamo.compare_meta

    def compare(node, proxy, example):
        compared.append(node)
        original(node, proxy, example)

    monkeypatch.setattr(dynamo, "compare_meta", compare)
    monkeypatch.setattr(dynamo, "CHECK_META", True)
    return compared


def test_wav2vec2_breaks_the_graph_and_runs_right():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
    )
    model = Wav2Vec2ForCTC(config).train()
    eager = copy.deepcopy(model)
    audio, labels = torch.randn(2, 400), torch.randint(1, 16, (2, 5))
    jitted = forge.jit(model)
    actual, expected = jitted(audio, labels=labels), eager(audio, labels=labels)
    assert difference(actual.logits.detach(), expected.logits.detach()) < 1e-4
    actual.loss.backward()
    expected.loss.backward()
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            assert difference(ours.grad, theirs.grad) < 1e-3, key


@pytest.mark.parametrize("name", ["llama", "conv_net"])
def test_twenty_optimizer_steps_follow_eager(name):
    model, arguments = build(name, True)
    eager = copy.deepcopy(model)
    losses = []
    for run, owner in ((forge.jit(model), model), (eager, eager)):
        optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-3)
        history = []
        for _ in range(20):
            loss = loss_of(run(**arguments))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[1][-1] < losses[1][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


def test_generation_with_a_cache_equals_eager():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 96, (1, 5))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    jitted = forge.jit(copy.deepcopy(model))
    assert torch.equal(jitted.generate(ids, max_new_tokens=6, do_sample=False), expected)
