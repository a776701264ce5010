"""The text models of the transformers library, each tiny and from its config, and a count of their modules' operations.

The count is taken in eager, from the models' own modules and functions, independently of forge's matcher.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.models.zoo import HEADS, LAYERS, WIDTH, causal, sequence_to_sequence

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_MOE,
}
_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "rotary_dim": 4}
_T5 = {"d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}

CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": WIDTH, **_MOE},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, **_MOE},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},
    "Phi": {},
    "Phi3": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 6},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {},
    "GPTJ": _GPT,
    "CodeGen": _GPT,
    "OPT": {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH},
    "Bloom": {"n_layer": LAYERS, "n_head": HEADS},
    "Falcon": {},
    "StableLm": {},
    "Cohere": {},
    "Cohere2": {"sliding_window": 6},
    "Granite": {},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Starcoder2": {},
    "Helium": {"head_dim": 8},
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "SmolLM3": {},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Nemotron": {},
    "Persimmon": {},
    "Ernie4_5": {"head_dim": 8},
    "Exaone4": {"sliding_window": 6},
    "SeedOss": {"head_dim": 8, "residual_dropout": 0.0},
    "Arcee": {},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 2 * WIDTH},
    "DiffLlama": {},
    "HunYuanDenseV1": {"head_dim": 8},
}
SEQUENCE: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5", _T5),
    "T5Gated": ("T5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "MT5": ("MT5", _T5),
}
NAMES = (*CAUSAL, *SEQUENCE)


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, ready to train, and the arguments of its call: the same every time for a name."""
    torch.manual_seed(0)
    if name in SEQUENCE:
        kind, changes = SEQUENCE[name]
        model, arguments = sequence_to_sequence(kind, **changes)
    else:
        model, arguments = causal(name, **CAUSAL[name])
    _scatter_weights(model)
    return model.to(dtype).train(), arguments


def _scatter_weights(model: nn.Module) -> None:
    """Scatter the weights of norms, which are initially ones or zeros, with which a wrong match could be correct."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter]:
    """Count, while the model runs in eager, its norms, its rotated tensors, its gated units and its loss."""
    counts: Counter = Counter()
    handles = []
    for module in model.modules():
        kind = _kind(module)
        if kind:
            handles.append(module.register_forward_hook(lambda *_, kind=kind: counts.update([kind])))
    undo = [
        _wrapped(module, name, counts)
        for module in {sys.modules[type(each).__module__] for each in model.modules()}
        for name, value in list(vars(module).items())
        if inspect.isfunction(value) and "apply_rotary" in name
    ]
    if model.loss_function is ForCausalLMLoss and not model.config.is_encoder_decoder:
        counts["loss"] = 1
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
        for restore in undo:
            restore()


def _kind(module: nn.Module) -> str | None:
    """Return the kind of a module of transformers, from its name and its submodules; torch's own norms are single
    calls."""
    cls = type(module)
    if not cls.__module__.startswith("transformers."):
        return None
    if "Norm" in cls.__name__ and not isinstance(module, nn.LayerNorm):
        return None if "layer_norm(" in inspect.getsource(cls.forward) else "norm"
    pairs = (("gate_proj", "up_proj"), ("gate_up_proj",), ("wi_0", "wi_1"), ("w1", "w3"))
    return "glu" if any(all(hasattr(module, part) for part in pair) for pair in pairs) else None


def _wrapped(module: Any, name: str, counts: Counter) -> Callable[[], None]:
    """Make a rotary function count the tensors that it rotates; return a function that undoes that.

    Nested rotary calls are not counted again.
    """
    original = getattr(module, name)
    inside = _Depth

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        inside.depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            inside.depth -= 1
        if not inside.depth:
            counts["rotary"] += len(result) if isinstance(result, tuple) else 1
        return result

    setattr(module, name, wrapper)
    return lambda: setattr(module, name, original)


class _Depth:
    depth = 0
