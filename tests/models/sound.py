"""Models of sound from the transformers library, each tiny and from its config."""

from typing import Any

import torch
from torch import nn

from tests.models.zoo import BATCH, ENCODER_DECODER, HEADS, LAYERS, VOCAB, WIDTH, model, tokens, without_dropout

_WAVES = {
    "vocab_size": 16,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}


def waves(kind: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of raw sound and its loss, which aligns it with a few tokens."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_WAVES, **without_dropout(kind), **changes})
    net = getattr(transformers, f"{kind}ForCTC")(config)
    return net, {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 16, (2, 5))}


@model
def wav2vec2():
    return waves("Wav2Vec2")


@model
def hubert():
    return waves("Hubert")


@model
def audio_spectrogram_transformer():
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        patch_size=8,
        frequency_stride=6,
        time_stride=6,
        max_length=32,
        num_mel_bins=16,
        num_labels=3,
        **without_dropout("AST"),
    )
    return ASTForAudioClassification(config), {
        "input_values": torch.randn(BATCH, 32, 16),
        "labels": torch.arange(BATCH) % 3,
    }


@model
def speech_to_text():
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    config = Speech2TextConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        **ENCODER_DECODER,
        max_source_positions=32,
        max_target_positions=32,
        input_feat_per_channel=8,
        conv_channels=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        **without_dropout("Speech2Text"),
    )
    return Speech2TextForConditionalGeneration(config), {
        "input_features": torch.randn(BATCH, 32, 8),
        "labels": tokens(),
    }


@model
def speecht5():
    """The model maps text to the mel spectrogram of its speech."""
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    config = SpeechT5Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        **ENCODER_DECODER,
        num_mel_bins=8,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2,
        speaker_embedding_dim=8,
        use_guided_attention_loss=False,
        encoder_max_relative_position=8,
        **{**without_dropout("SpeechT5"), "positional_dropout": 0.0},
        speech_decoder_prenet_dropout=0.0,
        speech_decoder_postnet_dropout=0.0,
    )
    return SpeechT5ForTextToSpeech(config), {
        "input_ids": tokens(),
        "decoder_input_values": torch.randn(BATCH, 6, 8),
        "speaker_embeddings": torch.randn(BATCH, 8),
    }


@model
def hifigan():
    """The model maps a mel spectrogram to sound."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3], [1, 3]],
    )
    return SpeechT5HifiGan(config), {"spectrogram": torch.randn(BATCH, 10, 8)}
