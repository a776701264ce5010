"""Encoders and encoder-decoders of text from the transformers library, each tiny and from its config."""

import torch

from tests.models.zoo import ENCODER_DECODER, HEADS, LAYERS, WIDTH, encoder, model, sequence_to_sequence


@model
def albert():
    return encoder("Albert", "ForMaskedLM", embedding_size=16)


@model
def electra():
    return encoder("Electra", "ForMaskedLM", embedding_size=16)


@model
def mpnet():
    return encoder("MPNet", "ForMaskedLM")


@model
def roformer():
    return encoder("RoFormer", "ForMaskedLM", embedding_size=16)


@model
def funnel():
    """The second block has half the length; the decoder restores it."""
    return encoder(
        "Funnel",
        "ForMaskedLM",
        num_hidden_layers=None,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=WIDTH,
        n_head=HEADS,
        d_head=8,
        d_inner=2 * WIDTH,
    )


@model
def modernbert():
    return encoder("ModernBert", "ForMaskedLM", local_attention=6, global_attn_every_n_layers=2, **_SPECIAL)


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


@model
def convbert():
    return encoder("ConvBert", "ForMaskedLM", embedding_size=16, conv_kernel_size=3)


@model
def squeezebert():
    return encoder("SqueezeBert", "ForMaskedLM", embedding_size=WIDTH)


@model
def esm():
    return encoder("Esm", "ForMaskedLM", position_embedding_type="rotary", mask_token_id=3, token_dropout=True)


@model
def fnet():
    """Fourier transforms replace attention."""
    net, arguments = encoder("FNet", "ForMaskedLM")
    del arguments["attention_mask"]
    return net, arguments


@model
def xlnet():
    """Attention is relative to the positions of this segment and of the previous ones, whose states are an argument."""
    net, arguments = encoder(
        "XLNet",
        "LMHeadModel",
        max_position_embeddings=None,
        d_model=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        d_inner=2 * WIDTH,
    )
    length, batch = arguments["input_ids"].t().shape
    return net, {**arguments, "mems": [torch.randn(length, batch, WIDTH) for _ in range(LAYERS)], "use_mems": True}


@model
def pegasus():
    return sequence_to_sequence("Pegasus", **ENCODER_DECODER, max_position_embeddings=64)


@model
def mbart():
    return sequence_to_sequence("MBart", **ENCODER_DECODER, max_position_embeddings=64)


@model
def m2m100():
    return sequence_to_sequence("M2M100", **ENCODER_DECODER, max_position_embeddings=64)


@model
def marian():
    return sequence_to_sequence("Marian", head="MTModel", **ENCODER_DECODER, max_position_embeddings=64)


@model
def blenderbot():
    return sequence_to_sequence("Blenderbot", **ENCODER_DECODER, max_position_embeddings=64)


@model
def prophetnet():
    """The decoder predicts several tokens at once."""
    return sequence_to_sequence(
        "ProphetNet",
        hidden_size=WIDTH,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_encoder_attention_heads=HEADS,
        num_decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=64,
        num_buckets=8,
        ngram=2,
    )
