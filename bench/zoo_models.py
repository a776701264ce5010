"""The models of `bench.zoo`, with random weights: all families, at realistic sizes and, as "small", at sizes for two
CPU cores.

A model is a function of `real` that returns a module and the arguments of its call, labels included, so that the module
returns its loss.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Arguments = dict[str, Any]
MODELS: dict[str, Callable[[bool], tuple[nn.Module, Arguments]]] = {}

_DROPOUTS = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout dropout_rate drop_path_rate "
    "embedding_dropout mlp_dropout encoder_layerdrop decoder_layerdrop"
).split()


def _model(name: str) -> Callable[[Callable], Callable]:
    def register(make: Callable) -> Callable:
        MODELS[name] = make
        return make

    return register


def config_of(kind: str, **sizes: Any) -> Any:
    """Return a config without dropout; a size that is None keeps its default."""
    of_kind = getattr(transformers, f"{kind}Config")
    defaults = of_kind().to_dict()
    dropouts = {name: 0.0 for name in _DROPOUTS if isinstance(defaults.get(name), (int, float))}
    return of_kind(**dropouts, **{name: size for name, size in sizes.items() if size is not None})


def ids_of(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def causal(
    real: bool,
    kind: str,
    batch: int,
    length: int,
    vocabulary: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    inner: int | None = None,
    **changes: Any,
) -> tuple[nn.Module, Arguments]:
    """Return a decoder with its loss on random tokens; at "small", with three layers of a quarter of the heads."""
    if not real:
        head = width // heads
        heads, kv_heads = max(2, heads // 4), kv_heads and max(1, kv_heads // 4)
        width, inner = head * heads, inner and inner // 4
        batch, length, vocabulary, layers = 2, 128, min(8192, vocabulary), min(3, layers)
    config = config_of(
        kind,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=2 * length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **changes,
    )
    kind = kind.removesuffix("Text")
    of_kind = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    model = of_kind(config)
    model.loss_type = "ForCausalLM"
    ids = ids_of(vocabulary, batch, length)
    return model, {"input_ids": ids, "labels": ids}


# decoders


@_model("Qwen3")
def qwen3(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "Qwen3", 4, 1024, 151_936, 1024, 12, 16, 8, 3072, head_dim=64)


@_model("Llama-3.2-1B")
def llama(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "Llama", 2, 2048, 128_256, 2048, 16, 32, 8, 8192)


@_model("Mistral, sliding window")
def mistral(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "Mistral", 2, 2048, 32_000, 1024, 12, 16, 4, 3584, sliding_window=512 if real else 32)


@_model("Gemma2, soft caps")
def gemma2(real: bool) -> tuple[nn.Module, Arguments]:
    window = 512 if real else 32
    return causal(real, "Gemma2", 2, 1024, 32_000, 1024, 12, 8, 4, 4096, head_dim=128, sliding_window=window)


@_model("Gemma3-270M")
def gemma3(real: bool) -> tuple[nn.Module, Arguments]:
    window = 512 if real else 32
    return causal(real, "Gemma3Text", 4, 1024, 262_144, 640, 18, 4, 1, 2048, head_dim=256 if real else 64,
                   sliding_window=window)  # fmt: skip


@_model("GPT-2")
def gpt2(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "GPT2", 8, 1024, 50_257, 768, 12, 12)


@_model("Falcon, MQA")
def falcon(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "Falcon", 4, 1024, 65_024, 1024, 12, 16, ffn_hidden_size=4096 if real else 1024)


@_model("Bloom, ALiBi")
def bloom(real: bool) -> tuple[nn.Module, Arguments]:
    return causal(real, "Bloom", 4, 1024, 50_000, 1024, 12, 16)


@_model("Qwen3-MoE")
def qwen3_moe(real: bool) -> tuple[nn.Module, Arguments]:
    experts = {
        "num_experts": 16 if real else 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024 if real else 64,
    }
    return causal(real, "Qwen3Moe", 4, 512, 32_000, 1024, 8, 16, 4, 2048, head_dim=64, **experts)


@_model("Mamba2")
def mamba2(real: bool) -> tuple[nn.Module, Arguments]:
    heads = {"num_heads": 24, "head_dim": 64} if real else {"num_heads": 6, "head_dim": 64}
    model, arguments = causal(real, "Mamba2", 4, 1024, 32_000, 768, 8, 12, state_size=64, n_groups=1, chunk_size=128,
                               **heads)  # fmt: skip
    return model, arguments


# encoders


def encoder(
    real: bool, kind: str, head: str, batch: int, length: int, vocabulary: int, layers: int = 12, **changes: Any
) -> tuple[nn.Module, Arguments]:
    sizes: dict[str, Any] = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    if not real:
        sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        batch, length, vocabulary, layers = 4, 128, min(8192, vocabulary), 3
    sizes |= {"vocab_size": vocabulary, "num_hidden_layers": layers, "max_position_embeddings": length + 2}
    config = config_of(kind, **sizes, pad_token_id=1, **changes)
    ids = ids_of(vocabulary, batch, length)
    mask = torch.ones_like(ids)
    mask[0, -length // 4 :] = 0
    labels = ids if head == "ForMaskedLM" else torch.zeros(batch, dtype=torch.long)
    return getattr(transformers, f"{kind}{head}")(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


@_model("BERT-base, classifier")
def bert(real: bool) -> tuple[nn.Module, Arguments]:
    return encoder(real, "Bert", "ForSequenceClassification", 32, 128, 30_522)


@_model("RoBERTa-base, masked words")
def roberta(real: bool) -> tuple[nn.Module, Arguments]:
    return encoder(real, "Roberta", "ForMaskedLM", 16, 512, 50_265)


@_model("DeBERTa-v3-base")
def deberta(real: bool) -> tuple[nn.Module, Arguments]:
    changes = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
               "norm_rel_ebd": "layer_norm", "share_att_key": True}  # fmt: skip
    return encoder(real, "DebertaV2", "ForSequenceClassification", 8, 512, 128_100 if real else 8192, **changes)


@_model("ModernBERT-base")
def modern_bert(real: bool) -> tuple[nn.Module, Arguments]:
    changes = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return encoder(real, "ModernBert", "ForMaskedLM", 8, 1024, 50_368, layers=22, local_attention=128, **changes)


# encoder-decoders and speech


@_model("T5-base")
def t5(real: bool) -> tuple[nn.Module, Arguments]:
    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32_128}
    if not real:
        sizes = {"d_model": 192, "d_kv": 64, "d_ff": 768, "num_layers": 2, "num_heads": 3, "vocab_size": 8192}
    config = config_of("T5", **sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, use_cache=False)
    ids = ids_of(sizes["vocab_size"], *((16, 512) if real else (2, 128)))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def _encoder_decoder(real: bool, layers: int) -> dict[str, Any]:
    width, heads = (768, 12) if real else (192, 3)
    sides = ("encoder", "decoder")
    return {
        "d_model": width,
        **{f"{side}_layers": layers if real else 2 for side in sides},
        **{f"{side}_attention_heads": heads for side in sides},
        **{f"{side}_ffn_dim": 4 * width for side in sides},
        "use_cache": False,
    }


@_model("BART-base")
def bart(real: bool) -> tuple[nn.Module, Arguments]:
    vocabulary = 50_265 if real else 8192
    config = config_of("Bart", **_encoder_decoder(real, 6), vocab_size=vocabulary, pad_token_id=1, eos_token_id=2)
    ids = ids_of(vocabulary, *((16, 512) if real else (2, 128)))
    return transformers.BartForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@_model("Whisper-small")
def whisper(real: bool) -> tuple[nn.Module, Arguments]:
    frames, vocabulary = (3000, 51_865) if real else (200, 4096)
    config = config_of("Whisper", **_encoder_decoder(real, 12), vocab_size=vocabulary, max_source_positions=frames // 2,
                     pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    batch, length = (4, 256) if real else (2, 64)
    return model, {"input_features": torch.randn(batch, 80, frames), "labels": ids_of(vocabulary, batch, length)}


# vision


def vision(real: bool, kind: str, batch: int, **sizes: Any) -> tuple[nn.Module, Arguments]:
    model = getattr(transformers, f"{kind}ForImageClassification")(config_of(kind, **sizes))
    batch, side = (batch, 224) if real else (2, 224)
    return model, {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.zeros(batch, dtype=torch.long)}


@_model("ViT-B")
def vit(real: bool) -> tuple[nn.Module, Arguments]:
    small = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 3}
    return vision(real, "ViT", 32, **({} if real else small))


@_model("Swin-T")
def swin(real: bool) -> tuple[nn.Module, Arguments]:
    return vision(real, "Swin", 64, **({} if real else {"depths": [1, 1], "num_heads": [3, 6]}))


@_model("ConvNeXt-T")
def convnext(real: bool) -> tuple[nn.Module, Arguments]:
    return vision(real, "ConvNext", 32, **({} if real else {"depths": [1, 1, 2, 1]}))


@_model("ResNet-50")
def resnet(real: bool) -> tuple[nn.Module, Arguments]:
    small = {"depths": [2, 2, 2, 2], "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
    return vision(real, "ResNet", 64, **({} if real else small))


@_model("MobileNetV2")
def mobilenet(real: bool) -> tuple[nn.Module, Arguments]:
    return vision(real, "MobileNetV2", 64, **({} if real else {"depth_multiplier": 0.5}))


# diffusion


def _timestep_embedding(t: torch.Tensor, width: int) -> torch.Tensor:
    frequencies = torch.exp(-torch.arange(width // 2, device=t.device) * (8.0 / (width // 2)))
    angles = t[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


class _ResBlock(nn.Module):
    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class _ImageAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, -1, height * breadth).transpose(-1, -2)
        y = F.scaled_dot_product_attention(*qkv.unbind(1))
        return x + self.out(y.transpose(-1, -2).reshape(batch, width, height, breadth))


class UNet(nn.Module):
    """A denoiser of two resolutions with attention at the lower one (as DDPM's); returns the loss of its target."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down1 = nn.ModuleList(_ResBlock(width, width, time) for _ in range(2))
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = nn.ModuleList([_ResBlock(width, 2 * width, time), _ResBlock(2 * width, 2 * width, time)])
        self.attend = nn.ModuleList(_ImageAttention(2 * width, width // 32) for _ in range(3))
        self.middle = _ResBlock(2 * width, 2 * width, time)
        self.up2 = nn.ModuleList(_ResBlock(4 * width, 2 * width, time) for _ in range(2))
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = nn.ModuleList(_ResBlock(2 * width, width, time) for _ in range(2))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        t = self.time(_timestep_embedding(t, self.width).to(x.dtype))
        x = self.first(x)
        skips = []
        for block in self.down1:
            skips.append(x := block(x, t))
        x = self.shrink(x)
        for block, attend in zip(self.down2, self.attend, strict=False):
            skips.append(x := attend(block(x, t)))
        x = self.attend[2](self.middle(x, t))
        for block in self.up2:
            x = block(torch.cat([x, skips.pop()], 1), t)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        for block in self.up1:
            x = block(torch.cat([x, skips.pop()], 1), t)
        x = self.last(F.silu(self.norm(x)))
        return x if target is None else F.mse_loss(x, target)


@_model("U-Net, diffusion")
def unet(real: bool) -> tuple[nn.Module, Arguments]:
    batch, width, side = (8, 192, 64) if real else (2, 64, 16)
    image = torch.randn(batch, 4, side, side)
    return UNet(width), {"x": image, "t": torch.randint(1000, (batch,)), "target": torch.randn_like(image)}


class _DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer with adaptive norms (Peebles and Xie, 2022); returns the loss of its target."""

    def __init__(self, width: int, layers: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.last = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        c = self.time(_timestep_embedding(t, self.width).to(x.dtype))
        h = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h, c)
        y = F.pixel_shuffle(self.last(self.norm(h)).transpose(1, 2).unflatten(2, (x.shape[2] // 2, -1)), 2)
        return y if target is None else F.mse_loss(y, target)


@_model("DiT-B/2")
def dit(real: bool) -> tuple[nn.Module, Arguments]:
    batch, width, layers, heads = (32, 768, 12, 12) if real else (2, 192, 3, 3)
    image = torch.randn(batch, 4, 32, 32)
    arguments = {"x": image, "t": torch.randint(1000, (batch,)), "target": torch.randn_like(image)}
    return DiT(width, layers, heads, 256), arguments


# recurrent


class Recurrent(nn.Module):
    """A language model of two LSTMs; returns the loss if labels are given."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        y, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(self.norm(y))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@_model("LSTM")
def lstm(real: bool) -> tuple[nn.Module, Arguments]:
    vocabulary, width, batch, length = (32_000, 1024, 32, 256) if real else (4096, 128, 4, 64)
    ids = ids_of(vocabulary, batch, length)
    return Recurrent(vocabulary, width), {"input_ids": ids, "labels": ids}
