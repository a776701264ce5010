"""Models of text with images from the transformers library, each tiny and from its config."""

from typing import Any

import torch
from torch import nn

from tests.models.vision import EFFICIENT
from tests.models.zoo import BATCH, HEADS, LAYERS, VOCAB, WIDTH, model, tokens

_TOWER = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_TEXT = {
    **_TOWER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_IMAGE = {**_TOWER, "image_size": 32, "patch_size": 8}


def images() -> torch.Tensor:
    return torch.randn(BATCH, 3, 32, 32)


def towers(kind: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with a tower for text and one for images, and the contrastive loss of their pairs."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{"text_config": _TEXT, "vision_config": _IMAGE, **changes})
    net = getattr(transformers, f"{kind}Model")(config)
    return net, {"input_ids": tokens(), "pixel_values": images(), "return_loss": True}


@model
def siglip():
    return towers("Siglip")


@model
def align():
    """The images are encoded by an EfficientNet."""
    return towers(
        "Align",
        vision_config=EFFICIENT,
        projection_dim=16,
    )


@model
def chinese_clip():
    return towers("ChineseCLIP", projection_dim=16)


@model
def blip():
    """A text is generated about an image: the text's layers attend to the image's states."""
    from transformers import BlipConfig, BlipForConditionalGeneration

    config = BlipConfig(
        text_config={**_TEXT, "encoder_hidden_size": WIDTH, "use_cache": False},
        vision_config=_IMAGE,
        projection_dim=16,
    )
    ids = tokens()
    return BlipForConditionalGeneration(config), {"pixel_values": images(), "input_ids": ids, "labels": ids}


@model
def flava():
    from transformers import FlavaConfig, FlavaModel

    tower = {**_TOWER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = FlavaConfig(
        text_config=_TEXT,
        image_config={**tower, "image_size": 32, "patch_size": 8},
        multimodal_config=tower,
        hidden_size=WIDTH,
        projection_dim=16,
    )
    return FlavaModel(config), {"input_ids": tokens(), "pixel_values": images()}


@model
def git():
    """The text follows the patches of its image in one decoder."""
    from transformers import GitConfig, GitForCausalLM

    config = GitConfig(**_TEXT, vision_config=_IMAGE, use_cache=False)
    ids = tokens()
    return GitForCausalLM(config), {"input_ids": ids, "pixel_values": images(), "labels": ids}
