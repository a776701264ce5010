"""Complex numbers: the operations that accept them, and the refusals of torch.

Their results and gradients are tested with the other dtypes in test_ops.py. The tests here mix real and complex
operands, and test forge's own functions that distinguish the two.
"""

import pytest
import torch
from support import all_samples, chosen_opinfos, map_tensors, refusal, tensors_in
from test_ops import assert_same_flow, changed_inputs, differentiable_inputs, flow_of

import forge
from forge.api.functional import Direct
from forge.testing import OpInfo, Sample
from tests.seeding import seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        infos = chosen_opinfos(metafunc.config)
        if metafunc.function is test_a_real_operand_among_complex_ones:
            infos = [info for info in infos if info.gradient and torch.complex64 in info.dtypes]
        metafunc.parametrize("info", infos, ids=[info.name for info in infos])


def _differentiates(info: OpInfo, sample: Sample) -> bool:
    changed = changed_inputs(info, sample)
    flow = flow_of(info.reference or info.op, sample, differentiable_inputs(info, sample, changed), changed)
    return any(flow.requires_grad) and flow.refused is None


@pytest.mark.one_in(3)
def test_an_op_takes_complex64_where_torch_does(info: OpInfo) -> None:
    """torch differentiates a sample, or runs them all without a gradient; forge refuses the samples that torch
    refuses."""
    try:
        found = all_samples(info, "cpu", torch.complex64)
    except (RuntimeError, TypeError) as reason:
        pytest.skip(f"torch makes no samples: {reason}")
    refusals = [refusal(info, sample) for sample in found]
    taken = [
        sample
        for sample, refused in zip(found, refusals, strict=True)
        if refused is None and all(tensor.numel() for tensor in tensors_in((sample.args, sample.kwargs)))
    ]
    if info.gradient:
        wanted = any(_differentiates(info, sample) for sample in taken)
    else:
        wanted = not any(refusals)
    assert (torch.complex64 in info.dtypes) == wanted, "forge/testing/opinfos/complex.py says otherwise"
    for sample, refused in zip(found, refusals, strict=True):
        if refused is not None:
            with pytest.raises(type(refused)):
                Direct(info.op)(*sample.args, **sample.kwargs)
                pytest.fail(f"forge accepts {sample}", pytrace=False)


@pytest.mark.parametrize("executor", ["torch", "torch-prims"])
@pytest.mark.one_in(3)
def test_a_real_operand_among_complex_ones(info: OpInfo, executor: str) -> None:
    """Each operand of the first sample is made real in turn: eager's values and gradients, with real ones for the real
    operand."""
    for sample in all_samples(info, "cpu", torch.complex128)[:1]:
        count = sum(tensor.is_complex() for tensor in tensors_in((sample.args, sample.kwargs)))
        for position in range(count if count > 1 else 0):
            _check_mixed(info, _with_real(sample, position), executor)


def _with_real(sample: Sample, position: int) -> Sample:
    """Return the sample with the real part of one of its complex tensors."""
    remaining = iter(range(100))

    def choose(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.real.clone() if tensor.is_complex() and next(remaining) == position else tensor

    args, kwargs = map_tensors(choose, (sample.args, sample.kwargs))
    return Sample(args, kwargs)


def _check_mixed(info: OpInfo, sample: Sample, executor: str) -> None:
    refused = refusal(info, sample)
    if refused is not None:
        with pytest.raises(type(refused)):
            Direct(info.op, executors=[executor])(*sample.args, **sample.kwargs)
        return
    changed = changed_inputs(info, sample)
    wanted = differentiable_inputs(info, sample, changed)
    try:
        eager = flow_of(info.reference or info.op, sample, wanted, changed)
    except RuntimeError:  # torch.addr's backward multiplies operands of two dtypes
        return
    if eager.refused is None:
        assert_same_flow(flow_of(Direct(info.op, executors=[executor]), sample, wanted, changed), eager, None)


ON_BRANCH_CUTS = {
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "atanh": torch.atanh,
    "log": torch.log,
    "log1p": torch.log1p,
    "pow": lambda z: z**0.3,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}


@pytest.mark.parametrize("executor", ["torch", "torch-prims"])
@pytest.mark.parametrize("name", ON_BRANCH_CUTS)
def test_gradients_on_branch_cuts(name: str, executor: str) -> None:
    """The conjugate of the slope is not the slope of the conjugate there."""
    gradients = []
    for function in (ON_BRANCH_CUTS[name], Direct(ON_BRANCH_CUTS[name], executors=[executor])):
        z = torch.tensor([-2.5 + 0j, 2.5 + 0j, -0.5 + 0j, 2.5j, -2.5j], dtype=torch.complex128, requires_grad=True)
        gradients += torch.autograd.grad(function(z), z, torch.full_like(z, 1 + 2j))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_real_loss_of_complex_layers_and_real_parameters() -> None:
    """The model is a spectral layer with real weights and a complex one, products, a norm and an angle, through
    forge.jit."""

    def loss(x: torch.Tensor, w: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        spectrum = torch.complex(x, x.flip(0)) @ kernel
        mixed = torch.einsum("ij,kj->ik", spectrum * w, kernel)
        return mixed.abs().sum() + torch.linalg.vector_norm(mixed) + (mixed.angle() * w[:4]).sum() + mixed.var().sqrt()

    found = []
    for run in (loss, forge.jit(loss)):
        seed(0)
        x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        leaves = [x, w, torch.randn(4, 4, dtype=torch.complex128)]
        result = run(*[leaf.requires_grad_() for leaf in leaves])
        found.append([result, *torch.autograd.grad(result, leaves)])
    torch.testing.assert_close(found[1], found[0])
    torch._dynamo.reset()


def test_a_written_adjoint_writes_the_conjugate() -> None:
    def write(z: torch.Tensor) -> torch.Tensor:
        z = z * 1
        z.mH[0].mul_(1 + 1j)
        return z

    z = torch.randn(3, 2, dtype=torch.complex64)
    torch.testing.assert_close(Direct(write)(z), write(z))
