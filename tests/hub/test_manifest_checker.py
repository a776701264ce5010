"""Checkers of calls: the calls that a kernel takes, and the reasons against the others."""

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge.executors import Declined
from forge.executors.hubex.operators import make_checker
from forge.hub.manifest import Checker, KernelEntry, Layout, constraints, fix, fix_ups, kernel, no_kernel
from forge.hub.manifest.layout import in_order
from forge.hub.manifest.model import CONTIGUOUS, DimOrder
from forge.ir import NumberProxy, TensorProxy
from tests.hub.manifests import OPERATORS, entry, read

RMS = "torch.nn.functional.rms_norm"
CUDA = torch.device("cuda", 0)


def anything(*args: Any, **kwargs: Any) -> None:
    """Stand in for a kernel."""


def checking(op: str = RMS, **fields: Any) -> Checker:
    """Return the checker of a kernel declared in Python."""
    declared = kernel(op, anything, resolver=OPERATORS, **fields)
    return Checker(declared, OPERATORS.resolve(op))


def proxy(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = torch.device("cpu"),
    strides: tuple | None = None,
) -> TensorProxy:
    return TensorProxy("x", shape, dtype, device, strides=strides)


HALF = {"T": ["float16", "bfloat16"]}
META = {"input": ["T", "contiguous"], "weight": ["T", "contiguous"]}


# tensors that have others inside


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_dtensor_is_declined_in_words() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    check = checking(arg_meta=META, type_alias=HALF)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        x = distribute_tensor(torch.empty(4, 8, dtype=torch.half), init_device_mesh("cpu", (2,)), [Shard(0)])
        reason = "input is a DTensor, whose elements a kernel cannot read; give it input.to_local()"
        assert check.failures(x, (8,), torch.empty(8, dtype=torch.half)) == [reason]
    finally:
        torch.distributed.destroy_process_group()


# dtypes


def test_a_call_that_fits_is_taken() -> None:
    check = checking(
        arg_meta=META, type_alias=HALF, shape={"input": "[..., H]", "weight": "[H]"}, where="H % 8 == 0", device="cpu"
    )
    x, weight = torch.empty(2, 3, 64, dtype=torch.half), torch.empty(64, dtype=torch.half)
    assert check(x, (64,), weight, 1e-6) is True
    assert check(x, normalized_shape=(64,), weight=weight) is True
    assert check(proxy(2, 64), (64,), proxy(64)) is True


def test_a_dtype_out_of_the_alias_is_named_with_the_alias() -> None:
    check = checking(arg_meta=META, type_alias=HALF)
    assert check(torch.empty(2, 8), (8,), None) == "weight is None, but must be a tensor"
    assert check(torch.empty(2, 8), (8,), torch.empty(8)) == "dtype float32 not in T (float16, bfloat16)"


def test_a_dtype_named_directly_is_told_without_an_alias() -> None:
    check = checking(arg_meta={"input": "bfloat16"})
    assert check(torch.empty(2, 8), (8,)) == "dtype float32 is not bfloat16"


def test_one_alias_is_one_dtype_in_a_call() -> None:
    check = checking(arg_meta={"input": "T", "weight": "T"}, type_alias={"T": ["bfloat16", "float32"]})
    x = torch.empty(2, 8)
    assert check(x, (8,), torch.empty(8)) is True
    assert check(x.bfloat16(), (8,), torch.empty(8)) == "weight has dtype float32, but T is bfloat16 here"


def test_two_aliases_are_bound_on_their_own() -> None:
    check = checking(arg_meta={"input": "T", "weight": "U"}, type_alias={**HALF, "U": ["float32", "bfloat16"]})
    assert check(proxy(2, 8), (8,), torch.empty(8)) is True
    reason = check(proxy(2, 8), (8,), torch.empty(8).double())
    assert reason == "weight: dtype float64 not in U (float32, bfloat16)"


def test_an_optional_argument_may_be_none_and_is_checked_when_it_is_not() -> None:
    check = checking(arg_meta={"input": "T", "weight": "T?"}, type_alias=HALF, shape={"weight": "[H]"})
    assert check(proxy(2, 8), (8,)) is True
    assert check(proxy(2, 8), (8,), torch.empty(8)) == "weight: dtype float32 not in T (float16, bfloat16)"


def test_a_number_in_place_of_a_tensor_is_named() -> None:
    check = checking("torch.add", dtypes=["float32"])
    assert check(torch.empty(2), 2.0) == "other is 2.0, but must be a tensor"


def test_each_tensor_of_a_list_is_checked() -> None:
    check = checking("aten::cat", arg_meta={"tensors": ["T", "contiguous"]}, type_alias=HALF)
    x = torch.empty(2, 2, dtype=torch.half)
    assert check([x, x]) is True and check([]) is True
    assert check([x, x.bfloat16()]) == "tensors has dtype bfloat16, but T is float16 here"
    assert check([x, x.t()]) == "tensors is not contiguous"


# devices


def test_a_device_is_named_with_what_is_needed() -> None:
    assert checking(device="cuda")(torch.empty(2, 8), (8,)) == "device is cpu, needs cuda"
    assert checking(device=["cuda", "xpu"])(torch.empty(2, 8), (8,)) == "device is cpu, needs cuda or xpu"


def test_every_tensor_must_be_on_the_device() -> None:
    reason = checking(device="cuda")(proxy(2, 8, device=CUDA), (8,), torch.empty(8))
    assert reason == "weight: device is cpu, needs cuda"


@pytest.mark.parametrize(
    ("limits", "found", "wanted"),
    [
        (">=8.0", (8, 0), True),
        (">=8.0", (7, 5), "capability is 7.5, needs >=8.0"),
        (">=8.0,<10", (9, 0), True),
        (">=8.0,<10", (10, 0), "capability is 10.0, needs >=8.0,<10"),
        ("==9.0", (9, 1), "capability is 9.1, needs ==9.0"),
        (">= 8.9", (8, 10), True),
    ],
)
def test_the_capability_is_that_of_the_tensors_own_device(
    limits: str, found: tuple, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_cuda_capability", lambda index: found if index == 1 else (1, 0))
    check = checking(device={"type": "cuda", "capability": limits})
    assert check(proxy(2, 8, device=torch.device("cuda", 1)), (8,)) == wanted


def test_an_unknown_capability_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("no NVIDIA driver\nmore")

    monkeypatch.setattr(constraints, "_cuda_capability", broken)
    check = checking(device={"type": "cuda", "capability": ">=8.0"})
    assert check(proxy(2, 8, device=CUDA), (8,)) == (
        "capability of cuda:0 is not known (no NVIDIA driver), needs >=8.0"
    )


# dim orders


def test_what_is_not_contiguous_is_named() -> None:
    check = checking(arg_meta={"input": [None, "contiguous"]})
    assert check(torch.empty(4, 8), (8,)) is True
    assert check(torch.empty(8, 4).t(), (8,)) == "input is not contiguous"
    assert check(torch.empty(4, 1).expand(4, 8), (8,)) == "input is not contiguous"
    assert check(proxy(4, 8, strides=(1, 4)), (8,)) == "input is not contiguous"
    assert check(proxy(4, 8, strides=(8, 1)), (8,)) is True


def test_unknown_strides_are_left_to_the_fix_up() -> None:
    check = checking(arg_meta={"input": [None, "contiguous"]})
    assert check(proxy(4, 8), (8,)) is True
    assert fix_ups(check.entry)["input"].order is CONTIGUOUS


def test_a_declared_fix_up_takes_any_strides() -> None:
    check = checking(arg_meta={"input": [None, "contiguous"]}, layout={"input": "contiguous"})
    assert check(torch.empty(8, 4).t(), (8,)) is True


ORDERS = {"D": [[0, 1], [1, 0]]}


def test_one_dim_order_alias_is_one_order_in_a_call() -> None:
    check = checking("aten::add.Tensor", arg_meta={"self": [None, "D"], "other": [None, "D"]}, dim_order_alias=ORDERS)
    x = torch.empty(2, 3)
    assert check(x, x) is True and check(x.t(), x.t()) is True
    assert check(x, torch.empty(3, 2).t()) == "other has dim order [1, 0], but D is [0, 1] here"
    row = torch.empty(1, 3)  # in both orders
    assert check(row, torch.empty(3, 2).t()) is True and check(row, x) is True
    assert check(x[:, :2], x) == "self's dim order is not D ([0, 1], [1, 0])"


def test_unknown_strides_are_declined_where_an_alias_has_two_orders() -> None:
    check = checking("aten::add.Tensor", arg_meta={"self": [None, "D"]}, dim_order_alias=ORDERS)
    assert check(proxy(2, 3), proxy(2, 3)) == "self's dim order is not known, but D allows several"


def test_a_dim_order_of_another_rank_does_not_fit() -> None:
    check = checking("torch.relu", arg_meta={"input": [None, "channels_last"]})
    x = torch.empty(2, 3, 4, 5)
    assert check(x.contiguous(memory_format=torch.channels_last)) is True
    assert check(x) == check(x[0]) == "input's dim order is not [0, 2, 3, 1]"


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.empty(()),
    "contiguous": lambda: torch.empty(2, 3, 4),
    "expanded": lambda: torch.empty(2, 1, 4).expand(2, 3, 4),
    "length 1": lambda: torch.empty(2, 4).t().unsqueeze(1),
    "empty": lambda: torch.empty(3, 0, 2).permute(2, 0, 1),
    "sliced": lambda: torch.empty(2, 3, 8)[..., ::2],
    "offset": lambda: torch.empty(25)[1:].view(2, 3, 4),
    "permuted": lambda: torch.empty(4, 2, 3).permute(1, 2, 0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_in_order_agrees_with_torch(name: str) -> None:
    tensor = TENSORS[name]()
    assert in_order(CONTIGUOUS, tensor) == tensor.is_contiguous()
    if tensor.ndim == 3:
        for dims in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
            assert in_order(DimOrder(dims), tensor) == tensor.permute(dims).is_contiguous()


@pytest.mark.parametrize("name", TENSORS)
def test_a_fix_up_puts_a_tensor_in_order_and_changes_no_value(name: str) -> None:
    tensor = TENSORS[name]().fill_(1)
    for order in (CONTIGUOUS, DimOrder((2, 0, 1)), DimOrder((1, 0, 2))):
        fixed = fix(tensor, Layout(order))
        assert torch.equal(fixed, tensor)
        assert (order.dims is not None and tensor.ndim != 3) or in_order(order, fixed)


def test_a_fix_up_moves_an_unaligned_tensor() -> None:
    entry = kernel("torch.relu", anything, resolver=OPERATORS, layout="contiguous", align=16)
    layout = fix_ups(entry)["input"]
    x = torch.arange(9.0)
    assert fix(x, layout) is x
    moved = fix(x[1:], layout)
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved, x[1:])


# shapes


@pytest.mark.parametrize(
    ("pattern", "shape", "wanted"),
    [
        ("[..., H, 8]", (2, 7), "shape [2, 7] does not fit [..., H, 8]"),
        ("[..., H, 8]", (2, 8), True),
        ("[B, S, H]", (2, 7), "shape [2, 7] does not fit [B, S, H]"),
        ("[B, B]", (2, 7), "shape [2, 7] does not fit [B, B], for B is 2 here"),
        ("[..., 2*D]", (3, 7), "shape [3, 7] does not fit [..., 2*D]"),
        ("[D, ..., 2*D]", (3, 5, 6), True),
        ("[D, ..., 2*D]", (3, 5, 8), "shape [3, 5, 8] does not fit [D, ..., 2*D], for D is 3 here"),
        ("[_, 4]", (9, 4), True),
        ("[...]", (), True),
        ("[]", (), True),
        ("[]", (1,), "shape [1] does not fit []"),
        ("[B, ...]", (), "shape [] does not fit [B, ...]"),
    ],
)
def test_a_shape_fits_its_pattern_or_says_so(pattern: str, shape: tuple, wanted: Any) -> None:
    assert checking("torch.relu", shape={"input": pattern})(torch.empty(shape)) == wanted


def test_a_named_dim_has_one_length_in_a_call() -> None:
    check = checking(shape={"input": "[..., H]", "weight": "[H]"})
    assert check(torch.empty(2, 64), (64,), torch.empty(65)) == (
        "weight: shape [65] does not fit [H], for H is 64 here"
    )


def test_where_speaks_of_dims_arguments_and_tensors() -> None:
    check = checking(
        shape={"input": "[..., H]"},
        where=["H % 8 == 0", "eps is not None", "normalized_shape == [H]", "input.ndim < 4"],
    )
    assert check(torch.empty(2, 100), (100,), None, 1e-6) == "H = 100 is not a multiple of 8"
    assert check(torch.empty(2, 64), (64,)) == "eps is None"
    assert check(torch.empty(2, 64), (2, 64), None, 1e-6) == "normalized_shape = (2, 64) is not (64,)"
    assert check(torch.empty(1, 1, 1, 64), (64,), None, 1e-6) == "input.ndim = 4 is at least 4"
    assert check(torch.empty(2, 64), (64,), None, 1e-6) is True


def test_a_number_proxy_is_its_number() -> None:
    assert checking(where="eps > 0")(proxy(2, 8), (8,), None, NumberProxy("s0", 2)) is True


# arguments that the kernel does not get


def test_an_argument_that_the_kernel_does_not_take_must_have_its_default() -> None:
    """A kernel that drops the bias is not tried for calls with one."""
    check = checking("torch.nn.functional.linear", args={"x": "input", "w": "weight"})
    x, weight = torch.empty(2, 8), torch.empty(4, 8)
    assert check(x, weight) is True and check(x, weight, None) is True
    assert check(x, weight, torch.empty(4)) == "bias is given, but the kernel takes none"


def test_an_argument_that_where_speaks_of_may_be_dropped() -> None:
    check = checking("aten::add.Tensor", args={"a": "self", "b": "other"}, where="alpha in (1, 2)")
    assert check(torch.empty(2), torch.empty(2), alpha=2) is True
    assert check(torch.empty(2), torch.empty(2), alpha=3) == "alpha = 3 is not in (1, 2)"


# all reasons


def test_all_reasons_are_told_when_no_kernel_takes_a_call() -> None:
    check = checking(
        name="rms_sm80", arg_meta=META, type_alias=HALF, device="cuda", shape={"input": "[..., H]"}, where="H % 8 == 0"
    )
    args, kwargs = (torch.empty(2, 7), (7,)), {"weight": torch.empty(7)}
    text = no_kernel(RMS, args, kwargs, {check.entry.name: check.failures(*args, **kwargs)})
    assert text == (
        f"no kernel for {RMS}(float32[2, 7] cpu, (7,), weight=float32[7] cpu): rms_sm80: device is cpu, needs cuda; "
        "dtype float32 not in T (float16, bfloat16); weight: dtype float32 not in T (float16, bfloat16); "
        "H = 7 is not a multiple of 8"
    )


def test_dims_of_a_shape_that_does_not_fit_are_not_complained_of_again() -> None:
    check = checking(shape={"input": "[B, S, H]"}, where=["H % 8 == 0", "eps is not None"])
    assert check.failures(torch.empty(2), (2,)) == ["shape [2] does not fit [B, S, H]", "eps is None"]


# in the executor


def manifest_entry(text: str) -> KernelEntry:
    return read(text).kernels[0]


def test_a_checker_for_an_executor_declines_with_the_reason() -> None:
    declared = kernel(RMS, anything, resolver=OPERATORS, where="eps is not None")
    check = make_checker(declared, OPERATORS.resolve(RMS), OPERATORS.target(RMS))
    assert check(torch.empty(2), (2,), None, 1e-6) is True
    declined = check(torch.empty(2), (2,))
    assert isinstance(declined, Declined) and declined.reason == "eps is None"


def test_an_aten_operator_is_the_torchlang_symbol_of_its_arguments() -> None:
    target = OPERATORS.target("aten::add.out")
    assert target.symbol.id == "torch.add" and target.names["input"] == "self"
    assert OPERATORS.target("aten::silu.out").symbol.id == "torch.nn.functional.silu"
    assert OPERATORS.target("prims.exp2").symbol.id == "prims.exp2"
    assert OPERATORS.target("torch.Tensor.relu").symbol.id == "torch.relu"


def test_an_operator_that_changes_its_arguments_is_no_symbol() -> None:
    assert OPERATORS.target("aten::relu_") is None


def test_a_checker_of_an_aten_kernel_takes_the_symbols_own_arguments() -> None:
    op = "aten::add.out"
    written = manifest_entry(entry(arg_meta="{self: T1, other: T1, out: T1}", where='"alpha == 1"'))
    check = make_checker(written, OPERATORS.resolve(op), OPERATORS.target(op))
    x = torch.empty(2)
    assert check(x, x) is True and check(input=x, other=x) is True
    assert check(x, x, alpha=2).reason == "alpha = 2 is not 1"
    assert check(x, x.half()).reason == "other has dtype float16, but T1 is float32 here"


def test_an_argument_that_the_aten_overload_lacks_must_have_its_default() -> None:
    op = "aten::max"
    declared = kernel(op, anything, resolver=OPERATORS)
    check = make_checker(declared, OPERATORS.resolve(op), OPERATORS.target(op))
    assert check(torch.empty(2)) is True
    assert check(torch.empty(2), 0).reason == "dim is given, but aten::max has none"


def test_every_symbol_of_forge_has_a_signature() -> None:
    names = [name for name in OPERATORS.names() if "::" not in name and not name.startswith("pattern:")]
    missing = [name for name in names if OPERATORS.resolve(name) is None]
    assert len(names) > 500 and missing == []


def test_a_checker_decides_by_few_calls() -> None:
    check = checking(
        arg_meta=META, type_alias=HALF, shape={"input": "[..., H]", "weight": "[H]"}, where="H % 8 == 0", device="cpu"
    )
    x, weight = proxy(2, 64), proxy(64)
    assert check(x, (64,), weight, 1e-6) is True
    profiler = cProfile.Profile()
    assert profiler.runcall(check, x, (64,), weight, 1e-6) is True
    assert sum(each.callcount for each in profiler.getstats()) < 200  # of Python and C; 135 are needed
