"""Kernels that overwrite their arguments, and kernels that are correct for some values only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import kernel_executor
from forge.hub.manifest import ManifestError
from tests.hub.repositories import claimed, declined, executor, run

Tensor = torch.Tensor
FLOAT = [torch.float32]


def explained(kernel: Any, function: Callable, *args: Tensor) -> Any:
    return run(function, *args, by=kernel_executor([kernel]))


def taken(found: Any) -> list[str]:
    return [row.operation for row in found.rows if row.executor == "k"]


# mutates


def overwriting(input: Tensor) -> Tensor:
    return input.mul_(torch.sigmoid(input))


def silu_twice(x: Tensor) -> Tensor:
    return F.silu(x) + x


def test_a_kernel_gets_copies_of_what_it_says_it_overwrites() -> None:
    kernel = forge.kernel(
        "torch.nn.functional.silu", overwriting, name="k", args=["input"], dtypes=FLOAT, mutates="input"
    )
    assert taken(explained(kernel, silu_twice, torch.randn(4, 8))) == ["torch.nn.functional.silu"]


def test_two_kernels_that_overwrite_one_value_get_a_copy_each() -> None:
    kernel = forge.kernel(
        "torch.nn.functional.silu", overwriting, name="k", args=["input"], dtypes=FLOAT, mutates=["input"]
    )
    found = explained(kernel, lambda x: F.silu(x) * F.silu(x.view(-1)).view_as(x) + x, torch.randn(4, 8))
    assert len(taken(found)) == 2


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite the saved tensors with the gradients, like Liger's kernel."""
    s = torch.sigmoid(gate)
    of_up = grad * gate * s
    gate.copy_(grad.mul_(up) * (s + gate * s * (1 - s)))
    up.copy_(of_up)
    return gate, up


def model(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up + gate * up


def test_a_backward_may_overwrite_what_was_saved() -> None:
    grad = {"kernel_name": swiglu_backward, "mutates": ["gate", "up", "grad_output"]}
    kernel = forge.kernel("pattern:swiglu", swiglu, name="k", dtypes=FLOAT, where="gate.shape == up.shape", grad=grad)
    found = explained(kernel, model, *(torch.randn(4, 8, requires_grad=True) for _ in range(2)))
    assert taken(found) == ["pattern.swiglu", "hub.k.backward"]


def test_what_overwrites_without_saying_so_is_still_found(repository: Callable) -> None:
    made = repository("silent", "def f(x):\n    return x.mul_(torch.sigmoid(x))", op="torch.nn.functional.silu",
                      arg_meta="{input: T}", args="{x: input}")  # fmt: skip
    assert "was changed" in declined(run(silu_twice, torch.randn(5), by=executor(made)), made)


def test_a_manifest_that_mutates_what_there_is_not_says_so() -> None:
    with pytest.raises(ManifestError, match=r"mutates names 'imput', not an argument of .*silu"):
        forge.kernel("torch.nn.functional.silu", overwriting, mutates="imput")


# assumes and samples


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the reference, with one number per position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


ROTARY = """
def reference(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def f(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin, a, b = cos[..., :half], sin[..., :half], x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def equal_halves(cos, sin):
    half = cos.shape[-1] // 2
    return torch.equal(cos[..., :half], cos[..., half:]) and torch.equal(sin[..., :half], sin[..., half:])


def samples(S, D, batch, dtype, device):
    angles = torch.randn(S, D // 2, device=device)
    angles = torch.cat((angles, angles), -1)
    return {"x": torch.randn(*batch, S, D, dtype=dtype, device=device),
            "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
"""
ENTRY = {
    "pattern": "python:.:reference",
    "arg_meta": "{x: T, cos: T, sin: T}",
    "shape": '{x: "[..., S, D]", cos: "[S, D]", sin: "[S, D]"}',
    "where": "D % 4 == 0",
}


def inputs(equal: bool, *, grad: bool = False) -> list[Tensor]:
    angles = torch.randn(5, 8)
    angles = torch.cat((angles[:, :4],) * 2, -1) if equal else angles
    return [torch.randn(2, 5, 8, requires_grad=grad), angles.cos(), angles.sin()]


def test_a_kernel_that_assumes_equal_halves_runs_where_they_are_and_not_where_they_are_not(
    repository: Callable,
) -> None:
    made = repository("rope", ROTARY, assumes="equal_halves", samples="samples", **ENTRY)
    by = executor(made)
    jitted = forge.jit(rotate, executors=[by, "torch"])
    for equal in (True, False, True):
        given = inputs(equal)
        torch.testing.assert_close(jitted(*given), rotate(*given))
    assert claimed(forge.explain(jitted), made) == 1
    assert claimed(run(rotate, *inputs(False, grad=True), by=by), made) == 1


def test_an_assumption_that_no_sample_fulfils_asks_for_samples(repository: Callable) -> None:
    made = repository("bare", ROTARY, assumes="equal_halves", **ENTRY)
    reason = declined(run(rotate, *inputs(True), by=executor(made)), made)
    assert "equal_halves, which it assumes, does not hold; name a function in samples" in reason


POSITIVE = """
def f(input):
    return input * {factor}


def positive(input):
    return bool((input >= 0).all())


def samples(dtype, device, N):
    return {{"input": torch.rand(3, N, dtype=dtype, device=device)}}
"""


def test_a_repository_assumes_values_of_torchs_function_too(repository: Callable) -> None:
    entry = {
        "op": "torch.nn.functional.relu",
        "arg_meta": "{input: T}",
        "shape": '{input: "[3, N]"}',
        "args": "[input]",
    }
    entry |= {"assumes": "positive", "samples": "samples"}
    right, wrong = (repository(f"by_{n}", POSITIVE.format(factor=n), **entry) for n in (1, 2))
    by = executor(right)
    for x in (torch.rand(3, 4), torch.randn(3, 4)):
        assert claimed(run(lambda x: torch.relu(x) + 1, x, by=by), right) == 1
    reason = declined(run(lambda x: torch.relu(x) + 1, torch.rand(3, 4), by=executor(wrong)), wrong)
    assert "failed verification" in reason and "values differ" in reason


def positive(input: Tensor) -> bool:
    return bool((input >= 0).all())


def test_an_assumption_is_of_kernels_in_python_and_of_out_variants_too() -> None:
    def relu(out: Tensor, input: Tensor) -> None:
        out.copy_(input)

    def samples(dtype: torch.dtype, device: torch.device, **dims: Any) -> list[Tensor]:
        return [torch.rand(3, dims["N"], dtype=dtype, device=device)]

    kernel = forge.kernel("torch.relu", relu, name="k", out="out", args={"input": "input"}, dtypes=FLOAT,
                          shape={"input": "[3, N]"}, assumes=positive, samples=samples)  # fmt: skip
    jitted = forge.jit(torch.relu, executors=[kernel_executor([kernel]), "torch"])
    for x in (torch.rand(3, 4), torch.randn(3, 4)):
        torch.testing.assert_close(jitted(x), torch.relu(x))
    assert taken(forge.explain(jitted)) == ["torch.relu"]


def test_torchs_autograd_differentiates_what_ran() -> None:
    def samples(dtype: torch.dtype, device: torch.device, N: int) -> list[Tensor]:
        return [torch.rand(3, N, dtype=dtype, device=device)]

    kernel = forge.kernel("torch.relu", lambda input: input * 1, name="k", args=["input"], dtypes=FLOAT,
                          shape={"input": "[3, N]"}, assumes=positive, samples=samples, grad="autograd")  # fmt: skip
    for x in (torch.rand(3, 4) + 1, torch.randn(3, 4)):
        assert taken(explained(kernel, lambda x: torch.relu(x) * 2, x.requires_grad_()))


def test_a_kernel_that_is_wrong_on_its_own_samples_fails() -> None:
    kernel = forge.kernel("torch.relu", lambda input: input + 1, name="k", args=["input"], dtypes=FLOAT,
                          shape={"input": "[3, N]"}, assumes=positive,
                          samples=lambda dtype, device, N: torch.rand(3, N))  # fmt: skip
    found = explained(kernel, lambda x: torch.relu(x) + 1, torch.rand(3, 4))
    assert not taken(found)


def test_an_assumption_does_not_go_with_a_backward_kernel() -> None:
    with pytest.raises(ManifestError, match="assumes goes with grad: none, composite or autograd"):
        forge.kernel("torch.relu", lambda input: input, assumes=positive, grad=lambda grad, input: grad)
