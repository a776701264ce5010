"""Operators that manifests define with `func`, and operators of a user's torch.library with kernels of forge."""

import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge import cli, hub, torchlang
from forge.executors.hubex import Verifier, eager, functions, gather, kernel_executor
from forge.hub import HubNotice
from forge.hub.manifest import ManifestError
from tests.hub.kernels import metadata

CODE = """
    import torch

    CALLS = []

    def reference(x, weight, eps=0.5):
        return torch.sin(x) * weight + eps

    def fake(x, weight, eps):
        return torch.empty_like(x)

    def f(x, weight, eps):
        CALLS.append("f")
        return torch.sin(x) * weight + eps

    def backward(grad_output, x, weight, eps):
        CALLS.append("backward")
        return grad_output * torch.cos(x) * weight, (grad_output * torch.sin(x)).sum(0)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight)
            return f(x, weight, eps)

        @staticmethod
        def backward(ctx, grad):
            return *backward(grad, *ctx.saved_tensors, 0.5), None

    def differentiable(x, weight, eps):
        return Function.apply(x, weight, eps)

    def wrong(x, weight, eps):
        return torch.sin(x) * weight + eps + 0.1
"""
SCHEMA = "(Tensor x, Tensor weight, float eps=0.5) -> Tensor"
FAST = {
    "kernel_name": "f",
    "arg_meta": "{x: T, weight: T}",
    "shape": '{x: "[R, H]", weight: "[H]"}',
    "grad": "{kernel_name: backward}",
}
SLOW = {"kernel_name": "differentiable", "grad": "autograd"}
_numbers = itertools.count()


class Operator:
    """A repository that defines one operator with one kernel called `fast`.

    schema: without the name. entry: fields of the kernel. name: the operator's, by default a new one.
    """

    def __init__(
        self, folder: Path, *, schema: str = SCHEMA, code: str = CODE, func: str = "reference: reference", **entry: str
    ) -> None:
        number = next(_numbers)
        self.base = entry.pop("base", f"f{number}")
        self.name = f"acme_test::{self.base}"
        self.folder = folder / f"repository_{number}"
        variant = self.folder / "build" / "torch-universal"
        variant.mkdir(parents=True)
        (variant / "__init__.py").write_text(textwrap.dedent(code))
        (variant / "metadata.json").write_text(metadata(f"functions-{number}", f"_functions_{number}"))
        self.manifest = variant / "forge_kernels.yaml"
        lines = "".join(f"    {key}: {value}\n" for key, value in ({**FAST, **entry}).items())
        definitions = "".join(f"  {line}\n" for line in func.splitlines())
        self.manifest.write_text(
            f'forge_kernels: 1\nlibrary: {{name: acme}}\nops:\n- func: "{self.name}{schema}"\n{definitions}'
            f"  type_alias: {{T: [float32]}}\n  kernels:\n  - name: fast\n{lines}"
        )

    @property
    def op(self) -> Any:
        """Return the operator in torch.ops that a program calls."""
        return getattr(torch.ops.acme_test, self.base)

    def calls(self) -> list[str]:
        """Return the repository's calls in this process since the last time, and forget them."""
        module = next(each.module for each in hub.loaded_kernels() if self.folder in Path(each.module.__file__).parents)
        made = list(module.CALLS)
        module.CALLS.clear()
        return made


@pytest.fixture
def operator(tmp_path: Path) -> Callable[..., Operator]:
    """Return a function that writes a repository, and loads it unless `gathered=False`."""

    def make(*, gathered: bool = True, **options: Any) -> Operator:
        made = Operator(tmp_path, **options)
        if gathered:
            gather([made.folder])
        return made

    return make


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HubNotice)
        yield


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in ((3, 8), (8,))]


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float = 0.5) -> torch.Tensor:
    return torch.sin(x) * weight + eps


def gradients(function: Callable, args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((function(*args) * torch.arange(8.0)).sum(), args)


def assert_trains(function: Callable, args: list[torch.Tensor], expected: Callable = plain) -> None:
    torch.testing.assert_close(function(*args), expected(*args))
    torch.testing.assert_close(gradients(function, args), gradients(expected, args))


def jitted(function: Callable, made: Operator, **options: Any) -> Any:
    by = kernel_executor([made.folder], verify=Verifier())
    return forge.jit(function, executors=[by, "torch"], **options)


def executors(function: Any) -> list[tuple[str, str]]:
    return [(row.operation, row.executor) for row in forge.explain(function).rows]


def reasons(function: Any) -> str:
    return "; ".join(reason for row in forge.explain(function).rows for _, reason in row.declined)


# eager


def test_in_eager_the_kernel_that_takes_the_tensors_runs(operator: Callable) -> None:
    made = operator()
    args = inputs()
    torch.testing.assert_close(made.op(*args), plain(*args))
    torch.testing.assert_close(made.op(*args, eps=2), plain(*args, 2))
    assert made.calls() == ["f", "f"]


def test_in_eager_the_reference_runs_where_no_kernel_takes_the_tensors(operator: Callable) -> None:
    made = operator()
    args = inputs(torch.float64)
    torch.testing.assert_close(made.op(*args), plain(*args))
    assert made.calls() == []


def test_in_eager_a_wrong_kernel_does_not_run(operator: Callable) -> None:
    made = operator(kernel_name="wrong")
    args = inputs(grad=True)
    with pytest.warns(HubNotice, match="kernel acme.fast of acme_test::.* is not used: failed verification on x: "):
        torch.testing.assert_close(made.op(*args), plain(*args))
    assert_trains(made.op, args)


@pytest.mark.parametrize(
    ("grad", "ran"),
    [("{kernel_name: backward}", ["f", "f", "backward"]), ("none", ["f", "f"]), ("composite", ["f", "f"])],
)
def test_in_eager_the_gradient_is_the_kernels_or_the_references(operator: Callable, grad: str, ran: list) -> None:
    made = operator(grad=grad)
    assert_trains(made.op, inputs(grad=True))
    assert made.calls() == ran


@pytest.mark.parametrize(("name", "backward"), [("differentiable", 1), ("f", 0)])
@pytest.mark.one_in(4)
def test_in_eager_torchs_autograd_differentiates_a_kernel(operator: Callable, name: str, backward: int) -> None:
    made = operator(kernel_name=name, grad="autograd", func="fake: fake")
    assert_trains(made.op, inputs(grad=True))
    assert made.calls().count("backward") == backward


@pytest.mark.slow
def test_in_eager_a_gradient_of_one_argument_is_enough(operator: Callable) -> None:
    made = operator()
    x, weight = inputs()
    weight.requires_grad_()
    (found,) = torch.autograd.grad(made.op(x, weight).sum(), [weight])
    torch.testing.assert_close(found, torch.sin(x).sum(0))


@pytest.mark.slow
def test_in_eager_a_second_gradient_is_refused(operator: Callable) -> None:
    made = operator()
    x, weight = inputs(grad=True)
    (found,) = torch.autograd.grad(made.op(x, weight).sum(), [x], create_graph=True)
    with pytest.raises(NotImplementedError, match=f"the gradient of {made.name} cannot be differentiated again"):
        found.sum().backward()


def test_without_a_reference_a_call_that_no_kernel_takes_says_why(operator: Callable) -> None:
    made = operator(func="fake: fake")
    args = inputs(torch.float64)
    wanted = (
        f"no kernel runs {made.name}(x: float64[3, 8], weight: float64[8], eps=0.5), and it has no reference; "
        "acme.fast: dtype float64 not in T (float32)"
    )
    with pytest.raises(NotImplementedError, match=re.escape(wanted)):
        made.op(*args)


def test_without_a_reference_a_gradient_that_no_kernel_gives_says_why(operator: Callable) -> None:
    made = operator(func="fake: fake", grad="none")
    result = made.op(*inputs(grad=True))
    with pytest.raises(
        NotImplementedError,
        match=r"has no reference; acme\.fast: the implementation has no gradient, and one is needed",
    ):
        result.sum().backward()


def test_a_kernel_that_calls_the_operator_itself_ends(operator: Callable) -> None:
    code = CODE + "\n    def again(x, weight, eps):\n        return torch.ops.acme_test.again(x, weight, eps)\n"
    made = operator(code=code, kernel_name="again", base="again", grad="composite")
    assert_trains(made.op, inputs(grad=True))
    assert_trains(jitted(lambda x, weight: made.op(x, weight), made), inputs(grad=True))


@pytest.mark.parametrize("turned", ["x.t()", "(x * 1).t()", "x"])
def test_results_are_contiguous_and_have_memory_of_their_own(operator: Callable, turned: str) -> None:
    code = CODE + f"\n    def turned(x):\n        return {turned}\n"
    made = operator(code=code, func="reference: turned", schema="(Tensor x) -> Tensor", **_none("turned"))
    x = torch.randn(3, 8)
    for function in (made.op, forge.jit(lambda x: made.op(x))):
        result = function(x)
        assert result.is_contiguous() and result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        torch.testing.assert_close(result.view(-1), eval(turned).reshape(-1))


@pytest.mark.parametrize("kernel", ["natural", "turned"])
@pytest.mark.parametrize(
    ("func", "grad"),
    [
        ("reference: reference", "none"),
        ("reference: reference", "composite"),
        ("reference: reference", "autograd"),
        ("fake: fake", "{kernel_name: backward}"),
    ],
)
@pytest.mark.one_in(4)
def test_results_of_a_kernel_are_made_contiguous(operator: Callable, func: str, kernel: str, grad: str) -> None:
    made = operator(func=func, code=CODE + LAID_OTHERWISE, kernel_name=kernel, grad=grad)
    x, weight = (each.requires_grad_(grad != "none") for each in (torch.randn(8, 3).t(), torch.randn(8)))
    for function in (made.op, jitted(lambda x, weight: made.op(x, weight), made)):
        result = function(x, weight)
        torch.testing.assert_close(result, plain(x, weight), check_stride=False)
        assert result.is_contiguous()
        if grad != "none":
            torch.testing.assert_close(
                gradients(function, [x, weight]), gradients(plain, [x, weight]), check_stride=False
            )
    assert "f" in made.calls()


def test_a_kernel_that_is_wrong_for_a_transposed_argument_is_found(operator: Callable, capsys: Any) -> None:
    code = CODE + "\n    def careless(x, weight, eps):\n        return f(x, weight, eps) + (x.stride(0) == 1)\n"
    made = operator(code=code, kernel_name="careless", grad="none", shape='{x: "[3, H]", weight: "[H]"}')
    assert cli.main(["kernels", "verify", str(made.folder)]) == 1
    assert "(transposed)" in capsys.readouterr().out


LAID_OTHERWISE = """
    def natural(x, weight, eps):
        CALLS.append("f")
        return torch.sin(x) * weight + eps

    def turned(x, weight, eps):
        CALLS.append("f")
        return (torch.sin(x) * weight + eps).t().contiguous().t()
"""


def _none(name: str, **entry: str) -> dict[str, str]:
    return {"kernel_name": name, "grad": "none", "arg_meta": "{x: T}", "shape": '{x: "[R, H]"}', **entry}


def test_several_results_lists_and_optional_arguments(operator: Callable) -> None:
    code = """
        import torch

        CALLS = []

        def both(xs, y=None, *, n):
            CALLS.append("both")
            total = sum(xs) if y is None else sum(xs) * y
            return total, total.pow(n)
    """
    schema = "(Tensor[] xs, Tensor? y=None, *, int n) -> (Tensor, Tensor)"
    entry = {"kernel_name": "both", "arg_meta": "{xs: T}", "shape": "null", "grad": "composite"}
    made = operator(code=code, schema=schema, func="reference: both", **entry)
    xs, y = [torch.randn(4, requires_grad=True) for _ in range(2)], torch.randn(4, requires_grad=True)

    def expected(xs: list, y: torch.Tensor, n: int) -> tuple:
        return (xs[0] + xs[1]) * y, ((xs[0] + xs[1]) * y).pow(n)

    def called(xs: list, y: torch.Tensor, n: int) -> tuple:
        return made.op(xs, y, n=n)

    for function in (called, jitted(called, made)):
        found, wanted = function(xs, y, 3), expected(xs, y, 3)
        torch.testing.assert_close(found, wanted)
        ours, theirs = (torch.autograd.grad(sum(each).sum(), [*xs, y]) for each in (found, wanted))
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(made.op(xs, n=2)[0], xs[0] + xs[1])


def test_inference_mode_takes_the_operator(operator: Callable) -> None:
    made = operator()
    with torch.inference_mode():
        args = inputs()
        torch.testing.assert_close(made.op(*args), plain(*args))


def test_arguments_that_only_compare_equal_are_told_apart() -> None:
    keys = [eager._key({"n": n}) for n in (0, 0.0, -0.0, False)]
    assert len(set(keys)) == 4


# torch's own tools


@pytest.mark.parametrize("func", ["reference: reference", "fake: fake", "fake: fake\nreference: reference"])
@pytest.mark.parametrize("entry", [FAST, SLOW, {"grad": "none"}])
@pytest.mark.one_in(3)
def test_torch_checks_the_operator(operator: Callable, func: str, entry: dict) -> None:
    made = operator(func=func, **entry)
    needs_grad = entry.get("grad") != "none" or "reference" in func
    results = torch.library.opcheck(made.op.default, inputs(grad=needs_grad))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.one_in(2)
def test_torch_compile_takes_the_operator(operator: Callable, backend: str, dynamic: bool) -> None:
    made = operator()
    compiled = torch.compile(lambda *args: made.op(*args), backend=backend, fullgraph=True, dynamic=dynamic)
    assert_trains(compiled, inputs(grad=True))
    assert made.calls().count("backward") == 1


# forge.jit


@pytest.mark.parametrize("overload", [False, True])
def test_a_program_records_one_call_that_the_kernel_claims(operator: Callable, overload: bool) -> None:
    made = operator()
    called = made.op.default if overload else made.op
    function = jitted(lambda x, weight: called(x, weight) + 1, made)
    args = inputs()
    torch.testing.assert_close(function(*args), plain(*args) + 1)
    assert executors(function) == [(f"torch.ops.acme_test.{made.base}", "acme.fast"), ("torch.add", "torch")]
    assert forge.explain(function).opaque_calls == []
    compile(str(forge.last_traces(function)[0]), "trace", "exec")


@pytest.mark.parametrize("entry", [FAST, SLOW, {"grad": "composite"}])
def test_a_program_trains_with_the_kernel(operator: Callable, entry: dict) -> None:
    made = operator(**entry)
    function = jitted(lambda x, weight: made.op(x, weight), made)
    assert_trains(function, inputs(grad=True))
    assert (f"torch.ops.acme_test.{made.base}", "acme.fast") in executors(function) or entry is SLOW
    assert ("backward" in made.calls()) == ("composite" not in entry.values())


def test_a_kernel_without_a_gradient_is_declined_where_one_is_needed(operator: Callable) -> None:
    made = operator(grad="none")
    function = jitted(lambda x, weight: made.op(x, weight), made)
    assert_trains(function, inputs(grad=True))
    assert "the implementation has no gradient, and one is needed" in reasons(function) and made.calls() == []


def test_overloads_are_told_apart(operator: Callable) -> None:
    code = "def f(x, n):\n    return x * n\n"
    made = operator(code=code, schema=".int(Tensor x, int n) -> Tensor", func="reference: f", **_none("f"))
    entry = {**_none("f"), "base": made.base, "func": "reference: f"}
    operator(code="def f(x, n):\n    return x * n + 1\n", schema=".tensor(Tensor x, Tensor n) -> Tensor", **entry)
    x, n = torch.randn(3, 8), torch.randn(8)
    function = jitted(lambda x, n: (made.op(x, 2), made.op(x, n), made.op.int(x, 3)), made)
    torch.testing.assert_close(function(x, n), (x * 2, x * n + 1, x * 3))
    assert (f"torch.ops.acme_test.{made.base}.int", "acme.fast") in executors(function)


def test_without_kernels_a_program_runs_the_reference_in_pieces(operator: Callable) -> None:
    made = operator()
    function = forge.jit(lambda x, weight: made.op(x, weight), strict=True)
    assert_trains(function, inputs(grad=True))
    assert {"torch.sin", "torch.mul"} <= {operation for operation, _ in executors(function)} and made.calls() == []


def test_a_call_that_the_kernel_declines_says_why(operator: Callable) -> None:
    made = operator()
    function = jitted(lambda x, weight: made.op(x, weight), made)
    args = inputs(torch.float64)
    torch.testing.assert_close(function(*args), plain(*args))
    assert "dtype float64 not in T (float32)" in reasons(function)


def test_a_wrong_kernel_is_declined(operator: Callable) -> None:
    made = operator(kernel_name="wrong", grad="composite")
    function = jitted(lambda x, weight: made.op(x, weight), made)
    assert_trains(function, inputs(grad=True))
    assert re.search("failed verification on x: float32.* values differ by up to 0.1", reasons(function))


def test_lengths_may_change(operator: Callable) -> None:
    made = operator()
    for function in (
        jitted(lambda x, weight: made.op(x, weight), made, dynamic=True),
        forge.jit(made.op, dynamic=True),
    ):
        for rows in (3, 5, 7):
            x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            assert_trains(function, [x, weight])
        assert forge.explain(function).graphs == 1


def test_lengths_may_change_without_a_reference(operator: Callable) -> None:
    made = operator(func="fake: fake")
    function = jitted(lambda x, weight: made.op(x, weight), made, dynamic=True)
    for rows in (3, 5, 7):
        x, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        torch._dynamo.mark_static(x, 1)  # only this declares that the two lengths are equal, as the kernel requires
        torch._dynamo.mark_static(weight, 0)
        assert_trains(function, [x, weight])
    assert forge.explain(function).graphs == 1 and ("acme.fast" in dict(map(reversed, executors(function))))


def test_a_mask_that_the_reference_makes_follows_lengths(operator: Callable) -> None:
    code = "import torch\n\ndef f(x):\n    return x * torch.arange(x.shape[0], device=x.device)[:, None]\n"
    made = operator(code=code, schema="(Tensor x) -> Tensor", func="reference: f", **_none("f"))
    function = forge.jit(lambda x: made.op(x), dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(function(x), x * torch.arange(rows)[:, None])
    assert forge.explain(function).graphs == 1


def test_forge_trace_records_it_too(operator: Callable) -> None:
    made = operator()
    x, weight = inputs()
    (bound,) = forge.trace(lambda x, weight: made.op(x, weight, 1), x, weight).bound_symbols
    assert bound.symbol.id == f"torch.ops.acme_test.{made.base}" and type(bound.args[2]) is float
    with pytest.raises(TypeError, match=f"{made.name} takes x, weight, eps, not \\['epsilon'\\]"):
        forge.trace(lambda x, weight: made.op(x, weight, epsilon=1), x, weight)


def test_a_reference_that_torchlang_does_not_have_is_one_opaque_call(operator: Callable) -> None:
    code = """
        import torch

        def f(x, y):
            return torch._fake_quantize_learnable_per_tensor_affine(x, y, torch.zeros(1), -8, 7, 1.0)
    """
    made = operator(
        code=code,
        schema="(Tensor x, Tensor y) -> Tensor",
        func="reference: f",
        arg_meta="{x: T, y: T}",
        shape="null",
        grad="none",
    )
    x, y = torch.randn(4, 4, requires_grad=True), torch.ones(1, requires_grad=True)
    quantized = torch._fake_quantize_learnable_per_tensor_affine(x, y, torch.zeros(1), -8, 7, 1.0)
    wanted = torch.autograd.grad(quantized.sum(), [x, y])
    for function in (made.op, forge.jit(lambda x, y: made.op(x, y))):
        result = function(x, y)
        torch.testing.assert_close(result, quantized)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), [x, y]), wanted)


def test_a_reference_that_changes_its_argument_is_refused(operator: Callable) -> None:
    code = "import torch\n\ndef f(x):\n    return x.mul_(2) + 1\n"
    made = operator(code=code, schema="(Tensor x) -> Tensor", func="reference: f", **_none("f"))
    with pytest.raises(ValueError, match=f"{made.name}: its reference changes its arguments x"):
        forge.trace(lambda x: made.op(x), torch.randn(3, 4))


# without a reference


def test_without_a_reference_torch_runs_what_no_kernel_takes(operator: Callable) -> None:
    made = operator(func="fake: fake", where='["H % 4 == 0"]')
    function = jitted(lambda x, weight: made.op(x, weight) * 2, made, dynamic=False)
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(function(x, weight), plain(x, weight) * 2)
    assert executors(function)[0][1] == "acme.fast"
    with pytest.raises(NotImplementedError, match=r"no kernel runs .*H = 7 is not a multiple of 4"):
        function(torch.randn(3, 7), torch.randn(7))
    row = forge.explain(function).rows[-2]
    assert (row.operation, row.executor) == (f"opaque.torch.ops.acme_test.{made.base}", "opaque")
    assert ("acme.fast", "H = 7 is not a multiple of 4") in row.declined


def test_without_a_reference_a_program_trains_with_the_kernels_backward(operator: Callable) -> None:
    made = operator(func="fake: fake")
    function = jitted(lambda x, weight: made.op(x, weight), made)
    assert_trains(function, inputs(grad=True))
    assert "backward" in made.calls()


def test_without_a_reference_a_notice_says_that_values_were_not_compared(
    operator: Callable, capsys: pytest.CaptureFixture
) -> None:
    made = operator(func="fake: fake")
    with pytest.warns(HubNotice, match="is used, but its values were not compared: the operator has no reference"):
        jitted(lambda x, weight: made.op(x, weight), made)(*inputs())
    assert cli.main(["kernels", "verify", str(made.folder)]) == 0
    assert "ok, but its values were not compared" in capsys.readouterr().out


STRIDED = "torch.as_strided(x, x.shape, torch.empty(x.shape).stride())"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (f"return torch.sin({STRIDED}) * weight + eps", "values differ by up to"),
        ("return (torch.sin(x) * weight + eps)[:, :-1]", "shape is torch.Size.*but the fake implementation says"),
        ("return (torch.sin(x) * weight + eps).double()", "dtype is torch.float64, but the fake implementation says"),
        ("x.add_(1)\n        return x.clone()", "an input, or memory beside it, was changed"),
        ("import ctypes\n        ctypes.string_at(0)", r"crashed \(signal 11\)"),
        ("raise ValueError('not today')", "raises ValueError: not today"),
    ],
)
def test_without_a_reference_a_kernel_is_held_to_its_own_results(operator: Callable, body: str, wanted: str) -> None:
    code = CODE + f"\n    def broken(x, weight, eps):\n        {body}\n"
    made = operator(func="fake: fake", code=code, kernel_name="broken", grad="none")
    with pytest.raises(NotImplementedError, match=wanted):
        made.op(*inputs())


def test_without_a_reference_a_backward_is_held_to_its_own_results(operator: Callable) -> None:
    code = CODE + f"\n    def careless(grad_output, x, weight, eps):\n        return {STRIDED}, grad_output.sum(0)\n"
    made = operator(func="fake: fake", code=code, grad="{kernel_name: careless}")
    with pytest.raises(NotImplementedError, match=r"the gradient of x.*values differ"):
        made.op(*inputs())


# errors


def _problem(made: Operator, wanted: str, place: str = "4:3") -> None:
    with pytest.raises(ManifestError) as error:
        gather([made.folder])
    assert f"{made.manifest}:{place}: {wanted}" in str(error.value)
    assert not hasattr(torch.ops.acme_test, made.base) and functions.find_function(made.name) is None


def test_neither_fake_nor_reference_is_an_error_at_its_place(operator: Callable) -> None:
    made = operator(gathered=False, func="replace: false", grad="none")
    _problem(made, f"func {made.name} has neither 'fake' nor 'reference', so that its results are not known")


def test_a_reference_that_is_not_there_is_an_error_at_its_place(operator: Callable) -> None:
    made = operator(gathered=False, func="reference: referenc")
    _problem(made, "reference 'referenc' not found: ImportError: ", "5:14")


def test_a_fake_that_takes_other_arguments_is_an_error_at_its_place(operator: Callable) -> None:
    made = operator(gathered=False, func="reference: reference\nfake: wrong_fake", code=CODE + WRONG_FAKE)
    _problem(made, "fake 'wrong_fake': its signature does not accept 'eps'", "6:9")


WRONG_FAKE = "\n    def wrong_fake(x, weight):\n        return x\n"


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (".out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", "writes to out; declare what it computes"),
        ("(Tensor(a) x) -> Tensor(a)", "returns a view; its results must be tensors of their own"),
        ("(Tensor x, *, Tensor weight) -> Tensor", "has the keyword-only tensor weight, which has no gradient"),
        ("(Tensor x) -> int", "returns something else than tensors"),
    ],
)
def test_a_schema_that_can_be_no_symbol_is_an_error_at_its_place(operator: Callable, schema: str, wanted: str) -> None:
    code = "def f(x, weight=None, out=None):\n    return x\n"
    made = operator(gathered=False, schema=schema, code=code, func="reference: f", **_none("f"))
    name = made.name + (".out" if "out" in schema else "")
    _problem(made, f"func {name} {wanted}")


def test_another_schema_of_the_same_name_is_an_error_that_names_both(operator: Callable) -> None:
    first = operator()
    second = operator(gathered=False, base=first.base, schema=SCHEMA.replace("eps=0.5", "eps=0.25"))
    with pytest.raises(ManifestError) as error:
        gather([second.folder])
    text = str(error.value)
    assert f"{second.manifest}:4:3: func {first.name} is declared with another schema at {first.manifest}:4:3: " in text
    with torch.library._scoped_library("acme_test", "FRAGMENT") as library:
        library.define("foreign(Tensor x) -> Tensor")
        with pytest.raises(ManifestError, match=r"is in torch.ops with another schema: acme_test::foreign\(Tensor x\)"):
            gather([operator(gathered=False, base="foreign").folder])


def test_another_reference_of_the_same_operator_is_an_error_that_names_both(operator: Callable) -> None:
    first = operator()
    changed = CODE.replace("torch.sin(x) * weight + eps", "torch.cos(x) * weight + eps", 1)
    second = operator(gathered=False, base=first.base, code=changed)
    with pytest.raises(ManifestError, match=f"is declared with another reference at {first.manifest}:4:3; one of"):
        gather([second.folder])


def test_a_kernel_that_is_the_operator_itself_is_an_error_at_its_place(operator: Callable) -> None:
    first = operator()
    second = operator(gathered=False, base=first.base, kernel_name=first.name, grad="none")
    with pytest.raises(ManifestError, match=f"8:5: kernel '{first.name}' is the operator itself"):
        gather([second.folder])


def test_a_reference_that_returns_something_else_says_so(operator: Callable) -> None:
    code = "def f(x):\n    return x, x\n"
    made = operator(code=code, schema="(Tensor x) -> Tensor", func="reference: f", **_none("f", where='["R == 99"]'))
    with pytest.raises(RuntimeError, match=f"{made.name}: Tensor, Tensor was returned, but its schema says"):
        made.op(torch.randn(2, 2))


# all or nothing


def _tables() -> tuple:
    return dict(functions._functions), dict(eager._defined), len(eager._libraries), dict(torchlang.core._entries)


def test_an_error_in_a_later_entry_leaves_everything_as_it_was(operator: Callable) -> None:
    made = operator(gathered=False)
    text = made.manifest.read_text()
    made.manifest.write_text(text + "- op: torch.nn.functional.gelu\n  kernels:\n  - kernel_name: nowhere\n")
    before = _tables()
    with pytest.raises(ManifestError, match="kernel 'nowhere' not found"):
        gather([made.folder])
    assert _tables() == before and not hasattr(torch.ops.acme_test, made.base)
    made.manifest.write_text(text)
    gather([made.folder])
    assert_trains(made.op, inputs(grad=True))


def test_a_definition_that_torch_refuses_leaves_everything_as_it_was(
    operator: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = operator(gathered=False)
    before = _tables()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as context:
        context.setattr(torch.library, "register_autograd", refuse)
        with pytest.raises(RuntimeError, match="refused") as kept:  # with all that its traceback holds
            gather([made.folder])
    assert kept and _tables() == before and not hasattr(torch.ops.acme_test, made.base)
    gather([made.folder])
    assert_trains(made.op, inputs(grad=True))


def test_gathering_twice_is_gathering_once(operator: Callable, asked: list) -> None:
    made = operator()
    before = _tables()
    (kernel,) = gather([made.folder])
    assert _tables() == before and [each.name for each in eager._defined[made.name].executor.kernels] == ["acme.fast"]
    assert kernel.target.function is functions.find_function(made.name)
    made.op(*inputs())
    gather([made.folder])
    made.op(*inputs())
    assert len(asked) == 2  # in general, and for these arguments: the worker gathered it, too


def test_two_versions_share_the_operator(operator: Callable) -> None:
    first = operator()
    second = operator(base=first.base, code=CODE.replace("    CALLS = []", "    import math\n\n    CALLS = []"))
    args = inputs()
    for made in (first, second):
        function = jitted(lambda x, weight: first.op(x, weight), made)
        torch.testing.assert_close(function(*args), plain(*args))
        assert executors(function)[0][1] == "acme.fast" and made.calls() == ["f"]
    first.op(*args)
    assert (first.calls(), second.calls()) == ([], ["f"])  # the later one's kernel has replaced the one of its name


def test_the_operator_is_for_the_process_and_kernels_for_the_jit(operator: Callable) -> None:
    made = operator()
    function = forge.jit(lambda x, weight: made.op(x, weight), kernels=[made.folder])
    assert_trains(function, inputs(grad=True))
    assert "acme.fast" in dict(map(reversed, executors(function)))


# operators of a user's torch.library


def custom(name: str, *, fake: bool = True, gradient: bool = True) -> Any:
    """Return a torch.library.custom_op as users write it: x * y + 1."""

    def numpy(x: torch.Tensor, y: torch.Tensor, n: int = 1) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * y.detach().numpy() + n)

    made = torch.library.custom_op(f"acme_test::{name}", numpy, mutates_args=())
    if fake:
        made.register_fake(lambda x, y, n=1: torch.empty_like(x))
    if gradient:
        made.register_autograd(
            lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0], None),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
        )
    return getattr(torch.ops.acme_test, name)


def pair() -> list[torch.Tensor]:
    return [torch.randn(3, 8, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_kernel_declared_in_python_implements_a_custom_op(by_name: bool) -> None:
    name = f"custom{next(_numbers)}"
    op = custom(name)
    ran = []

    def fast(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        ran.append(n)
        return x * y + n

    kernel = forge.kernel(f"acme_test::{name}" if by_name else op, fast, dtypes=[torch.float32], grad="composite")
    function = forge.jit(lambda x, y: op(x, y, 2), kernels=[kernel])
    assert_trains(function, pair(), lambda x, y: x * y + 2)
    assert ran and (f"torch.ops.acme_test.{name}", "fast") in executors(function)
    assert forge.explain(function).opaque_calls == []


def test_a_wrong_kernel_of_a_custom_op_is_declined_and_torch_runs_it() -> None:
    name = f"custom{next(_numbers)}"
    op = custom(name)
    kernel = forge.kernel(op, lambda x, y, n: x * y + n + 1, dtypes=[torch.float32], grad="composite")
    function = forge.jit(lambda x, y: op(x, y), kernels=[kernel])
    assert_trains(function, pair(), lambda x, y: x * y + 1)
    assert "failed verification on x: float32[" in reasons(function) and "values differ by up to 1" in reasons(function)
    assert "opaque" in dict(map(reversed, executors(function)))


def test_an_operator_that_can_be_no_symbol_says_why() -> None:
    with torch.library._scoped_library("acme_test", "FRAGMENT") as library:
        library.define("unfaked(Tensor x) -> Tensor")
        with pytest.raises(
            NotImplementedError, match="no symbol for acme_test::unfaked: it has no fake implementation"
        ):
            forge.kernel("acme_test::unfaked", lambda x: x, dtypes=[torch.float32])
        library.define("doubled_(Tensor(a!) x) -> ()")
        with pytest.raises(NotImplementedError, match=r"acme_test::doubled_: it writes to x; .* and returns something"):
            forge.kernel("acme_test::doubled_", lambda x: x, dtypes=[torch.float32])


def test_a_manifest_names_a_custom_op(operator: Callable) -> None:
    op = custom(f"custom{next(_numbers)}")
    code = "CALLS = []\n\ndef f(x, y, n):\n    CALLS.append(n)\n    return x * y + n\n"
    made = operator(gathered=False, code=code, arg_meta="{x: T, y: T}", shape="null", grad="composite")
    text = re.sub(
        r'- func: ".*"\n  reference: reference\n', f"- op: acme_test::{op.__name__}\n", made.manifest.read_text()
    )
    made.manifest.write_text(text)
    function = jitted(lambda x, y: op(x, y, 3), made)
    assert_trains(function, pair(), lambda x, y: x * y + 3)
    assert "acme.fast" in dict(map(reversed, executors(function))) and 3 in made.calls()


def test_a_func_whose_operator_exists_is_taken_as_it_is(operator: Callable) -> None:
    base = f"custom{next(_numbers)}"
    op = custom(base)
    code = "CALLS = []\n\ndef f(x, y, n):\n    CALLS.append(n)\n    return x * y + n\n"
    entry = {"arg_meta": "{x: T, y: T}", "shape": "null", "grad": "none"}
    made = operator(
        base=base, code=code, schema="(Tensor x, Tensor y, SymInt n=1) -> Tensor", func="reference: f", **entry
    )
    args = pair()
    torch.testing.assert_close(op(*args), args[0] * args[1] + 1)
    assert made.calls() == []  # in eager it is the user's
    function = jitted(lambda x, y: op(x, y), made)
    torch.testing.assert_close(function(*[each.detach() for each in args]), args[0] * args[1] + 1)
    assert executors(function)[0][1] == "acme.fast"
