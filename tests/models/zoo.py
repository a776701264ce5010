"""Real models from the transformers library, each tiny and from its config, and a few written by hand."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 96, 32, 2, 4, 2, 10
if os.environ.get("FORGE_ZOO") == "wide":  # as tests/gpu has them
    VOCAB, WIDTH, HEADS, BATCH, LENGTH = 8192, 1024, 16, 4, 60

MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {}


def model(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    """Add a function that makes a model and the arguments of its call to the zoo."""
    MODELS[make.__name__] = make
    return make


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH))


def causal(kind: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a causal language model and its loss on random tokens."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        **without_dropout(kind),
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    ids = tokens()
    kind = kind.removesuffix("Text")
    of_kind = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    return of_kind(config), {"input_ids": ids, "labels": ids}


_DROPOUTS = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout attention_dropout_prob pooler_dropout "
    "dropout_rate layerdrop encoder_layerdrop decoder_layerdrop classifier_dropout_prob drop_path_rate "
    "feat_proj_dropout final_dropout hidden_dropout_rate seq_classif_dropout qa_dropout"
).split()


def without_dropout(kind: str) -> dict[str, float]:
    """Return every dropout option in the model's config, set to 0."""
    import transformers

    known = getattr(transformers, f"{kind}Config")().to_dict()
    return {name: 0.0 for name in _DROPOUTS if isinstance(known.get(name), (int, float))}


@model
def llama():
    return causal("Llama")


@model
def mistral():
    return causal("Mistral", sliding_window=6)


@model
def qwen2():
    return causal("Qwen2")


@model
def qwen3():
    return causal("Qwen3", head_dim=8)


@model
def qwen3_moe():
    return causal(
        "Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, decoder_sparse_step=1
    )


@model
def phimoe():
    """The router is an autograd Function whose backward writes in place."""
    return causal("Phimoe", num_local_experts=4, num_experts_per_tok=2)


@model
def gemma2():
    return causal("Gemma2", head_dim=8, sliding_window=6)


@model
def phi3():
    return causal("Phi3")


@model
def gpt2():
    model, arguments = causal("GPT2", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64)
    model.loss_type = "ForCausalLM"  # the library knows none for GPT2, and logs that from the forward: a graph break
    return model, arguments


@model
def gpt_neox():
    return causal("GPTNeoX")


@model
def opt():
    return causal("OPT", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH)


@model
def bloom():
    return causal("Bloom", n_layer=LAYERS, n_head=HEADS)


@model
def falcon():
    return causal("Falcon")


def encoder(kind: str, head: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return an encoder with a head on random tokens, one row of which is padded. A size of None is not in its
    config."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        **without_dropout(kind),
        **changes,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**given)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return getattr(transformers, f"{kind}{head}")(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


@model
def bert():
    return encoder("Bert", "ForMaskedLM")


@model
def roberta():
    return encoder("Roberta", "ForMaskedLM")


@model
def distilbert():
    return encoder("DistilBert", "ForMaskedLM", dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=LAYERS, n_heads=HEADS)


@model
def deberta_v2():
    return encoder(
        "DebertaV2",
        "ForMaskedLM",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )


ENCODER_DECODER = {
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
}


def sequence_to_sequence(
    kind: str, head: str = "ForConditionalGeneration", **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        d_model=WIDTH,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        use_cache=False,
        **without_dropout(kind),
        **changes,
    )
    ids = tokens()
    return getattr(transformers, f"{kind}{head}")(config), {"input_ids": ids, "labels": ids}


@model
def t5():
    return sequence_to_sequence("T5", d_kv=8, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS)


@model
def bart():
    return sequence_to_sequence(
        "Bart",
        **ENCODER_DECODER,
        max_position_embeddings=64,
    )


@model
def led():
    """The encoder attends within windows, whose number torch.div of a size computes."""
    return sequence_to_sequence(
        "LED",
        **ENCODER_DECODER,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=4,
    )


def vision(kind: str, head: str = "ForImageClassification", **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=3, **without_dropout(kind), **changes)
    pixels = torch.randn(BATCH, 3, 32, 32)
    return getattr(transformers, f"{kind}{head}")(config), {
        "pixel_values": pixels,
        "labels": torch.arange(BATCH) % 3,
    }


VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
}


@model
def vit():
    return vision("ViT", **VIT)


@model
def dinov2():
    return vision("Dinov2", **VIT)


@model
def convnext():
    return vision("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)


@model
def resnet():
    return vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")


@model
def clip():
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
    }
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 1},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    ids = tokens()
    ids[:, -1] = 2
    return CLIPModel(config), {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


@model
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        **ENCODER_DECODER,
        max_source_positions=16,
        max_target_positions=64,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        **without_dropout("Whisper"),
    )
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(BATCH, 8, 32), "labels": tokens()}


@model
def mlp():
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers, nn.LayerNorm(16), nn.Linear(16, 4)), {"input": torch.randn(8, 16)}


@model
def conv_net():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return net, {"input": torch.randn(4, 3, 16, 16)}


class UNet(nn.Module):
    """A network with two levels down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = block(3, 8), block(8, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up2 = block(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        up = self.up1(second)
        coarse = F.interpolate(second.mean(1, keepdim=True), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up2(torch.cat([first, up], 1))) + coarse


def block(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width_in, width_out, 3, padding=1), nn.GroupNorm(2, width_out), nn.ReLU())


@model
def unet():
    return UNet(), {"x": torch.randn(2, 3, 16, 16)}


class Attention(nn.Module):
    """A causal self-attention in plain torch, with a residual and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / (q.shape[-1] ** 0.5)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().logical_not()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


@model
def plain_attention():
    return Attention(), {"x": torch.randn(BATCH, LENGTH, WIDTH)}
