"""Unmodified models run as in eager: outputs, every gradient, buffers; in one graph, without opaque calls."""

import copy
import os
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree

import forge
from tests.markers import in_both_modes, slow_except
from tests.models import zoo
from tests.models.zoo import MODELS

os.environ["HF_HUB_OFFLINE"] = "1"

# Opaque functions that torchlang does not have, by model, exactly.
_GROUPED = ["torch.ops.transformers.grouped_mm_fallback"]  # an operator of the transformers library
OPAQUE = dict.fromkeys("qwen3_moe phimoe mixtral olmoe granitemoe gpt_oss deepseek_v3".split(), _GROUPED)
# Models with graph breaks: .item(), a branch on values, requires_grad set on a value. torch.compile makes as many.
BREAKS = {"led", "prophetnet", "wav2vec2", "hubert"}
BREAKS_IN_TRAINING = {"detr"}
# Earlier releases of the library choose the layers to drop by a random number, which breaks the graph.
ONE_GRAPH = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23)
# By default all models of zoo.py run and a sixth of the other files': every sixth, with small ones in place of large
# ones.
OTHERS = [name for name, make in MODELS.items() if make.__module__ != zoo.__name__]
LARGE = {"led", "hubert", "qwen3_next", "speecht5", "time_series_transformer", "mobilenet_v2", "swinv2", "mamba2"}
SMALL = {"graph_convolution", "graph_attention", "transformer_xl", "vae", "radiance_field", "yolos"}
EVALUATED = set("llama bart t5 vit resnet unet conv_net mlp falcon_h1".split())
SLOW = ({name for at, name in enumerate(OTHERS) if at % 6} | LARGE) - SMALL
GENERATES = (
    "llama starcoder2 mamba2 granite deepseek_v3 marian gemma3 olmo2 cohere gptj gpt_neo xglm mixtral falcon_h1 "
    "qwen3_next t5 pegasus m2m100 speech_to_text whisper git"
).split()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def build(name: str, training: bool, device: str = "cpu") -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a model and its arguments, the same every time for a name."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    arguments = _pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, arguments)
    return model.train(training).to(device), arguments


@pytest.fixture(autouse=True)
def full_precision():
    """Disable TF32 in cuDNN's convolutions, which differs between algorithms."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """Reset Dynamo: models with graph breaks share functions of the library, and Dynamo's limit of recompilations of
    each."""
    torch._dynamo.reset()


def outputs(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's result, in order."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    return [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def loss_of(result: Any) -> torch.Tensor:
    """Return the model's own loss, or the mean square of the first output that has a gradient."""
    own = getattr(result, "loss", None)
    if own is not None:
        return own
    return next(each for each in outputs(result) if each.requires_grad).float().square().mean()


def difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    """Return the largest difference relative to the scale of eager's values."""
    scale = max(eager.double().abs().max().item(), 1e-3) if eager.numel() else 1.0
    return (ours.double() - eager.double()).abs().max().item() / scale if eager.numel() else 0.0


def as_double(arguments: Any) -> Any:
    """Return a model's arguments with each float in float64."""
    double = lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
    return _pytree.tree_map(double, arguments)


def exact_gradients(name: str, training: bool, device: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a model in float64, from eager."""
    model, arguments = build(name, training, device)
    torch.manual_seed(1)
    loss_of(model.double()(**as_double(arguments))).backward()
    return {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


def graphs_of_torch(name: str, training: bool, device: str) -> int:
    """Return the number of graphs that torch.compile makes of a model's call."""
    torch._dynamo.reset()
    model, arguments = build(name, training, device)
    counter = CompileCounter()
    torch.compile(model, backend=counter)(**arguments)
    return counter.frame_count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "training"), in_both_modes(MODELS, MODELS.keys() - SLOW, EVALUATED))
@pytest.mark.one_in(3)
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
    parameters = zip(model.named_parameters(), eager.parameters(), strict=True)
    found = {key: (ours.grad, theirs.grad) for (key, ours), theirs in parameters}
    assert [key for key, (ours, theirs) in found.items() if (ours is None) != (theirs is None)] == []
    found = {key: both for key, both in found.items() if both[1] is not None}
    apart = [key for key, (ours, theirs) in found.items() if difference(ours, theirs) >= 1e-3]
    exact = exact_gradients(name, training, device) if apart else {}
    for key in apart:  # gradients that almost cancel
        ours, theirs = (difference(each, exact[key]) for each in found[key])
        assert ours <= 2 * theirs, key
    for (key, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, key=key: f"{key}: {text}")
    told = forge.explain(jitted)
    assert told.eager == []
    breaks = name in (BREAKS | BREAKS_IN_TRAINING if training else BREAKS)
    assert (told.graphs > 1) is breaks or not ONE_GRAPH, told.graph_breaks
    if told.graphs > 1:
        assert told.graphs <= graphs_of_torch(name, training, device)
    assert sorted(set(told.opaque_calls)) == OPAQUE.get(name, [])
    assert meta_checked


@pytest.fixture
def meta_checked(monkeypatch):
    """Compare forge's metadata of every value with Dynamo's fake tensors while the test runs."""
    from forge.capture import fake_values

    compared = []
    original = fake_values.compare_meta

    def compare(node, proxy, example):
        compared.append(node)
        original(node, proxy, example)

    monkeypatch.setattr(fake_values, "compare_meta", compare)
    monkeypatch.setattr(fake_values, "CHECK_META", True)
    return compared


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


@pytest.mark.parametrize("name", slow_except(GENERATES, *GENERATES[:2]))
def test_generation_with_a_cache_equals_eager(name):
    model, arguments = build(name, False)
    arguments.pop("labels")
    arguments.update(max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True)
    expected = copy.deepcopy(model).generate(**arguments)
    jitted = forge.jit(model)
    assert torch.equal(jitted.generate(**arguments), expected)
    assert forge.explain(jitted).graphs


def test_experts_in_bfloat16_are_grouped_products():
    """Under Dynamo, the transformers library calls torch's own function for this dtype only."""
    model, arguments = build("qwen3_moe", True)
    model.model.layers = model.model.layers[:1]
    eager = copy.deepcopy(model.to(torch.bfloat16))
    jitted = forge.jit(model)
    expected, actual = eager(**arguments), jitted(**arguments)
    assert difference(actual.logits.detach(), expected.logits.detach()) < 2e-2
    expected.loss.backward()
    actual.loss.backward()
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert difference(ours.grad, theirs.grad) < 4e-2, key
    told = forge.explain(jitted)
    assert (told.graphs, told.opaque_calls) == (1, [])
    assert "grouped_mm" in str(forge.last_traces(jitted)[0])
