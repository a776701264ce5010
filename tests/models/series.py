"""Models of time series from the transformers library, each tiny and from its config."""

from typing import Any

import torch
from torch import nn

from tests.models.zoo import BATCH, model, without_dropout


@model
def patchtst():
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=3,
        context_length=24,
        patch_length=4,
        patch_stride=4,
        prediction_length=6,
        d_model=16,
        num_hidden_layers=2,
        ffn_dim=32,
    )
    return PatchTSTForPrediction(config), {
        "past_values": torch.randn(BATCH, 24, 3),
        "future_values": torch.randn(BATCH, 6, 3),
    }


@model
def patchtsmixer():
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    config = PatchTSMixerConfig(
        num_input_channels=3,
        context_length=24,
        patch_length=4,
        patch_stride=4,
        prediction_length=6,
        d_model=16,
        num_layers=2,
        dropout=0.0,
        head_dropout=0.0,
        mode="mix_channel",
        gated_attn=True,
    )
    return PatchTSMixerForPrediction(config), {
        "past_values": torch.randn(BATCH, 24, 3),
        "future_values": torch.randn(BATCH, 6, 3),
    }


def forecaster(kind: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of the parameters of the distribution of a series' next values, and the likelihood of the actual
    ones."""
    import transformers

    ahead, before, lags = 4, 12, [1, 2]
    config = getattr(transformers, f"{kind}Config")(
        **{
            "prediction_length": ahead,
            "context_length": before,
            "lags_sequence": lags,
            "num_time_features": 1,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            **without_dropout(kind),
            **changes,
        }
    )
    past = before + max(lags)
    return getattr(transformers, f"{kind}ForPrediction")(config), {
        "past_values": torch.rand(BATCH, past) + 1,
        "past_time_features": torch.rand(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.rand(BATCH, ahead) + 1,
        "future_time_features": torch.rand(BATCH, ahead, 1),
    }


@model
def time_series_transformer():
    return forecaster("TimeSeriesTransformer")


@model
def informer():
    """Only the queries that differ most from the mean attend."""
    return forecaster("Informer", sampling_factor=2)
