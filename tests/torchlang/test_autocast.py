"""Operations under torch.autocast have eager's results, in the same dtypes."""

import operator
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import forge
from forge.api.functional import Direct
from forge.testing import OpInfo, Sample, all_opinfos
from forge.torch_internals.versions import TORCH
from tests.seeding import seed

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SAMPLES = 2
# their values are uninitialized memory
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "Tensor.new_empty", "Tensor.new_empty_strided")
# eager rounds each value of their weights, and the terms of a sum may cancel
ROUNDED = ("forge.linear_int8", "forge.linear_int4", "forge.linear_fp8")
# eager rounds the normalized values before it adds the bias, and the two may cancel
ROUNDED += ("native_group_norm", "_batch_norm_with_update")
NOT_ON_CUDA = ("nn.functional.scaled_dot_product_attention.hidden_row",)
# no conversion of the arguments reproduces autocast's effect inside them: opaque calls under forge.jit
MIXED = {
    "ctc_loss",
    "gru",
    "gru.dropout",
    "gru_cell",
    "istft",
    "lstm",
    "lstm_cell",
    "narrow.at_a_tensor",
    "nn.functional.ctc_loss",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.gaussian_nll_loss",
    "nn.functional.local_response_norm",
    "nn.functional.lp_pool3d",
    "pca_lowrank",
    "svd_lowrank",
    "tensordot",
}
MIXED_ON_CUDA = {
    "_batch_norm_with_update",  # at all: cuDNN's residuals are not known
    "cumulative_trapezoid",
    "lstm.dropout",
    "nn.functional.cross_entropy",
    "nn.functional.gumbel_softmax",
    "nn.functional.multilabel_soft_margin_loss",
    "nn.functional.normalize",
    "pairwise_distance",
    "rnn_relu",
    "rnn_relu.dropout",
    "rnn_tanh",
    "rnn_tanh.dropout",
    "trapezoid",
    "trapz",
}
INSIDE = {
    "aten._safe_softmax",
    "_weight_norm",
    "ldexp",
    "linalg.matrix_power",
    "linalg.pinv",
    "nn.functional.affine_grid",
    "nn.functional.bilinear",
    "pinverse",
    "Tensor.ldexp",
    "Tensor.trace",
    "trace",
}


if TORCH < (2, 13):
    # a fake process group leaves its results unchanged
    UNSET += ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "unshard")
    MIXED |= {"nanquantile", "quantile", "Tensor.nanquantile", "Tensor.quantile"}


def cloned(tree: Any, gradient: bool) -> Any:
    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(gradient and leaf.is_floating_point())

    return _pytree.tree_map(clone, tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(function: Any, gradient: bool, sample: Sample, device: str) -> tuple[list, list]:
    """Return the results and the gradients of a call under autocast, each call with the same random numbers."""
    args, kwargs = cloned((sample.args, sample.kwargs), gradient)
    seed(0)
    with torch.autocast(device, torch.bfloat16):
        result = tensors(function(*args, **kwargs))
    wanted = [leaf for leaf in tensors((args, kwargs)) if leaf.requires_grad]
    outputs = [each for each in result if each.requires_grad]
    if not (wanted and outputs):
        return result, []
    ones = [torch.ones_like(each) for each in outputs]
    return result, list(torch.autograd.grad(outputs, wanted, ones, allow_unused=True, materialize_grads=True))


@pytest.mark.filterwarnings("ignore::UserWarning")  # deprecations of torch's
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("info", [info for info in all_opinfos() if info.name not in UNSET], ids=lambda info: info.name)
@pytest.mark.one_in(6)
def test_an_operation_is_as_in_eager(info: OpInfo, dtype: torch.dtype, device: str) -> None:
    if dtype not in info.dtypes:
        pytest.skip(f"{info.name} does not take {dtype}")
    if device == "cuda" and info.name in NOT_ON_CUDA:
        pytest.skip("eager's cuDNN kernel gives no 0 for a hidden row")
    compared = 0
    for sample in info.samples(info, torch.device(device), dtype):
        gradient = info.gradient
        try:
            wanted, wanted_gradients = run(info.op, gradient, sample, device)
        except (RuntimeError, TypeError, ValueError):  # it writes to a leaf, or torch refuses it under autocast
            try:
                gradient = False
                wanted, wanted_gradients = run(info.op, gradient, sample, device)
            except (RuntimeError, TypeError, ValueError):
                continue
        try:
            found, gradients = run(Direct(info.op), gradient, sample, device)
        except NotImplementedError as error:
            assert info.name in MIXED | INSIDE | (MIXED_ON_CUDA if device == "cuda" else set()), error
            continue
        for ours, eager in zip(found, wanted, strict=True):
            assert ours.dtype == eager.dtype
            within = {"rtol": 3e-2, "atol": 1e-5} if eager.dtype == torch.bfloat16 else {}  # its rounding, twice
            if info.name in ROUNDED and eager.dtype == torch.bfloat16:
                within["atol"] = 2e-2
            torch.testing.assert_close(ours, eager, **within, equal_nan=True)
        for ours, eager in zip(gradients, wanted_gradients, strict=True):
            if eager.dtype.itemsize == 1 and eager.is_floating_point():  # assert_close compares their bits
                assert torch.equal(ours.float(), eager.float())
                continue
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2, equal_nan=True)
        compared += 1
        if compared == SAMPLES:
            return


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow", "floordiv", "mod"])
def test_reflected_operators_of_numbers(name: str) -> None:
    operate = getattr(operator, name)
    x = torch.rand(3, 3) + 1
    with torch.autocast("cpu", torch.bfloat16):
        (call,) = forge.trace(lambda x: operate(2.0, x), x).bound_symbols
        expected = operate(2.0, x)
    assert call.output.dtype == expected.dtype
