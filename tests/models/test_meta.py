"""Models on the meta device, which stands in for a GPU: passes and choices of other devices than a CPU run, and each
pass is verified. Nothing is computed."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree

import forge
from forge.executors import inductorex
from tests.markers import slow_except
from tests.models.test_models import build, loss_of, outputs
from tests.models.zoo import MODELS

OTHERS = {
    "fnet": "torch's FFT has no bfloat16",
    "transformer_xl": "it makes values in float32",
    "diffusion_unet": "it makes values in float32",
    "led": "nonzero gives no shape without values",
    "hubert": "it reads the largest label",
    "wav2vec2": "it reads the largest label",
}
FAST = {"conv_net", "llama", "swin", "t5"}


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let regions be compiled for the meta device, and let the number 1 be read from it."""
    monkeypatch.setattr(inductorex, "_can_compile_for", lambda device: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_local_scalar_dense", lambda x: True if x.dtype == torch.bool else 1, "Meta")
    yield
    library._destroy()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", slow_except([name for name in MODELS if name not in OTHERS], *sorted(FAST)))
def test_a_model_compiles_on_the_meta_device(name: str, training: bool) -> None:
    torch._dynamo.reset()
    model, arguments = build(name, training)
    model = model.to("meta", torch.bfloat16)

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to("meta", torch.bfloat16 if leaf.is_floating_point() else None)

    arguments = _pytree.tree_map(on_meta, arguments)
    jitted = forge.jit(model, cache=False)
    with torch.set_grad_enabled(training):
        result = jitted(**arguments)
        expected = model(**arguments)
        assert [x.shape for x in outputs(result)] == [x.shape for x in outputs(expected)]
        if training:
            loss_of(result).backward()
            assert any(each.grad is not None for each in model.parameters())
