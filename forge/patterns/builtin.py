"""The patterns that forge ships: how real models write norms, gated units, rotary embeddings and the loss.

Larger ones come first where they contain others, in the order of `ALL`: rotary embedding, residual + norm, norm, gated
units, the causal language model's loss. Those of `OPT_IN` are found where a kernel asks for them by name: `gelu_tanh`,
since in half precision the expression rounds after each step, where a kernel computes in float32, gated units of one
tensor, which take calls from those of two, and `rotary_pair`, which takes two calls from `rotary`, and gives them back
where no kernel runs it.
"""

import torch
import torch.nn.functional as F

from forge.patterns.reference import Pattern, pattern


def _normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


@pattern
def rms_norm(x, weight, eps: float):
    """Llama, Mistral, Qwen, T5: normalised in float32, back in x's dtype, then scaled.

    Shapes: x (..., H), weight (H,).
    """
    return weight * _normalize(x, eps).to(x.dtype)


@pattern
def rms_norm_wide(x, weight, eps: float):
    """OLMo, Helium, torch's own: scaled in float32, then back in x's dtype."""
    return (weight * _normalize(x, eps)).to(x.dtype)


@pattern
def rms_norm_gemma(x, weight, eps: float):
    """Gemma: scaled by 1 + weight in float32, then back in x's dtype."""
    return (_normalize(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _after_residual(name: str, norm: Pattern) -> Pattern:
    def reference(x, residual, weight, eps: float):
        total = x + residual
        return total, norm.reference(total, weight, eps)

    reference.__name__, reference.__doc__ = name, f"(x + residual, {norm.name} of it). {norm.reference.__doc__}"
    return Pattern(reference)


add_rms_norm = _after_residual("add_rms_norm", rms_norm)
add_rms_norm_wide = _after_residual("add_rms_norm_wide", rms_norm_wide)
add_rms_norm_gemma = _after_residual("add_rms_norm_gemma", rms_norm_gemma)


@pattern
def add_layer_norm(x, residual, weight, bias, eps: float):
    """(x + residual, its layer norm): GPT-2, ViT. Shapes: x and residual (..., H), weight and bias (H,)."""
    total = x + residual
    normal = F.layer_norm(total.float(), total.shape[-1:], None, None, eps)
    return total, (normal * weight.float() + bias.float()).to(total.dtype)


@pattern
def rotary_promoted(x, cos, sin):
    """As rotary, in the dtype that x, cos and sin promote to: under torch.autocast x is narrower than they are."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pattern
def rotary(x, cos, sin):
    """Rotary embedding of halves (GPT-NeoX, Llama). Shapes: x (..., D); cos and sin broadcast against it."""
    return rotary_promoted.reference(x, cos, sin).to(x.dtype)


@pattern
def rotary_pair(q, k, cos, sin):
    """rotary of queries and of keys, of any numbers of heads, by the same cosines and sines. Opt-in."""
    return rotary(q, cos, sin), rotary(k, cos, sin)


@pattern
def rotary_interleaved_promoted(x, cos, sin):
    """As rotary_interleaved, in the dtype that x, cos and sin promote to."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


@pattern
def rotary_interleaved(x, cos, sin):
    """Rotary embedding of neighbouring pairs (GPT-J, Cohere). Shapes: as rotary."""
    return rotary_interleaved_promoted.reference(x, cos, sin).to(x.dtype)


@pattern
def rotary_halves(x, cos, sin):
    """Rotary embedding of halves, each half written out (gpt-oss). Shapes: as rotary, with cos and sin of D / 2."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pattern
def rotary_pairs(x, cos, sin):
    """Rotary embedding of neighbouring pairs into halves (DeepSeek V3). Shapes: as rotary_halves."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pattern
def gelu_tanh(x):
    """Return the tanh-approximated gelu written out (GPT-2's "gelu_new"). Opt-in."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


@pattern
def swiglu(gate, up):
    """silu(gate) * up, from two projections or from two slices of one."""
    return F.silu(gate) * up


@pattern
def geglu(gate, up):
    """gelu(gate) * up with the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


@pattern
def geglu_exact(gate, up):
    """gelu(gate) * up."""
    return F.gelu(gate) * up


@pattern
def geglu_written(gate, up):
    """gelu(gate) * up with the tanh approximation written out, which rounds after each step (T5)."""
    return gelu_tanh.reference(gate) * up


@pattern
def silu_and_mul(x):
    """swiglu of the two halves of x's last dim. Opt-in."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pattern
def gelu_and_mul(x):
    """geglu_exact of the two halves of x's last dim. Opt-in."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


@pattern
def gelu_tanh_and_mul(x):
    """geglu of the two halves of x's last dim. Opt-in."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


@pattern
def swiglu_clamped(gate, up, limit: float, alpha: float):
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped values (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pattern
def causal_lm_loss(logits, labels: torch.LongTensor, ignore_index: int):
    """Return the mean cross entropy, in float32, of each position's logits with the next position's label.

    Shapes: logits (..., S, V), labels (..., S), out (). The last position counts as `ignore_index`.
    """
    following = F.pad(labels.expand(logits.shape[:-1]), (0, 1), value=ignore_index)[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, following.reshape(-1), ignore_index=ignore_index)


ALL: tuple[Pattern, ...] = (
    rotary,
    rotary_interleaved,
    rotary_promoted,
    rotary_interleaved_promoted,
    rotary_halves,
    rotary_pairs,
    add_rms_norm_gemma,
    add_rms_norm,
    add_rms_norm_wide,
    rms_norm_gemma,
    rms_norm,
    rms_norm_wide,
    add_layer_norm,
    swiglu,
    geglu,
    geglu_exact,
    geglu_written,
    swiglu_clamped,
    causal_lm_loss,
)

OPT_IN: tuple[Pattern, ...] = (rotary_pair, gelu_tanh, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul)


def by_name(name: str) -> Pattern:
    """Return a shipped pattern. Raises KeyError naming the ones there are."""
    patterns = {each.name: each for each in (*ALL, *OPT_IN)}
    if name not in patterns:
        raise KeyError(f"no shipped pattern is called {name!r}; there are {', '.join(sorted(patterns))}")
    return patterns[name]
