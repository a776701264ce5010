"""The isolation of kernels in verification: a kernel runs apart from its judge, and returns only tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge.executors.hubex.verification import verification_cache
from tests.hub.repositories import GELU, LAYER_NORM, claimed, declined, executor, gelu, layer_norm, norm_inputs, run

SAY = """
import os, pickle, struct, sys

def say():
    messages = sys.modules["forge.executors.hubex.verification.messages"]
    data = pickle.dumps(("answer", messages.Answer(None, 7)))
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(("pipe:", "socket:")):
                os.set_blocking(fd, False)
                os.write(fd, struct.pack("!i", len(data)) + data)
        except OSError:
            pass

def is_verified():
    return sys.modules["forge.executors.hubex.verification.process"].verifying.active
"""
FORGERS = {
    "writes an answer into each channel": "def f(x):\n    if is_verified():\n        say()\n    return x * 2\n",
    "does so and ends": "def f(x):\n    if is_verified():\n        say()\n        os._exit(0)\n    return x * 2\n",
    "makes all tensors close": (
        "def f(x):\n    if is_verified():\n        torch.allclose = lambda *args, **kwargs: True\n    return x * 2\n"
    ),
    "makes all comparisons silent": (
        "def f(x):\n    if is_verified():\n"
        "        for name, module in list(sys.modules.items()):\n"
        "            if name.endswith('verification.comparison'):\n"
        "                module._compare = lambda *args: None\n"
        "    return x * 2\n"
    ),
    "makes the reference its own": (
        "def f(x):\n    if is_verified():\n"
        "        torch.nn.functional.gelu = torch._C._nn.gelu = F.gelu = lambda x, **rest: x * 2\n    return x * 2\n"
    ),
}


@pytest.mark.parametrize("code", FORGERS.values(), ids=FORGERS)
def test_a_wrong_kernel_cannot_call_itself_right(repository: Callable, code: str) -> None:
    made = repository("forger", SAY + code, **GELU)
    assert declined(run(gelu, torch.randn(4, 6), by=executor(made)), made)


def test_what_a_forward_saves_and_a_graph_of_torchs_are_handed_over(repository: Callable) -> None:
    made = repository("graph", "def f(x):\n    return F.gelu(x)\n", **{**GELU, "grad": "autograd"})
    assert claimed(run(gelu, torch.randn(4, 6, requires_grad=True), by=executor(made)), made)


def test_a_graph_with_a_wrong_backward_is_found(repository: Callable) -> None:
    code = """
        class G(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return F.gelu(x)

            @staticmethod
            def backward(ctx, g):
                return g * 2

        def f(x):
            return G.apply(x)
    """
    made = repository("wrong_graph", code, **{**GELU, "grad": "autograd"})
    reason = declined(run(gelu, torch.randn(4, 6, requires_grad=True), by=executor(made)), made)
    assert "the gradient of input" in reason


def test_what_is_no_tensor_is_the_kernels_error(repository: Callable) -> None:
    made = repository("objects", "def f(x):\n    return object()\n", **GELU)
    assert "TypeError" in declined(run(gelu, torch.randn(4, 6), by=executor(made)), made)


def test_the_judge_does_not_import_the_kernel(repository: Callable, tmp_path: Path) -> None:
    code = f"""
        import os
        with open({str(tmp_path / "imports")!r}, "a") as file:
            file.write(f"{{os.getppid()}} {{os.getpid()}}\\n")

        def f(x, weight, bias, eps):
            return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    """
    made = repository("traced", code, **LAYER_NORM)
    assert claimed(run(layer_norm, *norm_inputs(), by=executor(made)), made)
    pairs = [line.split() for line in (tmp_path / "imports").read_text().splitlines()]
    judge = str(verification_cache.worker.server.judge)
    assert [each[0] for each in pairs[1:]] == [judge]  # it is imported here, and in a child of the judge
