"""Kernels are verified before they are trusted: a wrong kernel is not used, and causes no other harm."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import cli
from forge.executors.calls import Call, Meta
from forge.executors.executor import Executor
from forge.executors.hubex import Verifier, kernel_executor, operators
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.verification import process, verification_cache
from forge.executors.hubex.verification.messages import Answer
from forge.executors.hubex.verification.process import can_fork
from forge.executors.hubex.verification.samples import call_cases, general_cases, symbolic_cases
from forge.hub import HubNotice
from forge.hub.manifest import kernel
from tests.hub.repositories import (
    GELU,
    LAYER_NORM,
    ROWS,
    Repository,
    claimed,
    declined,
    executor,
    gelu,
    layer_norm,
    norm_inputs,
    run,
)

# the warnings of real kernels


def test_a_crash_on_unaligned_memory_costs_the_kernel_its_place(repository: Callable) -> None:
    made = repository(
        "unaligned", "def f(x):\n    return ctypes.string_at(0) if x.data_ptr() % 16 else F.gelu(x)", **GELU
    )
    reason = declined(run(gelu, torch.randn(5)[1:], by=executor(made)), made)
    assert reason.startswith("crashed (signal 11) on input: float32[") and reason.endswith("(unaligned)")


def test_a_kernel_that_ignores_strides_is_found(repository: Callable) -> None:
    made = repository("strided", f"def f(x):\n    return F.gelu({ROWS})", **GELU)
    reason = declined(run(gelu, torch.randn(3, 8)[:, ::2], by=executor(made)), made)
    assert reason.startswith("failed verification on input: float32[") and "values differ by up to" in reason


def test_a_kernel_that_ignores_strides_is_right_where_its_layout_is_declared(repository: Callable) -> None:
    made = repository("declared", f"def f(x):\n    return F.gelu({ROWS})", layout="contiguous", **GELU)
    assert claimed(run(gelu, torch.randn(3, 8)[:, ::2], by=executor(made)), made) == 1


def test_a_hidden_size_that_it_rejects_is_named(repository: Callable) -> None:
    code = """
        def f(x, weight, bias, eps):
            if x.shape[-1] % 4:
                raise RuntimeError(f"hidden size {x.shape[-1]}")
            return F.layer_norm(x, weight.shape, weight, bias, eps)
    """
    made = repository("hidden", code, **LAYER_NORM)
    reason = declined(run(layer_norm, *norm_inputs(), by=executor(made)), made)
    assert reason.startswith("failed verification on input: float32[") and "raises RuntimeError: hidden size" in reason
    limited = repository("limited", code, **{**LAYER_NORM, "where": '["normalized_shape == (H,)", "H % 4 == 0"]'})
    assert claimed(run(layer_norm, *norm_inputs(), by=executor(limited)), limited) >= 1


def test_a_layer_norm_that_drops_the_bias_is_found(repository: Callable) -> None:
    code = "def f(x, weight, bias, eps):\n    return F.layer_norm(x, weight.shape, weight, None, eps)"
    made = repository("dropped", code, **LAYER_NORM)
    reason = declined(run(layer_norm, *norm_inputs(), by=executor(made)), made)
    assert "bias: float32[" in reason and "values differ by up to" in reason and "tolerance 1e-05" in reason


def test_a_hang_costs_the_kernel_its_place(repository: Callable) -> None:
    made = repository("hangs", "def f(x):\n    time.sleep(1000)", **GELU)
    reason = declined(run(gelu, torch.randn(4), by=executor(made, seconds=2)), made)
    assert reason.startswith("no answer within 2 s on input: float32[")


def test_an_overwritten_input_is_found(repository: Callable) -> None:
    made = repository("inplace", "def f(x):\n    y = F.gelu(x)\n    x.mul_(2)\n    return y", **GELU)
    assert "an input, or memory beside it, was changed" in declined(run(gelu, torch.randn(4), by=executor(made)), made)


BACKWARD = "{kernel_name: g, args: {grad_output: grad_output, x: input}, returns: [input]}"
GELU_BACKWARD = "torch.ops.aten.gelu_backward(grad_output, x)"


def test_an_overwritten_gradient_is_found(repository: Callable) -> None:
    code = f"""
        def f(x):
            return F.gelu(x)

        def g(grad_output, x):
            gradient = {GELU_BACKWARD}
            grad_output.zero_()
            return gradient
    """
    made = repository("overwrites", code, **{**GELU, "grad": BACKWARD})
    explained = run(gelu, torch.randn(4, requires_grad=True), by=executor(made))
    assert "the incoming gradient was overwritten" in declined(explained, made)


def test_a_backward_that_needs_a_contiguous_gradient_gets_one(repository: Callable) -> None:
    code = f"""
        def f(x):
            return F.gelu(x)

        def g(grad_output, x):
            assert grad_output.is_contiguous()
            return {GELU_BACKWARD}
    """
    made = repository("contiguous", code, **{**GELU, "grad": BACKWARD})
    assert claimed(run(gelu, torch.randn(4, requires_grad=True), by=executor(made)), made) >= 1


def test_a_wrong_gradient_is_found(repository: Callable) -> None:
    code = f"def f(x):\n    return F.gelu(x)\n\n\ndef g(grad_output, x):\n    return 1.01 * {GELU_BACKWARD}"
    made = repository("gradient", code, **{**GELU, "grad": BACKWARD})
    reason = declined(run(gelu, torch.randn(4, requires_grad=True), by=executor(made)), made)
    assert "the gradient of input: values differ by up to" in reason


SAVING = {"args": ["grad_output", "saved"], "saves": {"saved": ["T", "[..., H]"]}, "returns": ["input"]}


def training(
    forward: str = "F.gelu(x), x + 0", backward: str = "gelu_backward(grad_output, x)", first: str = ""
) -> str:
    """Return the code of a kernel with these expressions of its forward for training and of its backward."""
    return textwrap.dedent(f"""
        gelu_backward, kept = torch.ops.aten.gelu_backward, torch.empty(4096)

        def f(x):
            return F.gelu(x)

        def h(x):
            y = F.gelu(x)
            return {forward}

        def g(grad_output, x):
            return {backward}
    """)


BUFFER = "kept[:x.numel()].view(x.shape)"
WRONG_TRAINING = {
    training("y * 1.1, x + 0"): "the result of the forward for training: values differ by",
    training("y.nan_to_num(3.0), x + 0"): "(NaN): the result of the forward for training: values differ: 3 at [",
    training("y, x.double()"): "the saved saved: dtype is torch.float64, but is declared to be torch.float32",
    training("y, x[None]"): "the saved saved: shape is torch.Size([1, 5]), but is declared to be (5,)",
    training("y, 3"): "the saved saved is a int, but must be a tensor",
    training("y"): "the forward returns a Tensor, but must return 2: the result, the saved saved",
    training("y, torch.from_numpy(x.numpy())"): "it returns an argument's memory as a tensor of its own",
    training("(z := x + 0), z.data"): "it returns another result's memory as a tensor of its own",
    training(f"y, {BUFFER}.copy_(x)"): "overwrit",
    training(f"y, x + {BUFFER}.copy_(x) * 0", f"gelu_backward(grad_output, {BUFFER})"): "the gradient of input: va",
    training(backward="(gelu_backward(grad_output, x), x.numpy().fill(2))[0]"): (
        "the backward overwrites the saved saved, which another one reads; mutates names what it may overwrite"
    ),
    training(backward="grad_output, x"): "the backward returns 2 values, but must return one tensor: the gradient",
    training(backward="None"): "the backward returns None, but must return one tensor: the gradient of input",
    training(backward="gelu_backward(grad_output, x + 0 * torch.rand(1))"): "it changes the state of torch's random",
    training("F.gelu(x + 0 * torch.rand(1)), x + 0"): "it changes the state of torch's random",
}


@pytest.mark.parametrize("how", ["repository", "python"])
@pytest.mark.parametrize(("code", "reason"), WRONG_TRAINING.items())
def test_a_forward_for_training_and_its_backward_are_compared(
    repository: Callable, how: str, code: str, reason: str
) -> None:
    x = torch.randn(5, requires_grad=True)
    for text, is_used in ((training(), True), (code, False)):
        made = _saving_repository(repository, text) if how == "repository" else _saving_kernel(text)
        jitted = forge.jit(gelu, kernels=[made])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HubNotice)
            jitted(x).sum().backward()
        rows = forge.explain(jitted).rows
        assert any(row.executor == "acme.trains" for row in rows) == is_used
        declined = [text for row in rows for _, text in row.declined]
        assert is_used or any(reason in each for each in declined), declined


def _saving_repository(repository: Callable, code: str) -> str:
    grad = json.dumps({"kernel_name": "g", "forward": "h", **SAVING})
    return str(repository("trains", code, **{**GELU, "shape": '{input: "[..., H]"}', "grad": grad}).folder)


def _saving_kernel(code: str) -> Any:
    functions: dict[str, Any] = {"torch": torch, "F": F}
    exec(textwrap.dedent(code), functions)
    return forge.kernel(
        "torch.nn.functional.gelu", functions["f"], name="trains", library="acme", args={"x": "input"},
        arg_meta={"input": "T"}, type_alias={"T": ["float32"]}, shape={"input": "[..., H]"},
        where=["approximate == 'none'"],
        grad={"kernel_name": functions["g"], "forward": functions["h"], **SAVING},
    )  # fmt: skip


HALF = """
    def f(x, weight, bias, eps):
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def g(grad_output, x, weight, bias, eps):
        aten = torch.ops.aten
        _, mean, rstd = aten.native_layer_norm(x, weight.shape, weight, bias, eps)
        mask = [True, False, False]
        return aten.native_layer_norm_backward(grad_output, x, weight.shape, mean, rstd, weight, bias, mask)[0]
"""
HALF_ARGS = "{grad_output: grad_output, x: input, weight: weight, bias: bias, eps: eps}"


def test_an_argument_that_the_backward_leaves_out_has_a_gradient_all_the_same(repository: Callable) -> None:
    grad = f"{{kernel_name: g, args: {HALF_ARGS}, returns: [input]}}"
    made = repository("half", HALF, **{**LAYER_NORM, "grad": grad})
    by = executor(made)
    x, *frozen = norm_inputs()
    explained = run(layer_norm, x, *[each.detach() for each in frozen], by=by)
    assert claimed(explained, made) == 2  # forward and backward
    assert claimed(run(layer_norm, *norm_inputs(), by=by), made) == 1  # its own forward, a derived backward


def test_an_output_first_signature_works_through_the_adapter(repository: Callable) -> None:
    made = repository("first", "def f(out, x):\n    out.copy_(F.gelu(x))", out="out", **GELU)
    assert claimed(run(gelu, torch.randn(4), by=executor(made)), made) == 1


def test_a_write_behind_the_output_is_found(repository: Callable) -> None:
    code = """
        def f(out, x):
            out.copy_(F.gelu(x))
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    """
    made = repository("behind", code, out="out", **GELU)
    assert "memory beside its output was written to" in declined(run(gelu, torch.randn(4), by=executor(made)), made)


def test_a_result_in_an_inputs_memory_is_found(repository: Callable) -> None:
    made = repository("aliases", "def f(x):\n    return x", op="torch.clone", arg_meta="{input: T}", args="{x: input}")
    explained = run(lambda x: x.clone() + 1, torch.randn(4), by=executor(made))
    assert "it lies in an input's memory" in declined(explained, made)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "kept = {}\n\ndef f(x):\n    at = kept.setdefault((x.shape, x.dtype), torch.empty_like(x))\n"
            "    return at.copy_(F.gelu(x))",
            "raises RuntimeError: it returns memory that it has returned before: the earlier result is overwritten",
        ),
        ("def f(x):\n    return [F.gelu(x)]", "it returns a list, but must return a tensor; result: result[i] in the"),
        ("def f(x):\n    return None", "it returns a NoneType, but must return a tensor"),
        (
            "def f(x):\n    return torch.nn.Parameter(F.gelu(x))",
            "raises TypeError: it returns a Parameter, but must return a torch.Tensor",
        ),
        (
            "def f(x):\n    return F.gelu(x).requires_grad_()",
            "raises RuntimeError: it returns a tensor that requires a gradient, where nothing that it is given does",
        ),
        (
            "def f(x):\n    with torch.inference_mode():\n        return F.gelu(x)",
            "raises RuntimeError: it returns a tensor of inference mode, which autograd does not take",
        ),
        (
            "def f(x):\n    return F.gelu(x + 0 * torch.rand(()))",
            "it changes the state of torch's random numbers",
        ),
        ("def f(x):\n    torch.manual_seed(0)\n    return F.gelu(x)", "it changes the state of torch's random numbers"),
        ("import random\n\ndef f(x):\n    return F.gelu(x + 0 * random.random())", "the state of Python's random numb"),
        (
            "def f(x):\n    torch.set_default_dtype(torch.float64)\n    return F.gelu(x)",
            "it changes torch's default",
        ),
        (
            "def f(x):\n    torch.set_grad_enabled(False)\n    return F.gelu(x)",
            "it changes the grad mode",
        ),
        ("def f(x):\n    torch.set_num_threads(3)\n    return F.gelu(x)", "it changes the number of threads, which is"),
    ],
    ids="kept list None parameter requires_grad inference draws seeds python_random dtype grad_mode threads".split(),
)
@pytest.mark.parametrize("how", ["repository", "python"])
def test_a_result_that_a_program_cannot_have_for_its_own_is_found(
    repository: Callable, code: str, reason: str, how: str
) -> None:
    if how == "repository":
        by = executor(repository("own", code, **GELU))
    else:
        functions: dict[str, Any] = {"torch": torch, "F": F}
        exec(code, functions)
        by = in_python(functions["f"])
    (row, *_) = run(gelu, torch.randn(3, 8), by=by).rows
    assert row.executor == "torch" and reason in row.declined[0][1]


def test_a_kernel_may_draw_where_the_operation_draws() -> None:
    @torch.library.custom_op("verify_tests::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.rand(())

    noise.register_fake(torch.empty_like)
    kernel = forge.kernel("verify_tests::noise", lambda x: x + 0 * torch.rand(()), name="draws", dtypes=[torch.float32])
    explained = run(lambda x: torch.ops.verify_tests.noise(x) + 1, torch.randn(3, 8), by=kernel_executor([kernel]))
    assert explained.rows[0].executor == "draws"


def test_two_results_in_the_same_memory_are_found() -> None:
    @torch.library.custom_op("verify_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 0, x + 0

    @twice.register_fake
    def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def same(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 0
        return y, y

    def beside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.stack([x, x], -1).unbind(-1)

    for function, is_used in ((same, False), (beside, True)):
        kernel = forge.kernel("verify_tests::twice", function, dtypes=[torch.float32])
        explained = run(
            lambda x: torch.cat(torch.ops.verify_tests.twice(x)), torch.randn(3, 8), by=kernel_executor([kernel])
        )
        row = next(row for row in explained.rows if "twice" in row.operation)
        assert (row.executor == function.__name__) == is_used
        assert is_used or "results 0 and 1 lie in the same memory" in row.declined[0][1]


def test_torch_warns_of_no_sample() -> None:
    library = torch.library.Library("verify_tests_plain", "FRAGMENT")
    library.define("gelu(Tensor x) -> Tensor")
    library.impl("gelu", lambda x: F.gelu(x.detach()), "CPU")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verify_tests_plain.gelu(x)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*This may lead to silently incorrect behavior")
        explained = run(gelu, torch.randn(4, requires_grad=True), by=in_python(plain, grad="autograd"))
    assert "the gradient of input: values differ" in str(explained)


def test_a_backward_that_spoils_its_own_graph_is_found() -> None:
    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x + 0)
            return F.gelu(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            result = torch.ops.aten.gelu_backward(gradient, x)
            x.numpy().fill(2)
            return result

    def spoils(x: torch.Tensor) -> torch.Tensor:
        return Gelu.apply(x)

    explained = run(gelu, torch.randn(4, requires_grad=True), by=in_python(spoils, grad="autograd"))
    assert "the gradient of input of a second backward: values differ" in str(explained)


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        (torch.exp, torch.exp, lambda x: torch.where((x > 4) & (x < 50), x, torch.exp(x))),
        (torch.tanh, torch.tanh, lambda x: torch.where((x.abs() > 3.2) & (x.abs() < 50), x / 4, torch.tanh(x))),
        (F.silu, F.silu, lambda x: torch.where(x < -3, 0, F.silu(x))),
    ],
    ids=["exp", "tanh", "silu"],
)
def test_a_kernel_that_is_wrong_away_from_zero_is_found(op: Callable, right: Callable, wrong: Callable) -> None:
    x = torch.randn(100) * 5
    for function, is_used in ((right, True), (wrong, False)):
        given = forge.kernel(op, lambda input, f=function: f(input), name="ranged", dtypes=[torch.float32])
        jitted = forge.jit(op, kernels=[given])
        torch.testing.assert_close(jitted(x), op(x))
        (row,) = forge.explain(jitted).rows
        assert (row.executor == "ranged") == is_used
        assert is_used or "(large values): values differ" in dict(row.declined)["ranged"]


def test_one_tensor_for_two_arguments_is_tried(repository: Callable) -> None:
    code = "def f(x, y):\n    return x * y + (x.data_ptr() == y.data_ptr())"
    made = repository("twice", code, op="torch.mul", arg_meta="{input: T, other: T}", args="{x: input, y: other}")
    reason = declined(run(lambda x: x * x, torch.randn(3, 8), by=executor(made)), made)
    assert "(one tensor for several arguments)" in reason and "values differ" in reason


def test_lengths_that_are_alike_do_not_grow_into_a_sample_that_takes_minutes() -> None:
    seen = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append(query.numel())
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    dims = "[B, H, S, D]"
    kernel = forge.kernel(
        F.scaled_dot_product_attention, attend, name="long", dtypes=[torch.float32], grad="none",
        shape={"query": dims, "key": dims, "value": dims}, args=["query", "key", "value"],
        where=["is_causal", "D % 32 == 0", "S >= 128", "attn_mask is None", "dropout_p == 0", "scale is None"],
    )  # fmt: skip
    call = Call(tuple(Meta((8, 8, 128, 32), torch.float32, torch.device("cpu")) for _ in range(3)), {"is_causal": True})
    sizes = [case.args[0].numel() for case in call_cases(kernel, call)]
    assert len(sizes) > 10 and max(sizes) <= 1 << 20


def test_an_interval_of_numbers_has_samples() -> None:
    kernel = forge.kernel(
        F.layer_norm, lambda input, eps: F.layer_norm(input, input.shape[-1:], eps=eps), name="within",
        dtypes={"input": [torch.float32]}, shape={"input": "[..., H]"}, args=["input", "eps"],
        where=["normalized_shape == (H,)", "weight is None", "bias is None", "eps > 1e-7 and eps < 1e-5"],
    )  # fmt: skip
    cases = list(islice(general_cases(kernel, torch.device("cpu"), torch.float32), 400))
    assert any(1e-7 < case.kwargs.get("eps", 1e-5) < 1e-5 for case in cases)


@pytest.mark.slow
def test_what_a_kernel_sends_to_its_process_group_does_not_end_the_program(repository: Callable) -> None:
    code = "import os, signal\n\ndef f(x):\n    os.kill(0, signal.SIGTERM)\n    return F.gelu(x)"
    made = repository("group", code, **GELU)
    program = (
        "import sys, warnings, torch, forge\nwarnings.simplefilter('ignore')\n"
        "jitted = forge.jit(torch.nn.functional.gelu, kernels=[sys.argv[1]])\n"
        "jitted(torch.ones(3))\nprint(dict(forge.explain(jitted).rows[0].declined)['acme.group'])"
    )
    command = [sys.executable, "-c", program, str(made.folder)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0 and "was ended (signal 15)" in done.stdout, done.stdout + done.stderr


def test_a_kernel_that_leaves_a_part_of_its_output_unwritten_is_found(repository: Callable) -> None:
    made = repository("unwritten", "def f(out, x):\n    out[:3].copy_(F.gelu(x[:3]))", out="out", **GELU)
    reason = declined(run(gelu, torch.randn(4), by=executor(made)), made)
    assert re.search(r"values differ: nan at \[3\], but must be -?0\.\d+ \(2 of 5 values\)", reason)


ATTENTION = {
    "op": "torch.nn.functional.scaled_dot_product_attention",
    "arg_meta": "{query: T, key: T, value: T}",
    "shape": '{query: "[B, H, S, D]", key: "[B, H, K, D]", value: "[B, H, K, D]"}',
    "args": "{q: query, k: key, v: value, causal: is_causal}",
}
BOTTOM_RIGHT = """
    def f(q, k, v, causal):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if causal else None)
"""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_causal_mask_aligned_bottom_right_is_right_only_where_lengths_agree(repository: Callable) -> None:
    inputs = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    made = repository("bottom_right", BOTTOM_RIGHT, **ATTENTION)
    reason = declined(run(attention, *inputs, by=executor(made)), made)
    assert "is_causal=True" in reason and "values differ" in reason
    same = repository("same_length", BOTTOM_RIGHT, where='["not is_causal or S == K"]', **ATTENTION)
    assert claimed(run(attention, *inputs, by=executor(same)), same) == 1


def test_a_kernel_that_takes_no_sample_fails(repository: Callable, capsys: pytest.CaptureFixture) -> None:
    entry = {**GELU, "where": '["input.ndim == 17"]'}
    made = repository("nothing", "def f(x):\n    return F.gelu(x)", **entry)
    assert cli.main(["kernels", "verify", str(made.folder)]) == 1
    assert "took none of the samples" in capsys.readouterr().out


def test_a_kernel_that_does_not_take_the_shapes_of_the_samples_is_told_of_shape() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    for shape, advice in ((None, "x and weight"), ({"x": "[..., H]", "weight": "[H]"}, None)):
        given = forge.kernel("pattern:rms_norm", rms, dtypes=[torch.float32], shape=shape)
        explained = run(norm, torch.randn(3, 8), torch.ones(8), by=kernel_executor([given]))
        assert (f"; if it takes {advice} of certain shapes only, shape says so" in str(explained)) == (shape is None)
        assert any(row.executor == "rms" for row in explained.rows) == (shape is not None)


# asking


def test_an_answer_is_kept_on_disk_and_a_change_of_the_code_asks_again(repository: Callable, asked: list) -> None:
    made = repository("kept", "def f(x):\n    return F.gelu(x)", **GELU)
    assert claimed(run(gelu, torch.randn(4), by=executor(made)), made) == 1
    assert len(asked) == 2  # in general, and for these arguments
    assert claimed(run(gelu, torch.randn(4), by=executor(made)), made) == 1
    assert len(asked) == 2
    assert _worker_starts_elsewhere(made) == 0
    made.write("def f(x):\n    return F.gelu(x) + 0.1")
    assert "values differ by up to 0.1" in declined(run(gelu, torch.randn(4), by=executor(made)), made)
    assert len(asked) == 3


def _worker_starts_elsewhere(made: Repository) -> int:
    """Return the number of workers that another process starts for the same call."""
    program = f"""
        import torch
        import forge
        import torch.nn.functional as F
        from forge.executors.hubex.verification import verification_cache

        jitted = forge.jit(lambda x: F.gelu(x) + 1, kernels=[{str(made.folder)!r}])
        jitted(torch.randn(4))
        assert forge.explain(jitted).rows[0].executor == "acme.{made.name}"
        print(verification_cache.worker.starts)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_an_answer_is_of_one_kind_of_device(repository: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    made = repository("device", "def f(x):\n    return F.gelu(x)", **GELU)
    (kernel,) = executor(made).kernels
    names = {0: "small", 1: "large", 2: "small"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    fingerprinted = fingerprint(kernel)
    small, large, same = (
        verification_cache._identity(kernel, fingerprinted, torch.device("cuda", index)) for index in range(3)
    )
    assert small == same != large
    assert len({small, large, verification_cache._identity(kernel, fingerprinted, torch.device("cpu"))}) == 3


def test_layers_that_are_alike_ask_once(repository: Callable, asked: list) -> None:
    code = "def f(x, weight, bias, eps):\n    return F.layer_norm(x, weight.shape, weight, bias, eps)"
    made = repository("layers", code, **LAYER_NORM)
    model, starts = torch.nn.Sequential(*[torch.nn.LayerNorm(16) for _ in range(4)]), verification_cache.worker.starts
    assert claimed(run(model, torch.randn(2, 16), by=executor(made)), made) >= 4
    assert (
        len(asked) <= 3 and verification_cache.worker.starts - starts <= 1
    )  # strides of the first layer's input are known


def test_a_symbolic_length_is_verified_as_it_is_in_this_run(repository: Callable, asked: list) -> None:
    made = repository("dynamic", "def f(x):\n    return F.gelu(x)", **GELU)
    jitted = forge.jit(gelu, executors=[executor(made), "torch"], dynamic=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(jitted(x), gelu(x))
    torch.testing.assert_close(jitted(x[:4]), gelu(x[:4]))
    assert claimed(forge.explain(jitted), made) == 1
    assert [question.call.metas[0].shape for question in asked if question.call is not None] == [(5, 3)]


@pytest.mark.parametrize(
    ("forward", "backward", "reason"),
    [
        (" + (x.numel() > 5000)", "", "input: float32[4097, 3]: values differ by up to 1"),
        ("", " + (x.numel() > 5000)", "input: float32[4097, 3]: the gradient of input: values differ by up to 1"),
    ],
    ids=["forward", "backward"],
)
def test_a_symbolic_length_is_verified_at_large_sizes_too(
    repository: Callable, forward: str, backward: str, reason: str
) -> None:
    code = f"def f(x):\n    return F.gelu(x){forward}\n\n\ndef g(grad_output, x):\n    return {GELU_BACKWARD}{backward}"
    made = repository("long", code, **{**GELU, "grad": BACKWARD})
    jitted = forge.jit(gelu, executors=[executor(made), "torch"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HubNotice)
        for rows in (4, 5, 2000):
            x = torch.randn(rows, 3, requires_grad=True)
            torch.testing.assert_close(jitted(x), gelu(x))
            torch.testing.assert_close(*(torch.autograd.grad(each(x).sum(), x) for each in (jitted, gelu)))
    declined = [text for row in forge.explain(jitted).rows for _, text in row.declined]
    assert f"failed verification on {reason}" in declined[0]


@pytest.mark.parametrize(
    ("shapes", "dynamic", "largest"),
    [
        (((3, 5, 64), (64,)), (0, 1), {(4097, 2, 64), (2048, 2, 64), (2, 4097, 64), (2, 2048, 64)}),
        (((3, 5, 4096), (4096,)), (1,), {(3, 2049, 128), (3, 1000, 128)}),  # 4096 is too wide for as many rows
    ],
)
def test_the_large_sizes_of_symbols_are_of_some_megabytes(shapes: tuple, dynamic: tuple, largest: set) -> None:
    asked = []
    weighted = forge.kernel(
        F.rms_norm, lambda input, weight: F.rms_norm(input, weight.shape, weight), name="weighted", grad="none",
        dtypes=[torch.float32], shape={"input": "[..., H]", "weight": "[H]"}, args=["input", "weight"],
        where=["normalized_shape == (H,)", "eps is None"],
    )  # fmt: skip
    verifier = Verifier()
    verifier.answer = verifier._answer = lambda kernel, subject, question: asked.append(question) or Answer(None, 1)
    x, weight = map(torch.randn, shapes)
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    by = kernel_executor([weighted], verify=verifier)
    forge.jit(lambda x, weight: F.rms_norm(x, weight.shape, weight) + 1, executors=[by, "torch"])(x, weight)
    symbolic = next(question.symbolic for question in asked if question.symbolic is not None)
    sizes = {tuple(case.args[0].shape) for case in symbolic_cases(weighted, symbolic)}
    assert {size for size in sizes if max(size[:-1]) > 100} == largest


def test_the_worker_serves_on_after_a_crash(repository: Callable) -> None:
    bad = repository("crashes", "def f(x):\n    ctypes.string_at(0)", **GELU)
    exits = repository("exits", "import os\n\n\ndef f(x):\n    os._exit(7)", **GELU)
    good = repository("serves", "def f(x):\n    return F.gelu(x)", **GELU)
    run(gelu, torch.randn(4), by=executor(good))
    starts = verification_cache.worker.starts
    assert declined(run(gelu, torch.randn(4), by=executor(bad)), bad).startswith("crashed (signal 11) on input")
    assert declined(run(gelu, torch.randn(4), by=executor(exits)), exits).startswith("ended the process with status 7")
    assert claimed(run(gelu, torch.randn(6), by=executor(good)), good) == 1
    assert verification_cache.worker.starts == starts


def test_a_child_that_ended_between_questions_is_no_kernels_fault(repository: Callable) -> None:
    made = repository("between", "def f(x):\n    return F.gelu(x)", **GELU)
    run(gelu, torch.randn(4), by=executor(made))
    before = verification_cache.worker.server.judge
    os.kill(before, signal.SIGKILL)
    verification_cache.worker.server.channel.poll(10)
    assert claimed(run(gelu, torch.randn(6), by=executor(made)), made) == 1
    assert verification_cache.worker.server.judge != before


def test_what_a_kernel_prints_does_not_disturb_its_answers(repository: Callable) -> None:
    made = repository("prints", "def f(x):\n    print('x' * 100000)\n    return F.gelu(x)", **GELU)
    assert claimed(run(gelu, torch.randn(4), by=executor(made)), made) == 1


def test_a_damaged_answer_on_disk_is_asked_for_again(repository: Callable, asked: list) -> None:
    made = repository("damaged", "def f(x):\n    return F.gelu(x)", **GELU)
    run(gelu, torch.randn(4), by=executor(made))
    for file in verification_cache._folder().iterdir():
        file.write_text("{")
    assert claimed(run(gelu, torch.randn(4), by=executor(made)), made) == 1
    assert len(asked) == 4


def test_each_failed_kernel_is_reported_once(repository: Callable) -> None:
    made = repository("wrong", "def f(x):\n    return F.gelu(x) + 1", **GELU)
    by = executor(made)
    with pytest.warns(
        HubNotice, match=r"kernel acme.wrong of torch.nn.functional.gelu is not used: failed verif"
    ) as notices:
        forge.jit(gelu, executors=[by, "torch"])(torch.randn(4))
        forge.jit(gelu, executors=[by, "torch"])(torch.randn(5))
    assert len([each for each in notices if issubclass(each.category, HubNotice)]) == 1


def test_verification_can_be_left_out(repository: Callable, asked: list) -> None:
    made = repository("trusted", "def f(x):\n    return F.gelu(x)", **GELU)
    by = kernel_executor([made.folder], verify=False)
    assert claimed(run(gelu, torch.randn(4), by=by), made) == 1
    assert not asked


# functions given in Python


def in_python(function: Callable, **options: Any) -> Executor:
    entry = kernel(
        "torch.nn.functional.gelu",
        function,
        resolver=operators(),
        dtypes=[torch.float32],
        where=["approximate == 'none'"],
        args={"x": "input"},
        library="acme",
        name=function.__name__,
        **options,
    )
    return kernel_executor([entry], verify=Verifier(seconds=20))


@pytest.mark.skipif(not can_fork(), reason="where torch has a GPU, no copy of the process can differentiate")
def test_a_function_given_in_python_is_verified_in_a_fork() -> None:
    import ctypes

    def crashes(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) if x.shape == (4,) else ctypes.string_at(0)

    def right(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    explained = run(gelu, torch.randn(4), by=in_python(crashes))
    assert "crashed (signal 11)" in str(explained) and explained.rows[0].executor == "torch"
    trained = run(gelu, torch.randn(4, requires_grad=True), by=in_python(right, grad="composite"))
    assert trained.rows[0].executor == "acme.right"


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Disable forks as if torch had a GPU; return the kernels about which the worker is asked."""
    asked: list[Any] = []
    ask = verification_cache.worker.ask
    monkeypatch.setattr(verification_cache, "can_fork", lambda **how: False)
    monkeypatch.setattr(
        verification_cache.worker, "ask", lambda kernel, *rest: asked.append(kernel) or ask(kernel, *rest)
    )
    return asked


def test_a_function_given_in_python_is_sent_to_the_worker_where_there_is_no_fork(no_fork: list) -> None:
    factor = 1.0

    @forge.kernel("torch.nn.functional.gelu", args={"x": "input"}, where="approximate == 'none'")
    def crashes(x: torch.Tensor) -> torch.Tensor:
        import ctypes

        return F.gelu(x) * factor if x.shape == (4,) else ctypes.string_at(0)

    explained = run(gelu, torch.randn(4), by=kernel_executor([crashes]))
    assert "crashed (signal 11)" in str(explained) and explained.rows[0].executor == "torch"

    @forge.pattern
    def doubled(x):  # type: ignore[no-untyped-def]
        return F.gelu(x) * 2

    gelu_backward, overload = torch.ops.aten.gelu_backward, torch.ops.aten.mul.Tensor

    def backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return overload(gelu_backward(grad, x), torch.ops.aten.full_like(x, 2))

    kernel = forge.kernel(doubled, lambda x: F.gelu(x) * (1 + factor), name="doubled", grad=backward)
    x = torch.randn(4, requires_grad=True)
    trained = run(lambda x: F.gelu(x) * 2, x, by=kernel_executor([kernel]))
    assert [row.executor for row in trained.rows if row.executor == "doubled"] == ["doubled", "doubled"]
    assert {each.name for each in no_fork} == {"crashes", "doubled"}


def test_a_triton_kernel_is_sent_as_the_function_that_it_was_made_of() -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")

    def copy(out, x, n, BLOCK):  # type: ignore[no-untyped-def]
        pass

    made = triton.runtime.jit.JITFunction(copy, do_not_specialize=["n"], noinline=True)
    rebuild, arguments = process._reducers()[type(made)](made)
    again = rebuild(*arguments)
    assert type(again) is type(made) and again.fn is copy
    assert (again.do_not_specialize, again.noinline, again.arg_names) == (["n"], True, ["out", "x", "n", "BLOCK"])


def test_what_cannot_be_sent_is_verified_here(no_fork: list) -> None:
    lock = threading.Lock()

    def locked(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return F.gelu(x)

    made = forge.kernel("torch.nn.functional.gelu", locked, args={"x": "input"}, where="approximate == 'none'")
    assert run(gelu, torch.randn(4), by=kernel_executor([made])).rows[0].executor == "locked"
    assert no_fork == []


# the command


def test_the_command_prints_a_table(repository: Callable, capsys: pytest.CaptureFixture) -> None:
    right = repository("table_right", "def f(x):\n    return F.gelu(x)", **GELU)
    wrong = repository("table_wrong", "def f(x):\n    return x", **GELU)
    assert cli.main(["kernels", "verify", str(right.folder)]) == 0
    assert cli.main(["kernels", "verify", str(right.folder), str(wrong.folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "op", "dtype", "device", "samples", "verdict"]
    assert any(line.startswith("acme.table_right") and line.endswith("ok") for line in lines)
    assert any(line.startswith("acme.table_wrong") and "failed verification on input" in line for line in lines)
