"""Programs that call kernels: their keys include the kernels' code, and they are found with them."""

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import from_disk, is_cached

import forge
from forge.executors.hubex import HubExecutor, verifier
from tests.executors.hubex.test_declared import SHAPES, norm, rms, rms_backward, rms_forward
from tests.hub.conftest import _needs_extra, _worker  # noqa: F401

X = torch.linspace(-1, 1, 24).view(6, 4)
calls: list[str] = []


@pytest.fixture(autouse=True)
def _calls() -> Iterator[None]:
    calls.clear()
    yield


def factor() -> float:
    return 1.0


def silu(input: torch.Tensor) -> torch.Tensor:
    return input / (1 + torch.exp(-input)) * factor()


def kernel(**options: Any) -> Any:
    return forge.kernel("torch.nn.functional.silu", silu, name="mine", grad="composite", **options)


def trained(*kernels: Any, function: Callable = F.silu, inputs: tuple = (X,)) -> Any:
    torch._dynamo.reset()
    jitted = forge.jit(function, kernels=kernels)
    given = [x.clone().requires_grad_() for x in inputs]
    y = jitted(*given)
    y.square().sum().backward()
    expected = [x.clone().requires_grad_() for x in inputs]
    function(*expected).square().sum().backward()
    torch.testing.assert_close(y, function(*inputs), rtol=1e-5, atol=1e-5, check_stride=False)
    torch.testing.assert_close([x.grad for x in given], [x.grad for x in expected], rtol=1e-4, atol=1e-5)
    return jitted


def test_a_kernel_declared_in_python_is_found_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_cached(trained(kernel()))
    from_disk(monkeypatch)
    jitted = trained(kernel())
    assert is_cached(jitted)
    assert "mine" in [row.executor for row in forge.explain(jitted).rows]


def test_a_kernel_with_a_backward_of_its_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = {"kernel_name": rms_backward, "forward": rms_forward, "saves": {"rstd": ["T", "[...]"]}}
    own = lambda: forge.kernel("pattern:rms_norm", rms, name="own", grad=grad, **SHAPES)
    inputs = (torch.randn(3, 5, 8), torch.randn(8))
    assert not is_cached(trained(own(), function=norm, inputs=inputs))
    from_disk(monkeypatch)
    jitted = trained(own(), function=norm, inputs=inputs)
    assert is_cached(jitted)
    assert [row.operation for row in forge.explain(jitted).rows if row.executor == "own"] == [
        "hub.own.forward",
        "hub.own.backward",
    ]


def test_without_the_kernel_it_is_another_program() -> None:
    trained(kernel())
    assert not is_cached(trained())
    assert not is_cached(trained(kernel(dtypes=[torch.float32])))


def test_what_a_kernel_reads_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(kernel())
    assert is_cached(trained(kernel()))
    other = types.FunctionType((lambda: 1.0 + 0.0 * 2).__code__, globals())
    monkeypatch.setitem(globals(), "factor", other)
    assert not is_cached(trained(kernel()))


def test_what_is_used_without_verification_is_for_those_who_trust_it() -> None:
    executor = lambda verify: [forge.executors.hubex.kernel_executor([kernel()], verify=verify), "torch"]
    for verify, found in ((False, False), (False, True), (True, False)):
        torch._dynamo.reset()
        jitted = forge.jit(F.silu, executors=executor(verify))
        jitted(X)
        assert is_cached(jitted) == found


@pytest.mark.parametrize("differs", ["builtin", "faster"])
def test_a_kernel_that_nobody_asked_for_makes_other_programs(differs: str) -> None:
    for value, found in ((False, False), (False, True), (True, False), (True, True)):
        torch._dynamo.reset()
        executor = HubExecutor("kernels", faster=value and differs == "faster")
        executor.add([replace(kernel(faster="input.numel >= 100"), builtin=value and differs == "builtin")])
        jitted = forge.jit(F.silu, executors=[executor, "torch"])
        jitted(X)
        assert is_cached(jitted) == found


def test_a_kernel_that_failed_for_now_is_not_left_out_for_ever(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    monkeypatch.setattr(type(verifier), "is_lasting", property(lambda self: False))
    jitted = trained(kernel())
    assert forge.explain(jitted).uncached == ["a kernel could not be verified, for a reason that may pass"]
    assert not programs.exists()


def test_a_bundle_of_what_was_found_on_disk_has_its_kernels(tmp_path: Path) -> None:
    trained(kernel())
    jitted = trained(kernel())
    assert is_cached(jitted)
    with pytest.raises(ValueError, match=r"kernel mine of .*silu was declared in Python"):
        forge.bundle(jitted, tmp_path / "bundle")
