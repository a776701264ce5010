"""The executor API: registration, resolution by name, users' executors."""

import pickle
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import prims, torchlang
from forge.api.functional import Direct
from forge.capture.handles import handle_of
from forge.executors import (
    Executor,
    FusionExecutor,
    OperatorExecutor,
    claim,
    decline,
    executor,
    register_executor,
    resolve_executors,
)
from forge.executors import registry as executors
from forge.ir import BoundSymbol, Trace

# registration


def test_an_operator_is_registered_once() -> None:
    mine = OperatorExecutor("mine")
    mine.register_operator("f", like=prims.neg, fn=torch.neg)
    with pytest.raises(ValueError, match="mine: operator 'f' is registered twice"):
        mine.register_operator("f", like=prims.neg, fn=torch.neg)


@pytest.mark.parametrize("given", [{}, {"like": prims.neg, "meta": lambda x: x}], ids=["neither", "both"])
def test_an_operator_has_its_metadata_from_one_place(given: dict) -> None:
    with pytest.raises(ValueError, match=r"mine\.register_operator\('f'\): give exactly one of meta and like"):
        OperatorExecutor("mine").register_operator("f", fn=torch.neg, **given)


def test_a_symbol_has_one_implementation_in_an_executor() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(prims.neg, torch.neg)
    with pytest.raises(ValueError, match=r"mine: prims\.neg has an implementation already"):
        mine._register_implementation(prims.neg, torch.neg)


@pytest.mark.parametrize("given", [{}, {"op": torch.neg, "execution_transform": torch.neg}], ids=["neither", "both"])
def test_an_implementation_is_an_operator_or_a_transform(given: dict) -> None:
    with pytest.raises(TypeError, match=r"mine: prims\.neg needs exactly one of op and execution_transform"):
        OperatorExecutor("mine").register_implementation(prims.neg, **given)


def test_an_operator_is_a_function() -> None:
    with pytest.raises(TypeError, match=r"mine: prims\.neg is to be run by 3, which is no function"):
        OperatorExecutor("mine").register_implementation(prims.neg, 3)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a copy of the registry that the test may change."""
    monkeypatch.setattr(executors, "_executors", dict(executors._executors))
    monkeypatch.setattr(executors, "_default_order", list(executors._default_order))


class Absent(OperatorExecutor):
    def is_available(self) -> Any:
        return decline("there is no such device")


def test_the_environment_names_the_executors_of_who_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_EXECUTORS", "torch-prims, torch")
    assert [each.name for each in resolve_executors(None)] == ["torch-prims", "torch"]
    assert [each.name for each in resolve_executors(["torch"])] == ["torch"]
    monkeypatch.setenv("FORGE_EXECUTORS", "trch")
    with pytest.raises(ValueError, match="unknown executor 'trch'; did you mean 'torch'"):
        resolve_executors(None)


@pytest.mark.usefixtures("registry")
def test_an_executors_name_is_its_own() -> None:
    with pytest.raises(ValueError, match="an executor named 'torch' is registered already"):
        register_executor(OperatorExecutor("torch"))


def test_two_executors_of_one_name_are_an_error() -> None:
    mine = OperatorExecutor("torch")
    with pytest.raises(ValueError, match=r"forge.jit: two executors are named 'torch'; rename one of them"):
        forge.jit(torch.sin, executors=[mine, "torch"])
    assert resolve_executors([mine, mine]) == [mine, mine]


@pytest.mark.parametrize("method", ["stride", "is_contiguous"])
def test_a_checker_that_asks_for_a_layout_is_told_what_to_do(method: str) -> None:
    mine = OperatorExecutor("mine")
    checker = lambda input, inplace=False: getattr(input, method)()
    mine.register_implementation(torchlang.silu, F.silu, checker=checker)
    wanted = (
        rf"\(x: f32\[2\] cpu\) has no attribute '{method}': .*manifest.*checker reads the attributes strides and offset"
    )
    with pytest.raises(AttributeError, match=wanted) as caught:
        forge.jit(lambda x: F.silu(x), executors=[mine, "torch"])(torch.ones(2))
    assert "clang" not in str(caught.value)


@pytest.mark.usefixtures("registry")
def test_default_executors_are_asked_in_order_and_only_where_available() -> None:
    before = resolve_executors(None)
    first = register_executor(OperatorExecutor("first"), default=True, first=True)
    last = register_executor(OperatorExecutor("last"), default=True)
    register_executor(OperatorExecutor("only by name"))
    register_executor(Absent("absent"), default=True)
    assert resolve_executors(None) == [first, *before, last]
    assert resolve_executors(["only by name"])[0].name == "only by name"
    assert "absent" in executors.known_executors()


@pytest.mark.usefixtures("registry")
def test_an_executor_that_is_not_available_says_why_when_named() -> None:
    register_executor(Absent("absent"))
    with pytest.raises(RuntimeError, match="executor 'absent' is not available: there is no such device"):
        resolve_executors(["absent"])


def test_an_unknown_name_is_an_error_with_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown executor 'trch'; did you mean 'torch'\?.*known: .*torch-prims"):
        resolve_executors(["trch"])


@pytest.mark.parametrize(
    ("given", "message"),
    [("torch", "executors is 'torch', but must be a list"), ([3], "an executor is 3, but must be a name")],
)
def test_executors_are_a_list_of_names_or_executors(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        resolve_executors(given)


def test_a_fusion_executor_says_what_it_must_have() -> None:
    for call in (lambda: FusionExecutor("f").can_fuse(None), lambda: FusionExecutor("f").fuse(None)):
        with pytest.raises(NotImplementedError):
            call()
    assert repr(Executor("f")) == "<executor f>"


# the examples of the module's docstring


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.fc(x) * 2 + 1)


def _examples() -> list[str]:
    """Return the two programs in the docstring of forge/executors/executor.py."""
    blocks = re.split(r"^\S.*$", executor.__doc__, flags=re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if block.strip()]


def _run(example: str, model: torch.nn.Module) -> dict[str, Any]:
    scope: dict[str, Any] = {"model": model, "__name__": "example"}
    exec(compile(example, "<example>", "exec"), scope)
    return scope


def _assert_trains(jitted: Callable, model: torch.nn.Module) -> None:
    x = torch.randn(2, 4)
    expected, actual = model(x), jitted(x)
    torch.testing.assert_close(actual, expected)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(actual.sum(), parameters)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), parameters))


def test_the_documented_operator_executor_runs() -> None:
    model = Model()
    scope = _run(_examples()[0], model)
    _assert_trains(scope["jitted"], model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(scope["jitted"](x), model(x))
    compiled = handle_of(scope["jitted"]).reports[-1]
    assert ("mine", "torch.nn.functional.silu") in [(made.executor, made.operation) for made in compiled.claims]
    declined = scope["takes"](torch.ones(1, dtype=torch.float64))
    assert declined.reason == "my_silu computes in float32, and the input is torch.float64"


def test_the_documented_fusion_executor_runs(capsys: pytest.CaptureFixture) -> None:
    model = Model()
    scope = _run(_examples()[1], model)
    _assert_trains(scope["jitted"], model)
    (compiled,) = handle_of(scope["jitted"]).reports
    assert [made.executor for made in compiled.claims].count("fuser") >= 1
    assert "# region, region of fuser" in capsys.readouterr().out


def test_the_examples_are_about_twenty_lines_each() -> None:
    for example in _examples():
        assert len([line for line in example.splitlines() if line.strip()]) <= 20


# fusion


class Recorder(FusionExecutor):
    """A fusion executor of the named prims and clang calls that keeps its regions."""

    def __init__(self, *names: str, fuses: bool = True) -> None:
        super().__init__("fuser")
        self.fused = names
        self.fuses = fuses
        self.regions: list[Trace] = []

    def can_fuse(self, bound: BoundSymbol) -> Any:
        return bound.symbol.name in self.fused or decline("not mine")

    def fuse(self, region: Trace) -> Any:
        self.regions.append(region)
        if not self.fuses:
            return decline("too small")
        return claim(region, resolve_executors(["torch"]))[0].python_callable()


def program(x: Any, y: Any) -> Any:
    a = torch.exp(x)
    b = a + y
    c = b @ y
    d = torch.exp(c) + a
    return d, c * 2


def test_neighbouring_calls_become_one_and_the_result_is_the_same() -> None:
    fuser = Recorder("exp", "add", "mul")
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    direct = Direct(program, [fuser, "torch"])
    for actual, expected in zip(direct(x, y), program(x, y), strict=True):
        torch.testing.assert_close(actual, expected)
    first, second = fuser.regions
    assert [bound.symbol.name for bound in first.bound_symbols] == ["exp", "add"]
    assert len(first.output) == 2  # a is read after the region, and so is b
    assert [bound.symbol.name for bound in second.bound_symbols] == ["exp", "add", "mul"]
    assert len(second.inputs) == 2 and len(second.output) == 2
    ((_, compiled),) = direct.compiled.values()
    assert [made.executor for made in compiled.claims].count("fuser") == 5  # of each call in them


def test_a_region_that_is_declined_runs_as_it_was() -> None:
    fuser = Recorder("exp", "add", "mul", fuses=False)
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    direct = Direct(program, [fuser, "torch"])
    torch.testing.assert_close(direct(x, y)[0], program(x, y)[0])
    ((_, compiled),) = direct.compiled.values()
    assert len(fuser.regions) == 2 and "fuser" not in [made.executor for made in compiled.claims]


def test_a_single_call_is_no_region() -> None:
    fuser = Recorder("exp")
    Direct(program, [fuser, "torch"])(torch.randn(3, 3), torch.randn(3, 3))
    assert fuser.regions == []


def test_backward_programs_are_fused_too() -> None:
    fuser = Recorder("exp", "add", "mul", "clang.mul")
    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    direct = Direct(lambda x, y: torch.exp(x * y) * 3, [fuser, "torch"])
    (gradient,) = torch.autograd.grad(direct(x, y).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad((torch.exp(x * y) * 3).sum(), x)[0])
    assert len(fuser.regions) == 2


def test_a_fuser_that_gives_nothing_is_told_by_name() -> None:
    class Nothing(FusionExecutor):
        def can_fuse(self, bound: BoundSymbol) -> bool:
            return True

        def fuse(self, region: Trace) -> None:
            return None

    jitted = forge.jit(lambda x: torch.sin(x) * 2, executors=[Nothing("empty"), "torch"])
    with pytest.raises(TypeError, match="empty: fuse returned None, but must return a function, or decline with the"):
        jitted(torch.ones(3))


def test_a_text_in_the_place_of_an_answer_is_told_by_name() -> None:
    def only_cuda(input: Any, approximate: str = "none") -> str:
        return "only for CUDA"

    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.find(F.gelu), F.relu, checker=only_cuda)
    with pytest.raises(TypeError, match=r"only_cuda answers 'only for CUDA', but must answer True, or decline with"):
        forge.jit(F.gelu, executors=[mine, "torch"])(torch.ones(3))


def test_a_torch_function_is_registered_by_its_symbol() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(F.gelu, F.relu)
    assert list(mine.implementations) == [torchlang.find(F.gelu).id]


@pytest.mark.parametrize("checker", [lambda input: bool(input > 0), lambda input: input.sum().item() > 0])
def test_a_checker_that_reads_values_is_an_error_for_its_author(checker: Callable) -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torch.relu, torch.relu, checker=checker)
    with pytest.raises(TypeError, match=r"lambda> reads the value of a tensor, but a checker reads the shapes, dtypes"):
        forge.jit(torch.relu, executors=[mine, "torch"])(torch.ones(3))


def test_a_fuser_without_its_methods_is_told_which() -> None:
    with pytest.raises(NotImplementedError, match=r"FusionExecutor\.can_fuse\(bound\): return whether"):
        forge.jit(torch.relu, executors=[FusionExecutor("mine"), "torch"])(torch.ones(3))


def test_a_kernel_among_executors_is_told_where_it_goes() -> None:
    kernel = forge.kernel(F.silu, lambda input: input)
    with pytest.raises(TypeError, match=r"an executor is <kernel .* of torch\.nn\.functional\.silu>, .*as kernels=\["):
        forge.jit(F.silu, executors=[kernel])


def test_a_pattern_is_implemented_as_it_is_or_by_its_name() -> None:
    @forge.pattern
    def squared(x):  # type: ignore[no-untyped-def]
        return torch.relu(x) ** 2

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    ran = []
    mine = OperatorExecutor("mine")
    mine.register_implementation(squared, lambda x: ran.append("squared") or torch.relu(x) ** 2)
    mine.register_implementation(
        "pattern:rms_norm",
        lambda x, weight, eps: ran.append("norm") or torch.nn.functional.rms_norm(x, weight.shape, weight, eps),
    )
    x, weight = torch.randn(3, 8), torch.randn(8)
    program = lambda x, weight: norm(torch.relu(x) ** 2, weight)
    torch.testing.assert_close(forge.jit(program, executors=[mine, "torch"])(x, weight), program(x, weight))
    assert ran == ["squared", "norm"]
    with pytest.raises(KeyError, match="no shipped pattern is called 'rms'"):
        mine.register_implementation("pattern:rms", torch.relu)


@pytest.mark.parametrize("given", [len, None])
def test_what_is_registered_for_is_a_symbol(given: Any) -> None:
    with pytest.raises(TypeError, match=r"mine: register_implementation got .*, but must get a symbol"):
        OperatorExecutor("mine").register_implementation(given, F.gelu)


@pytest.mark.usefixtures("registry")
def test_a_registered_executor_pickles_by_its_name_and_so_does_a_module_with_it() -> None:
    mine = OperatorExecutor("pickled")
    mine.register_implementation(torch.nn.functional.silu, lambda input, inplace=False: input * torch.sigmoid(input))
    module = forge.jit(torch.nn.Sequential(torch.nn.SiLU()), executors=[mine, "torch"])
    with pytest.raises(TypeError, match=r"cannot pickle executor 'pickled', which is not registered: call forge\.exec"):
        pickle.dumps(module)
    register_executor(mine)
    assert pickle.loads(pickle.dumps(mine)) is mine
    again = pickle.loads(pickle.dumps(module))
    x = torch.randn(2, 3)
    torch.testing.assert_close(again(x), torch.nn.functional.silu(x))
    assert forge.explain(again).rows[0].executor == "pickled"


def test_a_meta_may_compute_with_proxies() -> None:
    """Its calls are not the operator's, and an execution_transform may call that."""
    mine = OperatorExecutor("mine")
    transposed = mine.register_operator("matmul_t", meta=lambda a, b: a @ b.T, fn=lambda a, b: a @ b.t())
    added = mine.register_operator("add", like=torchlang.add, fn=torch.add)

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        product = transposed(input, weight)
        return product if bias is None else added(product, bias)

    mine.register_implementation(F.linear, execution_transform=linear)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    jitted = forge.jit(model, executors=[mine, "torch"])
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), model(x))
    assert [row.executor for row in forge.explain(jitted).rows] == ["mine"]


def test_a_method_that_metas_do_not_have_is_an_error_with_the_remedy() -> None:
    mine = OperatorExecutor("mine")
    transposed = mine.register_operator("t", meta=lambda x: x.t(), fn=torch.t)
    mine.register_implementation(torch.t, execution_transform=lambda input: transposed(input))
    message = r"no attribute 't': torch.Tensor.t is no method in metas, bodies and rules: call forge.torchlang"
    with pytest.raises(AttributeError, match=message):
        forge.jit(lambda x: x.t() + 1, executors=[mine, "torch"])(torch.ones(2, 2))


def test_a_function_of_functions_that_run_has_no_note() -> None:
    jitted = forge.jit(lambda x: F.softmax(F.softsign(x), -1) + 1, executors=["torch"])
    jitted(torch.randn(2, 3))
    assert [row.declined for row in forge.explain(jitted).rows if row.declined] == []


STRIDED_PROGRAMS = {
    "a result": torch.tanh,
    "computed from it": lambda x: torch.tanh(x) * 2,
    "of several": lambda x: (torch.tanh(x), torch.relu(torch.tanh(x)), x + 1),
}


@pytest.mark.parametrize("name", STRIDED_PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_strides_of_an_implementations_result_are_eagers(name: str, dynamic: bool, grad: bool) -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torch.tanh, lambda input: input.t().contiguous().t().tanh())
    program, x = STRIDED_PROGRAMS[name], torch.randn(4, 8, requires_grad=grad)
    jitted = forge.jit(program, executors=[mine, "torch"], dynamic=dynamic)
    results, expected = (each if isinstance(each, tuple) else (each,) for each in (jitted(x), program(x)))
    torch.testing.assert_close(results, expected)
    assert [each.stride() for each in results] == [each.stride() for each in expected]
    assert "mine" in {row.executor for row in forge.explain(jitted).rows}
