"""RMSNorm, SwiGLU, rotary embedding and cross entropy in Triton, each with its gradient.

float32, bfloat16 and float16, computed in float32. Runs on GPUs, and with TRITON_INTERPRET=1 on CPU tensors, slowly.
"""

from .gated import swiglu, swiglu_backward
from .loss import cross_entropy, cross_entropy_backward
from .norm import rms_norm, rms_norm_backward
from .rope import rotary, rotary_backward

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "swiglu",
    "swiglu_backward",
]
