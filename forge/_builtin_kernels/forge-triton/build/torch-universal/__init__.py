"""Norms, softmax, gated units, rotary embedding and cross entropy in Triton, each with its gradient; steps of AdamW.

float32, bfloat16 and float16, computed in float32. Runs on GPUs, and with TRITON_INTERPRET=1 on CPU tensors, slowly.
"""

from .adamw import AdamWStep, adamw_unsupported
from .gated import geglu, geglu_backward, swiglu, swiglu_backward
from .loss import cross_entropy, cross_entropy_backward, cross_entropy_forward
from .norm import (
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from .rope import rotary, rotary_backward, rotary_pair, rotary_pair_backward
from .softmax_rows import softmax, softmax_backward

__all__ = [
    "AdamWStep",
    "adamw_unsupported",
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "geglu",
    "geglu_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "rotary_pair",
    "rotary_pair_backward",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
]
