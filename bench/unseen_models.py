"""More models for `bench.zoo --only`, which a run of the zoo leaves out: forge was not tuned on them.

They tell how far the zoo's figures hold for other models. Sizes are as in bench/zoo_models.py.
"""

from collections.abc import Callable
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
    "ALBERT-base": lambda real: encoder(real, "Albert", "ForMaskedLM", 16, 512, 30_000, embedding_size=128),
    "ELECTRA-base": lambda real: encoder(real, "Electra", "ForSequenceClassification", 16, 512, 30_522),
    "DINOv2-B": lambda real: vision(real, "Dinov2", 32, **({} if real else _SMALL_VIT)),
    "BEiT-B": lambda real: vision(
        real, "Beit", 32, use_relative_position_bias=True, **({} if real else _SMALL_VIT)
    ),
    "EfficientNet-B0": lambda real: vision(
        real, "EfficientNet", 64, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280
    ),
    "RegNet-Y": lambda real: vision(real, "RegNet", 64, **({} if real else {"depths": [1, 1, 2, 1]})),
}  # fmt: skip
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


@_model("Wav2Vec2-base")
def wav2vec2(real: bool) -> tuple[nn.Module, Arguments]:
    small = {**_SMALL_VIT, "num_hidden_layers": 2}
    config = config_of("Wav2Vec2", **({} if real else small), layerdrop=0.0, mask_time_prob=0.0, vocab_size=32)
    batch, samples = (8, 160_000) if real else (2, 16_000)
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": torch.randn(batch, samples), "labels": torch.zeros(batch, dtype=torch.long)}
