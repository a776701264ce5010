"""Causal language models of the transformers library, each tiny and from its config: dense, and mixtures of experts."""

from tests.models.zoo import HEADS, LAYERS, WIDTH, causal, model


@model
def gemma3():
    return causal("Gemma3Text", head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])


@model
def olmo2():
    return causal("Olmo2")


@model
def granite():
    return causal("Granite", residual_multiplier=0.5, logits_scaling=2.0)


@model
def cohere():
    return causal("Cohere", use_qk_norm=True)


@model
def stablelm():
    return causal("StableLm", use_parallel_residual=True, qk_layernorm=True)


@model
def starcoder2():
    return causal("Starcoder2")


@model
def nemotron():
    return causal("Nemotron", head_dim=8)


@model
def phi():
    return causal("Phi", qk_layernorm=True)


@model
def gptj():
    return causal("GPTJ", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, rotary_dim=4)


@model
def codegen():
    return causal("CodeGen", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, rotary_dim=4)


@model
def gpt_neo():
    return causal("GPTNeo", num_layers=2, num_heads=HEADS, attention_types=[[["global", "local"], 1]], window_size=4)


@model
def gpt_bigcode():
    return causal("GPTBigCode", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64)


@model
def xglm():
    return causal("XGLM", d_model=WIDTH, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=2 * WIDTH)


@model
def biogpt():
    return causal("BioGpt")


@model
def mixtral():
    return causal("Mixtral", num_local_experts=4, num_experts_per_tok=2)


@model
def olmoe():
    return causal("Olmoe", num_experts=4, num_experts_per_tok=2)


@model
def granitemoe():
    return causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2)


@model
def gpt_oss():
    return causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6)


@model
def deepseek_v3():
    """Keys and values come from one low-rank latent; a dense layer is followed by one of grouped experts and a shared
    one."""
    return causal(
        "DeepseekV3",
        num_key_value_heads=HEADS,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=WIDTH,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )
