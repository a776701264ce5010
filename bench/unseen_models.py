"""More models for `bench.zoo --only`, which a run of the zoo leaves out: forge was not tuned on them.

They show how far the zoo's figures apply to other models. Sizes are as in bench/zoo_models.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from bench.zoo_models import Arguments, causal, config_of, encoder, ids_of, vision

MODELS: dict[str, Callable[[bool], tuple[nn.Module, Arguments]]] = {
    "OPT-350M": lambda real: causal(
        real, "OPT", 4, 1024, 50_272, 1024, 12, 16, ffn_dim=4096 if real else 1024,
        word_embed_proj_dim=1024 if real else 256,
    ),
    "Pythia-410M": lambda real: causal(real, "GPTNeoX", 4, 1024, 50_304, 1024, 12, 16, inner=4096),
    "Phi-1.5": lambda real: causal(real, "Phi", 2, 1024, 51_200, 2048, 12, 32, inner=8192),
    "OLMo2": lambda real: causal(real, "Olmo2", 2, 1024, 100_352, 2048, 8, 16, inner=8192),
    "Cohere2": lambda real: causal(
        real, "Cohere2", 2, 1024, 65_536, 2048, 8, 16, 4, inner=8192, sliding_window=512 if real else 64
    ),
    "GPT-J": lambda real: causal(
        real, "GPTJ", 2, 1024, 50_400, 2048, 8, 16, inner=8192, rotary_dim=64 if real else 32
    ),
    "Mixtral": lambda real: causal(
        real, "Mixtral", 4, 512, 32_000, 1024, 8, 16, 8, inner=2048, num_local_experts=8
    ),
    "DeepSeek-V3": lambda real: causal(
        real, "DeepseekV3", 4, 512, 32_000, 1024, 6, 16, 16, inner=2816, moe_intermediate_size=512,
        n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
    "GPT-OSS": lambda real: causal(
        real, "GptOss", 4, 512, 32_000, 1024, 8, 16, 4, inner=1024, head_dim=64, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=128,
    ),
    "LFM2": lambda real: causal(
        real, "Lfm2", 4, 1024, 65_536, 1024, 12, 16, 8, inner=4096,
        layer_types=["conv", "conv", "full_attention"] * (4 if real else 1),
    ),
    "FNet-base": lambda real: encoder(real, "FNet", "ForMaskedLM", 16, 512, 32_000),
    "Longformer-base": lambda real: encoder(
        real, "Longformer", "ForSequenceClassification", 4, 1024, 30_522, attention_window=256 if real else 32
    ),
    "ALBERT-base": lambda real: encoder(real, "Albert", "ForMaskedLM", 16, 512, 30_000, embedding_size=128),
    "ELECTRA-base": lambda real: encoder(real, "Electra", "ForSequenceClassification", 16, 512, 30_522),
    "DINOv2-B": lambda real: vision(real, "Dinov2", 32, **({} if real else _SMALL_VIT)),
    "BEiT-B": lambda real: vision(
        real, "Beit", 32, use_relative_position_bias=True, **({} if real else _SMALL_VIT)
    ),
    "Swin-v2-T": lambda real: vision(
        real, "Swinv2", 32, image_size=224, window_size=7, **({} if real else {"depths": [1, 1], "num_heads": [3, 6]})
    ),
    "ConvNeXt-v2-T": lambda real: vision(real, "ConvNextV2", 32, **({} if real else {"depths": [1, 1, 2, 1]})),
    "EfficientNet-B0": lambda real: vision(
        real, "EfficientNet", 64, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280
    ),
    "PVT-v2-B2": lambda real: vision(real, "PvtV2", 32, **(_PVT_B2 if real else {})),
    "PoolFormer-S24": lambda real: vision(real, "PoolFormer", 32, **({"depths": [4, 4, 12, 4]} if real else {})),
    "FocalNet-T": lambda real: vision(
        real, "FocalNet", 32, **({} if real else {"depths": [1, 1, 1, 1], "embed_dim": 32})
    ),
    "CvT-13": lambda real: vision(real, "Cvt", 32),
    "BiT-R50": lambda real: vision(
        real, "Bit", 32, **({} if real else {"depths": [1, 1, 1, 1], "hidden_sizes": [128, 256, 512, 512]})
    ),
    "Hiera-T": lambda real: vision(real, "Hiera", 32, **({} if real else {"depths": [1, 1, 2, 1]})),
    "SwiftFormer-XS": lambda real: vision(real, "SwiftFormer", 64, **({} if real else {"depths": [1, 1, 2, 1]})),
    "ConvBERT-base": lambda real: encoder(real, "ConvBert", "ForMaskedLM", 16, 512, 30_522),
    "BigBird-base": lambda real: encoder(
        real, "BigBird", "ForMaskedLM", 4, 2048, 50_358, block_size=64 if real else 8
    ),
    "RegNet-Y": lambda real: vision(real, "RegNet", 64, **({} if real else {"depths": [1, 1, 2, 1]})),
}  # fmt: skip
_PVT_B2 = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512]}
_SMALL_VIT = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 3}


def _model(name: str) -> Callable[[Callable], Callable]:
    def register(make: Callable) -> Callable:
        MODELS[name] = make
        return make

    return register


@_model("XLNet-base")
def xlnet(real: bool) -> tuple[nn.Module, Arguments]:
    width, heads, layers = (768, 12, 12) if real else (192, 3, 2)
    vocabulary = 32_000 if real else 8192
    sizes = {"d_model": width, "n_head": heads, "n_layer": layers, "d_inner": 4 * width, "vocab_size": vocabulary}
    model = transformers.XLNetForSequenceClassification(config_of("XLNet", **sizes, num_labels=2))
    ids = ids_of(vocabulary, *((16, 512) if real else (2, 128)))
    return model, {"input_ids": ids, "labels": torch.zeros(len(ids), dtype=torch.long)}


@_model("CLIP-B/16")
def clip(real: bool) -> tuple[nn.Module, Arguments]:
    sizes: dict[str, Any] = {} if real else _SMALL_VIT
    text = {**sizes, "vocab_size": 49_408 if real else 8192, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config={**sizes, "patch_size": 16})
    batch = 32 if real else 2
    ids = ids_of(text["vocab_size"], batch, 77)
    ids[:, -1] = 2
    images = torch.randn(batch, 3, 224, 224)
    return transformers.CLIPModel(config), {"input_ids": ids, "pixel_values": images, "return_loss": True}


@_model("SegFormer-B2")
def segformer(real: bool) -> tuple[nn.Module, Arguments]:
    real_sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
    config = config_of("Segformer", **(real_sizes if real else {}), num_labels=19)
    batch, side = (8, 512) if real else (2, 64)
    labels = torch.randint(19, (batch, side, side))
    model = transformers.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": torch.randn(batch, 3, side, side), "labels": labels}


def speech(real: bool, kind: str) -> tuple[nn.Module, Arguments]:
    small = {**_SMALL_VIT, "num_hidden_layers": 2}
    config = config_of(kind, **({} if real else small), layerdrop=0.0, mask_time_prob=0.0, vocab_size=32)
    batch, samples = (8, 160_000) if real else (2, 16_000)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    return model, {"input_values": torch.randn(batch, samples), "labels": torch.zeros(batch, dtype=torch.long)}


MODELS |= {f"{kind}-base": partial(speech, kind=kind) for kind in ("Wav2Vec2", "WavLM")}


@_model("DETR-R50")
def detr(real: bool) -> tuple[nn.Module, Arguments]:
    small = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    backbone = transformers.ResNetConfig(out_features=["stage4"], **({} if real else {"depths": [1, 1, 1, 1]}))
    options = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
    }
    model = transformers.DetrModel(config_of("Detr", **options, **({} if real else {**small, **heads})))
    return model, {"pixel_values": torch.randn(8 if real else 2, 3, *((512, 512) if real else (64, 64)))}


@_model("SAM-B, image encoder")
def sam(real: bool) -> tuple[nn.Module, Arguments]:
    sizes = (
        {"image_size": 512, "window_size": 14, "output_channels": 256} if real else {**_SMALL_VIT, "image_size": 128}
    )
    config = transformers.SamVisionConfig(**sizes, **({} if real else {"window_size": 4, "global_attn_indexes": [1]}))
    side = config.image_size
    return transformers.SamVisionModel(config), {"pixel_values": torch.randn(4 if real else 1, 3, side, side)}


@_model("DPT, DINOv2")
def dpt(real: bool) -> tuple[nn.Module, Arguments]:
    stages = {"out_indices": [3, 6, 9, 12] if real else [1, 2, 3, 4], "reshape_hidden_states": False}
    backbone = transformers.Dinov2Config(**({} if real else {**_SMALL_VIT, "num_hidden_layers": 4}), **stages)
    small = {"reassemble_hidden_size": 192, "neck_hidden_sizes": [24, 48, 96, 192], "fusion_hidden_size": 32}
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, **({"reassemble_hidden_size": 768} if real else small)
    )
    batch, side = (8, 518) if real else (2, 112)
    return transformers.DepthAnythingForDepthEstimation(config), {"pixel_values": torch.randn(batch, 3, side, side)}
