"""Causal language models of the transformers library that keep a state: state spaces, linear recurrences, hybrids."""

from tests.models.zoo import HEADS, LAYERS, WIDTH, causal, model


@model
def mamba():
    return causal("Mamba", state_size=8, time_step_rank=4)


@model
def mamba2():
    return causal("Mamba2", state_size=8, num_heads=HEADS, head_dim=2 * WIDTH // HEADS, n_groups=2, chunk_size=4)


@model
def falcon_mamba():
    return causal("FalconMamba", state_size=8, time_step_rank=4, use_associative_scan=False)


@model
def rwkv():
    """The model loops over the tokens."""
    context = 16
    made, arguments = causal("Rwkv", context_length=context, attention_hidden_size=WIDTH)
    return made, {name: each[:, :context] for name, each in arguments.items()}


@model
def falcon_h1():
    """Attention and a state space run side by side in each layer."""
    return causal(
        "FalconH1",
        head_dim=8,
        mamba_d_ssm=WIDTH,
        mamba_n_heads=HEADS,
        mamba_d_head=WIDTH // HEADS,
        mamba_d_state=8,
        mamba_chunk_size=4,
    )


@model
def bamba():
    """A state space layer is followed by one of attention."""
    return causal(
        "Bamba",
        mamba_n_heads=HEADS,
        mamba_d_head=2 * WIDTH // HEADS,
        mamba_d_state=8,
        mamba_chunk_size=4,
        attn_layer_indices=[1],
    )


@model
def recurrent_gemma():
    return causal(
        "RecurrentGemma", lru_width=WIDTH, attention_window_size=6, block_types=["recurrent", "attention"], head_dim=8
    )


@model
def qwen3_next():
    """A gated delta rule is followed by attention."""
    return causal(
        "Qwen3Next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=list(range(LAYERS)),
    )
