"""The modes of torch.compile as presets of forge's options, in forge.jit, torch.compile and transformers."""

import copy

import pytest
import torch
from torch import nn
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import forge
from forge.api.options import MODES, resolve_options
from forge.capture.handles import handle_of

SET = {
    None: ("auto", "order"),
    "default": ("auto", "order"),
    "reduce-overhead": (True, "order"),
    "max-autotune": (True, "measured"),
    "max-autotune-no-cudagraphs": (False, "measured"),
}


def test_the_modes_are_those_of_torch() -> None:
    assert set(MODES) - {None} == {"default", *torch._inductor.list_mode_options()} - {"lite"}  # of debugging


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sets_what_is_left_at_its_default(mode: str | None) -> None:
    config = resolve_options(mode=mode)
    assert (config.cuda_graphs, config.select) == SET[mode]
    config = resolve_options(mode=mode, cuda_graphs=False, select="measured")
    assert (config.cuda_graphs, config.select) == (False, "measured")


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match=r"forge.jit: mode is 'fast', but must be one of .*reduce-overhead"):
        forge.jit(torch.sin, mode="fast")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_torch_compile_passes_its_mode_on(mode: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled = torch.compile(module, backend="forge", mode=mode)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), module(x))
    assert handle_of(forge.jit(module, mode=mode)) is not None


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=None, eos_token_id=None)).eval()


def config_for_cpus(**options: str) -> CompileConfig:
    """Return a config with which `generate` compiles on a CPU, too."""
    config = CompileConfig(**options)
    config._compile_all_devices = True
    return config


def test_generate_takes_forge_as_the_backend() -> None:
    model, prompt = llama(), torch.randint(64, (2, 6))
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(prompt, **options, disable_compile=True)
    config, before = config_for_cpus(backend="forge", mode="reduce-overhead"), forge.explain().graphs
    assert torch.equal(model.generate(prompt, **options, compile_config=config), expected)
    assert forge.explain().graphs == before + 1


def test_generate_leaves_a_jitted_model_to_forge() -> None:
    """By default it makes torch.compile compile the model; a jitted module is an ordinary one in that program."""
    model, prompt = llama(), torch.randint(64, (2, 6))
    jitted = forge.jit(copy.deepcopy(model))
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(prompt, **options, disable_compile=True)
    assert torch.equal(jitted.generate(prompt, **options, compile_config=config_for_cpus()), expected)
    assert forge.explain(jitted).graphs == 2
