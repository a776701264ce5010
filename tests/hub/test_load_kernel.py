"""Direct calls of kernels through forge.load_kernel, which makes the same checks."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.hub import HubNotice


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def silu(input: torch.Tensor) -> torch.Tensor:
    return input / (1 + torch.exp(-input))


def declaration(name: str, function: Callable = silu, **options: object) -> object:
    return forge.kernel(F.silu, function, name=name, **{"dtypes": [torch.float32], "grad": "composite", **options})


def test_it_runs_forward_and_backward() -> None:
    loaded = forge.load_kernel(F.silu, kernels=[declaration("mine")])
    assert repr(loaded) == "<kernels of torch.nn.functional.silu: mine>"
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(loaded(x), F.silu(x))
    (ours,), (theirs,) = (torch.autograd.grad(f(x).sum(), x) for f in (loaded, F.silu))
    torch.testing.assert_close(ours, theirs)


def test_it_runs_as_verified_under_autocast() -> None:
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = input @ weight.T
        return product if bias is None else product + bias

    loaded = forge.load_kernel(F.linear, kernels=[forge.kernel(F.linear, linear, dtypes=[torch.float32], grad="none")])
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loaded(x, weight)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, F.linear(x, weight))


def test_the_best_that_takes_a_call_runs_it() -> None:
    calls = []

    def counted(input: torch.Tensor) -> torch.Tensor:
        calls.append(input.shape)
        return silu(input)

    kernels = [declaration("any"), declaration("vectors", counted, where="input.ndim == 1", priority=1)]
    loaded = forge.load_kernel("torch.nn.functional.silu", kernels=kernels)
    assert loaded.kernels == ["vectors", "any"]
    loaded(torch.randn(2, 3))
    assert torch.Size([2, 3]) not in calls
    loaded(torch.randn(5))
    assert calls[-1] == torch.Size([5])


def test_a_call_that_none_takes_says_each_reason() -> None:
    kernels = [declaration("mine"), declaration("flat", where="input.ndim == 1", priority=1)]
    loaded = forge.load_kernel(F.silu, kernels=kernels)
    wanted = (
        "no kernel for torch.nn.functional.silu(float64[2, 3] cpu): flat: dtype float64 not in T (float32); "
        "input.ndim = 2 is not 1; mine: dtype float64 not in T (float32)"
    )
    with pytest.raises(NotImplementedError, match=re.escape(wanted)):
        loaded(torch.randn(2, 3, dtype=torch.float64))


def test_a_wrong_kernel_is_not_called() -> None:
    loaded = forge.load_kernel(F.silu, kernels=[declaration("wrong", lambda input: silu(input) + 1)])
    with pytest.warns(HubNotice), pytest.raises(NotImplementedError, match="wrong: failed verification on input: "):
        loaded(torch.randn(3))


def test_force_asks_neither_constraints_nor_verification() -> None:
    wrong = declaration("wrong", lambda input: silu(input) + 1)
    x = torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(forge.load_kernel(F.silu, kernels=[wrong], force=True)(x), silu(x) + 1)


def test_a_name_chooses_one() -> None:
    kernels = [declaration("one", library="acme", priority=1), declaration("two", library="acme")]
    for name in ("two", "acme.two"):
        assert forge.load_kernel(F.silu, name, kernels=kernels).kernels == ["acme.two"]
    with pytest.raises(ValueError, match=r"unknown kernel 'tow'; did you mean 'two'\? known: one, two"):
        forge.load_kernel(F.silu, "tow", kernels=kernels)


def test_an_operator_without_kernels_or_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"no kernel of torch.nn.functional.gelu; there are"):
        forge.load_kernel(F.gelu, kernels=[declaration("mine")])
    with pytest.raises(
        ValueError, match=r"^forge\.load_kernel: unknown operator 'pattern:swigl'; did you mean 'pattern:swiglu'"
    ):
        forge.load_kernel("pattern:swigl", kernels=[declaration("mine")])
    with pytest.raises(ValueError, match=r"^forge\.load_kernel: unknown operator 'nothing'; name a torch function"):
        forge.load_kernel("nothing", kernels=[declaration("mine")])
    with pytest.raises(TypeError, match=r"^forge\.load_kernel: kernels is 'mine', but must be a list"):
        forge.load_kernel(F.silu, kernels="mine")


def test_a_pattern_is_called_by_its_parameters() -> None:
    kernel = forge.kernel("pattern:swiglu", lambda gate, up: F.silu(gate) * up, name="swiglu")
    gate, up = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(forge.load_kernel("pattern:swiglu", kernels=[kernel])(gate, up), F.silu(gate) * up)
