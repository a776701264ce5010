"""Tiny models of the transformers library with their tensor parallel plans, in eager and jitted."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_programs import whole
from torch.distributed.tensor import DTensor

import forge

# families whose plan their tiny model has, by transformers' names
FAMILIES = (
    "afmoe apertus arcee aria_text axk1 axk2 beam cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v32 "
    "deepseek_v4 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text "
    "gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox granite "
    "granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 "
    "hy_v4 hyperclovax inkling2_text internlm3 iquestcoder jais2 jamba kolibri1 laguna llama mellum mimo_v2_flash "
    "minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron "
    "nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 vaultgemma youtu "
).split()

# of those that a config has
_SIZES = {
    "altup_num_inputs": 2,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "dense_intermediate_size": 64,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "first_k_dense_replace": 1,
    "global_head_dim": 8,
    "head_dim": 8,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "kv_lora_rank": 16,
    "laurel_rank": 8,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "max_position_embeddings": 64,
    "mlp_hidden_size": 64,
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "n_positions": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "num_layers": 2,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "sliding_window": 6,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "topk_group": 1,
    "use_cache": False,
    "v_head_dim": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
}
_NONE = ("q_lora_rank", "sliding_window")  # if the config has none, neither has the tiny one


def _config(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make = CONFIG_MAPPING[family]
    known = make().to_dict()
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    sizes = {name: size for name, size in sizes.items() if name not in _NONE or known[name] is not None}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, value in known.items():
        if "dropout" in name and type(value) in (int, float):
            sizes[name] = 0.0
        if name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            sizes[name] = (list(dict.fromkeys(value)) * 2)[:2]
    return make(**sizes)


def planned(rank: int, family: str, folder: str, executors: list[str] | None = None) -> dict[str, Any]:
    """Return the loss and gradients of a model of transformers with its own plan, in eager and jitted."""
    import transformers  # other programs do without

    if rank == 0:
        transformers.AutoModelForCausalLM.from_config(_config(family)).save_pretrained(folder)
    torch.distributed.barrier()
    words = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))

    def results(prepare: Callable) -> tuple[list[torch.Tensor], Callable]:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
                patch.setenv(name, str(value))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        called = prepare(model)
        loss = called(input_ids=words, labels=words).loss
        loss.backward()
        assert any(isinstance(each, DTensor) for each in model.parameters())
        return [loss.detach(), *[whole(each.grad) for each in model.parameters() if each.grad is not None]], called

    ours, jitted = results(lambda model: forge.jit(model, executors=executors))
    told = forge.explain(jitted)
    return {
        "eager": results(lambda model: model)[0],
        "forge": ours,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }
