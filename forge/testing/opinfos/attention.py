"""OpInfos of the attention family."""

from functools import partial
from typing import Any

import torch

from forge.testing.opinfo import Directive
from forge.testing.table import Value, op, sample, t, tolerance, values, wrong

_ROUNDED = tolerance(
    "torch's kernels round between blocks of keys, the decomposition not at all", 2e-2, 3e-2, executors=None
)


_UNALIGNED = Directive(
    "skip",
    "torch's attention reads 16 bytes at once wherever they lie, which stops a GPU: CUDA error: misaligned address",
    test="test_strided[offset]",
    devices=("cuda",),
)
_LAYOUTS = ("transposed", "expanded", "every other")
_OTHER_NUMBERS = tuple(
    Directive(
        "xfail",
        "on a GPU torch's attention draws other numbers for its dropout",
        test=test,
        executors=("torch-prims",),
        devices=("cuda",),
    )
    for test in ("test_consistency", "test_gradient", *[f"test_strided[{layout}]" for layout in _LAYOUTS])
)

_op = partial(op, directives=(_ROUNDED,))


_Q, _K, _V = t(2, 4, 5, 8), t(2, 4, 6, 8), t(2, 4, 6, 8)
_SOME = [[(row + column) % 3 != 0 for column in range(6)] for row in range(5)]
_BOOL = values(_SOME, torch.bool)
_ROW_HIDDEN = values([[row != 2] * 6 for row in range(5)], torch.bool)
_ATTENTION_MISTAKES = [
    wrong(_Q, t(2, 4, 6, 8, dtype=torch.float64), _V, match="same dtype"),
    wrong(t(8), _K, _V, match="at least 2 dimensional"),
    wrong(_Q, t(2, 4, 6, 4), _V, match="one width"),
    wrong(_Q, _K, _V, t(5, 6, dtype=torch.int64), match="Expected attn_mask dtype"),
    wrong(_Q, _K, _V, t(1, 2, 4, 5, 6), match="does not broadcast to the scores"),
    wrong(_Q, t(2, 3, 6, 8), t(2, 3, 6, 8), enable_gqa=True, match="Number of heads"),
    wrong(_Q.cpu(), _K.cpu(), _V.cpu(), dropout_p=1.5, match="between 0 and 1"),  # a GPU takes it
]
_op(
    "nn.functional.scaled_dot_product_attention",
    sample(_Q, _K, _V),
    sample(_Q, _K, _V, is_causal=True),
    sample(_K, _Q, _Q, is_causal=True, scale=0.3),
    sample(_Q, _K, _V, _BOOL),
    sample(_Q, _K, _V, t(2, 1, 5, 6)),
    sample(_Q, t(2, 2, 6, 8), t(2, 2, 6, 8), enable_gqa=True),
    sample(_Q, _K, t(2, 4, 6, 3)),
    sample(t(4, 5, 8), t(4, 6, 8), t(4, 6, 8)),
    sample(t(5, 8), t(6, 8), t(6, 8)),
    _ATTENTION_MISTAKES,
    directives=(_ROUNDED, _UNALIGNED),
)

_op(
    "nn.functional.scaled_dot_product_attention.dropout",
    sample(_Q, _K, _V, dropout_p=0.0),
    sample(_Q, _K, _V, dropout_p=0.4),
    sample(_Q, _K, _V, _BOOL, 0.4),
    sample(_Q, t(2, 2, 6, 8), t(2, 2, 6, 8), None, 0.2, True, enable_gqa=True),
    _ATTENTION_MISTAKES,
    directives=(_ROUNDED, _UNALIGNED, *_OTHER_NUMBERS),
)

_op(
    "nn.functional.scaled_dot_product_attention.hidden_row",
    sample(_Q, _K, _V, _ROW_HIDDEN),
    wrong(_Q, _K, _V, t(4, 6, dtype=torch.bool), match="do not broadcast"),
    directives=(_UNALIGNED,),
    dtypes=(torch.float32, torch.float64),  # cuDNN's half precision kernel gives no 0 for a hidden row
)

_PARAMETERS = (t(24, 8), t(24))
_OUT = (t(8, 8), t(8))


def _heads(query: Value, key: Value, *, biases: tuple = (None, None), zero: bool = False, **options: Any) -> Any:
    out = (0.0, *_OUT)
    return sample(query, key, key, 8, 2, *_PARAMETERS, *biases, zero, *out, **options)


_SEPARATE = {
    "use_separate_proj_weight": True,
    "q_proj_weight": t(8, 8),
    "k_proj_weight": t(8, 6),
    "v_proj_weight": t(8, 6),
}
_PADDING = values([[False, False, True], [False, False, False]], torch.bool)
_op(
    "nn.functional.multi_head_attention_forward",
    _heads(t(5, 2, 8), t(3, 2, 8)),
    _heads(t(5, 2, 8), t(3, 2, 8), need_weights=False),
    _heads(t(5, 8), t(3, 8), average_attn_weights=False),
    _heads(t(5, 2, 8), t(3, 2, 8), key_padding_mask=_PADDING, attn_mask=t(5, 3)),
    _heads(t(5, 2, 8), t(3, 2, 8), key_padding_mask=_PADDING, need_weights=False, attn_mask=t(4, 5, 3)),
    _heads(t(3, 2, 8), t(3, 2, 8), attn_mask=t(3, 3), is_causal=True, need_weights=False),
    _heads(t(5, 2, 8), t(3, 2, 8), biases=(t(1, 1, 8), t(1, 1, 8)), zero=True, attn_mask=t(5, 3)),
    sample(t(5, 2, 8), t(3, 2, 6), t(3, 2, 6), 8, 2, None, t(24), None, None, False, 0.0, *_OUT, **_SEPARATE),
    wrong(
        t(5, 2, 7),
        t(3, 2, 7),
        t(3, 2, 7),
        8,
        2,
        *_PARAMETERS,
        None,
        None,
        False,
        0.0,
        *_OUT,
        error=AssertionError,
        match="embedding dimension",
    ),
    domain=(-1.0, 1.0),
)
