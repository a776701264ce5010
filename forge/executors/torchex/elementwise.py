"""How torch runs the elementwise family."""

import torch

from forge import clang, prims
from forge.executors.torchex.core import run_clang, run_prim, run_prims

_SAME_NAME = """abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
copysign cos cosh digamma eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod ge gt hypot isfinite isinf isnan le
lgamma log log10 log1p log2 lt maximum minimum mul ne neg nextafter pow reciprocal remainder round rsqrt sigmoid sign
signbit sin sinh sqrt sub tan tanh trunc where""".split()
_OTHER_NAME = {
    prims.div: torch.true_divide,
    prims.shift_left: torch.bitwise_left_shift,
    prims.shift_right: torch.bitwise_right_shift,
}

run_prims({getattr(prims, name): getattr(torch, name) for name in _SAME_NAME} | _OTHER_NAME)
run_prim(prims.convert_element_type)(torch.Tensor.to)

# clang's binary operations broadcast and promote as torch's do
_BROADCASTING = """add atan2 bitwise_and bitwise_or bitwise_xor copysign eq floor_divide fmod ge gt hypot le lt maximum
minimum mul ne nextafter pow remainder sub where""".split()
run_clang({getattr(clang, name): getattr(torch, name) for name in _BROADCASTING})
run_clang(
    {
        clang.div: torch.true_divide,
        clang.shift_left: torch.bitwise_left_shift,
        clang.shift_right: torch.bitwise_right_shift,
    }
)
