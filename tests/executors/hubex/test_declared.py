"""Kernels declared in Python, and backward kernels that read what their forward saved."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import kernel_executor
from forge.hub import HubNotice
from forge.hub.manifest import ManifestError
from tests.hub.repositories import Repository, claimed, declined, executor, run

SHAPES = {
    "arg_meta": {"x": "T", "weight": "T"},
    "type_alias": {"T": [torch.float32, torch.float64]},
    "shape": {"x": "[..., H]", "weight": "[H]"},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return RMSNorm as written in Llama."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.pow(2).mean(-1) + eps)
    return x * rstd[..., None] * weight, rstd


def rms_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normal, inner = x * rstd[..., None], grad * weight
    grad_x = rstd[..., None] * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return grad_x, (grad * normal).reshape(-1, x.shape[-1]).sum(0)


def trained(kernel: Any) -> Any:
    """Return the explanation of a norm that is run and differentiated with one kernel, after comparing it with
    eager."""
    x, w = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    return run(norm, x, w, by=forge.executors.hubex.kernel_executor([kernel]))


def operations(explained: Any, name: str) -> list[str]:
    return [row.operation for row in explained.rows if row.executor == name]


def test_a_decorator_makes_a_kernel_that_is_called_as_the_function() -> None:
    @forge.kernel("torch.nn.functional.silu", dtypes=[torch.float32], grad="composite")
    def silu(input: torch.Tensor) -> torch.Tensor:
        return input / (1 + torch.exp(-input))

    x = torch.randn(4, requires_grad=True)
    torch.testing.assert_close(silu(x), F.silu(x))
    jitted = forge.jit(lambda x: F.silu(x) + F.silu(x.double()).sum(), kernels=[silu])
    jitted(x).sum().backward()
    taken, left = (row for row in forge.explain(jitted).rows if row.operation.endswith("silu"))
    assert taken.executor == "silu" != left.executor
    assert taken.declined == () and left.declined == (("silu", "dtype float64 not in T (float32)"),)


@forge.kernel(F.relu6, dtypes=[torch.float32], shape={"input": "[...]"})
def doubled(input: torch.Tensor) -> torch.Tensor:
    return F.relu6(input) * 2


def test_a_kernel_pickles_by_its_name_or_its_declaration() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    declared = forge.kernel("pattern:rms_norm", rms, **SHAPES)
    copied = pickle.loads(pickle.dumps(declared))
    x, weight = torch.randn(2, 8), torch.randn(8)
    for each in (declared, copied):
        jitted = forge.jit(norm, kernels=[each])
        torch.testing.assert_close(jitted(x, weight), norm(x, weight))
        assert operations(forge.explain(jitted), "rms")
    assert copied.declared == declared.declared


def test_a_kernel_of_a_shipped_pattern_with_its_own_backward() -> None:
    """Without `args`, a backward gets the gradient, the kernel's arguments, and the saved values by name."""
    grad = {"kernel_name": rms_backward, "forward": rms_forward, "saves": {"rstd": ["T", "[...]"]}}
    explained = trained(forge.kernel("pattern:rms_norm", rms, name="own", grad=grad, **SHAPES))
    assert operations(explained, "own") == ["hub.own.forward", "hub.own.backward"]


def test_a_pattern_of_ones_own() -> None:
    @forge.pattern
    def scaled_relu(x, scale):  # type: ignore[no-untyped-def]
        return torch.relu(x) * scale

    mine = forge.kernel(scaled_relu, lambda x, scale: torch.relu(x) * scale, name="mine", grad="composite")
    jitted = forge.jit(lambda x, y: y * torch.relu(x) + 1, kernels=[mine])
    x, y = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(jitted(x, y), y * torch.relu(x) + 1)
    assert [row.executor for row in forge.explain(jitted).rows] == ["mine", "torch"]


def test_a_backward_alone_gives_the_gradients_of_all_tensors() -> None:
    def backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.sigmoid(gate)
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s

    kernel = forge.kernel("pattern:swiglu", lambda gate, up: F.silu(gate) * up, name="swiglu", grad=backward)
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    explained = run(lambda g, u: F.silu(g) * u, *inputs, by=forge.executors.hubex.kernel_executor([kernel]))
    assert operations(explained, "swiglu") == ["pattern.swiglu", "hub.swiglu.backward"]


def test_the_kernel_itself_may_save() -> None:
    """Then it always returns its saved values, which are dropped if no gradient is needed."""
    grad = {"kernel_name": rms_backward, "saves": {"rstd": [torch.float32, "[...]"]}}
    kernel = forge.kernel("pattern:rms_norm", rms_forward, name="own", grad=grad, **SHAPES)
    assert operations(trained(kernel), "own") == ["hub.own", "hub.own.backward"]
    jitted = forge.jit(norm, kernels=[kernel])
    x, w = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(jitted(x, w), norm(x, w))
    assert operations(forge.explain(jitted), "own") == ["pattern.rms_norm"]


def test_an_out_variant_writes_what_it_saves_to_parameters_of_those_names() -> None:
    def forward(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, *, rstd: torch.Tensor) -> None:
        result, saved = rms_forward(x, weight, eps)
        out.copy_(result)
        rstd.copy_(saved)

    grad = {"kernel_name": rms_backward, "forward": forward, "saves": {"rstd": ["T", "[...]"]}}
    kernel = forge.kernel(
        "pattern:rms_norm", lambda out, x, w, eps: out.copy_(rms(x, w, eps)), name="own", out=0, grad=grad, **SHAPES
    )
    explained = trained(kernel)
    assert "hub.own.backward" in operations(explained, "own")
    assert len(operations(explained, "hub")) >= 2  # memory for both


def test_a_backward_that_reads_a_wrong_saved_value_is_declined() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, rstd = rms_forward(x, weight, eps)
        return out, rstd + 1

    grad = {"kernel_name": rms_backward, "forward": wrong, "saves": {"rstd": ["T", "[...]"]}}
    kernel = forge.kernel("pattern:rms_norm", rms, name="own", grad=grad, **SHAPES)
    with pytest.warns(HubNotice, match="the gradient of x: values differ"):
        forge.jit(norm, kernels=[kernel])(torch.randn(3, 8, requires_grad=True), torch.randn(8))


def test_a_repository_saves_too(tmp_path: Path) -> None:
    made = Repository(
        tmp_path,
        "saving",
        """
        def f(x, weight, eps):
            return forward(x, weight, eps)[0]

        def forward(x, weight, eps):
            rstd = torch.rsqrt(x.pow(2).mean(-1) + eps)
            return x * rstd[..., None] * weight, rstd

        def backward(grad, x, weight, eps, rstd):
            n, g = x * rstd[..., None], grad * weight
            return rstd[..., None] * (g - n * (g * n).mean(-1, keepdim=True)), (grad * n).flatten(0, -2).sum(0)
        """,
        pattern="rms_norm",
        arg_meta="{x: T, weight: T}",
        shape='{x: "[..., H]", weight: "[H]"}',
        grad='{kernel_name: backward, forward: forward, saves: {rstd: [T, "[...]"]}}',
    )
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert claimed(run(norm, x, w, by=executor(made)), made) == 2
    made.write(
        "def f(x, weight, eps): return x\ndef forward(x, weight, eps): return x\ndef backward(grad): return grad"
    )
    with pytest.raises(ManifestError, match="kernel 'backward': its signature does not accept"):
        executor(made)


def declaration(**options: Any) -> Callable[[], Any]:
    return lambda: forge.kernel("pattern:rms_norm", rms, name="own", **{**SHAPES, **options})


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (
            declaration(grad={"kernel_name": rms_backward, "saves": {"rstd": ["T", "[..., K]"]}}),
            "saves of rstd: the shape of no argument says what K is; known: H",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "saves": {"rstd": ["T", "[_]"]}}),
            "saves of rstd: the shape of no argument says what _ is; known: H",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "saves": {"rstd": "T"}}),
            """saves of rstd is 'T', but must be [dtype, shape], such as [float32, "[..., H]"]""",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "saves": {"weight": ["T", "[...]"]}}),
            "saves names 'weight', which is taken",
        ),
        (
            declaration(
                type_alias={**SHAPES["type_alias"], "S": ["float32", "float64"]},
                grad={"kernel_name": rms_backward, "saves": {"rstd": ["S", "[...]"]}},
            ),
            "saves of rstd: no argument has the type alias S, which allows several",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "forward": rms_forward}),
            "grad has a forward, but saves nothing; say in saves what it returns beyond",
        ),
        (
            declaration(grad={"kernel_name": lambda grad: grad}),
            "does not accept 'x', 'weight', 'eps'; it is called with (grad_output, x, weight, eps), and takes (grad)",
        ),
        (
            lambda: forge.kernel("pattern:rms_norm", lambda x, eps: x),
            "does not accept 'weight'; it is called with (x, weight, eps), and takes (x, eps): args says what it is g",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "args": ["grad", "x"]}),
            "args gives 'grad', not an argument of rms_norm; did you mean 'grad_output'?",
        ),
        (
            declaration(grad={"kernel_name": rms_backward, "args": ["loss", "x"]}),
            "arguments: x, weight, eps, grad_output, output (grad_output_0, output_0, ... of several results); a text",
        ),
        (lambda: forge.kernel("torch.nn.functional.slu", rms), "unknown operator 'torch.nn.functional.slu'; did you"),
    ],
)
def test_errors_name_the_place(make: Callable[[], Any], wanted: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(wanted)) as raised:
        make()
    assert str(raised.value).startswith(f"{__file__}:")


@pytest.mark.parametrize("op", [F.softmax, F.log_softmax, F.softmin], ids=lambda op: op.__name__)
def test_a_kernel_need_not_take_torchs_private_arguments(op: Callable) -> None:
    def plain(input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        return op(input, dim, dtype=dtype)

    def like_torch(input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
        return op(input, dim, _stacklevel, dtype)

    for function in (plain, like_torch):
        kernel = forge.kernel(op, function, where="dim == -1", dtypes=[torch.float32])
        by = kernel_executor([kernel])
        (row,) = run(lambda x: op(x, -1, dtype=torch.float64), torch.randn(3, 8), by=by).rows
        assert row.executor == function.__name__


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="'dtype'"):
        forge.kernel("torch.nn.functional.silu", rms, dtype=torch.float32)


def test_a_declined_kernel_is_named(tmp_path: Path) -> None:
    made = Repository(
        tmp_path, "none", "def f(x, weight, eps): return F.rms_norm(x, weight.shape, weight, eps)",
        pattern="rms_norm", grad="none",
    )  # fmt: skip
    explained = run(norm, torch.randn(3, 8, requires_grad=True), torch.randn(8), by=executor(made))
    assert declined(explained, made) == "the implementation has no gradient, and one is needed"


def test_two_functions_of_one_name_are_told_apart() -> None:
    grad = {
        "kernel_name": lambda grad, x, saved: grad * 2,
        "forward": lambda x: (x * 2, x),
        "saves": {"saved": ["T", "[...]"]},
    }
    twice = forge.pattern(lambda x: torch.relu(x) + x)
    twice.name = "twice"
    shape = {"arg_meta": {"x": "T"}, "type_alias": {"T": [torch.float32]}, "shape": {"x": "[..., H]"}}
    kernel = forge.kernel(twice, lambda x: torch.relu(x) + x, name="twice", grad=grad, **shape)
    assert kernel.forward is grad["forward"] and kernel.backward is grad["kernel_name"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"dtypes": "float32"}, "kernel silu: dtypes is 'float32', but must be a list of dtypes"),
        ({"dtypes": torch.float32}, r"dtypes is torch.float32, but must be a list of dtypes.*: \[torch.float32\]"),
        ({"dtypes": []}, r"dtypes is \[\], but must be a list of at least one dtype"),
        ({"dtypes": [torch.float32, 3]}, r"dtypes\[1\] is 3, but must be a dtype"),
        ({"args": "input"}, "args is 'input', but must be a list of arguments, or a mapping"),
        ({"where": 3}, "where is 3, but must be a list of conditions"),
        ({"faster": {"a": 1}}, "faster is {'a': 1}, but must be a list of conditions"),
        ({"mutates": {"input"}}, "mutates is {'input'}, but must be a list of the names of arguments"),
        ({"samples": [torch.ones(1)]}, "samples is .*, but must be a function"),
        ({"assumes": "equal_halves"}, "assumes is 'equal_halves', but must be a function"),
        ({"tolerance": 1e-3}, "tolerance is 0.001, but must be a mapping from dtypes to"),
        ({"library": 3}, "library is 3, but must be text"),
        ({"dtype": torch.float32}, "forge.kernel has no option 'dtype'; did you mean 'dtypes'?"),
        ({"mark": 3}, "forge.kernel has no option 'mark'; there are name, library, dtypes"),
    ],
)
def test_an_option_of_a_wrong_kind_is_one_error_that_names_it(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(TypeError, match=wanted) as error:
        forge.kernel(F.silu, silu, **options)
    assert "\n" not in str(error.value)


def test_what_is_no_function_is_no_kernel() -> None:
    with pytest.raises(TypeError, match="is 3, but must be a function"):
        forge.kernel(F.silu, 3)


def test_an_option_of_a_class_of_a_wrong_kind_names_the_class() -> None:
    class Wrong(forge.KernelExtension):
        op = F.silu
        options = {"dtypes": torch.float32}  # noqa: RUF012  as the documents have it

        def load(self) -> Callable:
            return silu

    with pytest.raises(TypeError, match=r"kernel Wrong: dtypes is torch\.float32, but must be a list"):
        forge.register_kernel(Wrong)


def silu(input: torch.Tensor) -> torch.Tensor:
    return input * torch.sigmoid(input)
