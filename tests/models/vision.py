"""Models of images from the transformers library, each tiny and from its config."""

import torch

from tests.models.zoo import BATCH, VIT, WIDTH, model, vision


@model
def deit():
    return vision("DeiT", **VIT)


@model
def beit():
    return vision("Beit", **VIT, use_relative_position_bias=True)


@model
def swin():
    return vision("Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)


@model
def swinv2():
    return vision("Swinv2", image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)


@model
def vit_mae():
    """Three of four patches are masked at random; the noise that selects them is an argument."""
    net, arguments = vision(
        "ViTMAE",
        "ForPreTraining",
        **VIT,
        decoder_hidden_size=16,
        decoder_num_attention_heads=2,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=32,
    )
    return net, {"pixel_values": arguments["pixel_values"], "noise": torch.rand(BATCH, 16)}


@model
def convnextv2():
    return vision("ConvNextV2", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)


@model
def mobilenet_v2():
    return vision("MobileNetV2", depth_multiplier=0.25, image_size=32)


EFFICIENT = {
    "image_size": 32,
    "width_coefficient": 0.25,
    "depth_coefficient": 1.0,
    "hidden_dim": 320,
    "kernel_sizes": [3, 5],
    "in_channels": [32, 32],
    "out_channels": [32, 64],
    "strides": [1, 2],
    "num_block_repeats": [1, 2],
    "expand_ratios": [1, 4],
    "drop_connect_rate": 0.0,
}


@model
def efficientnet():
    return vision("EfficientNet", **EFFICIENT)


@model
def regnet():
    return vision("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4)


@model
def poolformer():
    return vision(
        "PoolFormer",
        depths=[1, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        num_encoder_blocks=2,
    )


@model
def focalnet():
    return vision("FocalNet", image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3])


@model
def mobilevit():
    return vision(
        "MobileViT",
        image_size=32,
        hidden_sizes=[16, 20, 24],
        neck_hidden_sizes=[8, 8, 16, 16, 20, 24, 32],
        num_attention_heads=2,
    )


@model
def segformer():
    net, arguments = vision(
        "Segformer",
        "ForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    with torch.no_grad():
        net(arguments["pixel_values"])  # the library installs hooks, under a lock, when a model is first called
    return net, {**arguments, "labels": torch.randint(3, (BATCH, 32, 32))}


@model
def detr():
    """The detector has convolutions, then an encoder and a decoder of object queries. There are no labels, because its
    loss matches boxes on the CPU."""
    from transformers import ResNetConfig

    net, arguments = vision(
        "Detr",
        "ForObjectDetection",
        d_model=WIDTH,
        num_queries=5,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        backbone_config=ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        ),
    )
    return net, {"pixel_values": arguments["pixel_values"]}


@model
def yolos():
    net, arguments = vision("Yolos", "ForObjectDetection", **{**VIT, "image_size": [32, 32]}, num_detection_tokens=5)
    return net, {"pixel_values": arguments["pixel_values"]}


@model
def videomae():
    net, arguments = vision("VideoMAE", "ForVideoClassification", **VIT, num_frames=4, tubelet_size=2)
    return net, {**arguments, "pixel_values": torch.randn(BATCH, 4, 3, 32, 32)}
