"""The keys of programs include all inputs of compilation; a program that no other process can identify is not
stored."""

import copy
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cache.support import is_cached, is_hit
from torch import nn

import forge
from forge import prims, torchlang
from forge.cache import keys
from forge.executors import FusionExecutor, OperatorExecutor, claim, resolve_executors
from forge.executors.fingerprint import owners
from forge.ir import get_grad, grad_rules, put_grad
from forge.prims.core import like

X = torch.linspace(-1, 1, 24).view(6, 4)


def leaf() -> torch.Tensor:
    return torch.ones(4, 4, requires_grad=True)


def model() -> nn.Module:
    return nn.Linear(4, 4)


def call(jitted: Callable) -> None:
    jitted(X)


def hits(use: Callable[[Any], Any] = call, make: Callable[[], Any] = model, **options: Any) -> bool:
    return is_hit(make, use, **options)


@pytest.fixture
def kept() -> None:
    assert not hits()
    assert hits()


def under(mode: Any) -> Callable:
    def use(jitted: Callable) -> None:
        with mode:
            jitted(X)

    return use


def frozen() -> nn.Module:
    made = model()
    made.weight.requires_grad_(False)
    return made


MISSES: dict[str, dict[str, Any]] = {
    "another dtype": {"make": lambda: model().double(), "use": lambda jitted: jitted(X.double())},
    "another shape": {"use": lambda jitted: jitted(X[:3])},
    "other strides": {"use": lambda jitted: jitted(X.t().contiguous().t())},
    "an input with a gradient": {"use": lambda jitted: jitted(X.clone().requires_grad_())},
    "a weight without": {"make": frozen},
    "another constant": {"make": lambda: lambda x: x * 2},
    "a module of another name": {"make": lambda: nn.Sequential(model())},
    "no grad": {"use": under(torch.no_grad())},
    "inference mode": {"use": under(torch.inference_mode())},
    "autocast": {"use": under(torch.autocast("cpu", torch.bfloat16))},
    "other executors": {"executors": ["torch-prims", "torch"]},
    "other memory": {"memory": "speed"},
    "other numerics": {"numerics": "eager"},
    "strict": {"strict": True},
    "a transform": {"transforms": [lambda trace: trace]},
}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", MISSES)
def test_what_differs_is_not_found(name: str) -> None:
    assert not hits(**MISSES[name])
    assert hits(**MISSES[name])
    assert hits()


@pytest.mark.usefixtures("kept")
def test_the_default_dtype_decides() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert not hits(make=lambda: model().float())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", ["flash_sdp", "math_sdp"])
def test_the_kernels_of_attention_that_are_allowed_decide(name: str) -> None:
    getattr(torch.backends.cuda, f"enable_{name}")(False)
    try:
        assert not hits()
    finally:
        getattr(torch.backends.cuda, f"enable_{name}")(True)


@pytest.mark.usefixtures("kept")
def test_forges_own_code_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "verifier_versions", lambda: ("forge 1.0 other code",))
    keys._system.cache_clear()
    try:
        assert not hits()
    finally:
        keys._system.cache_clear()


def test_forges_own_code_is_hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("x = 1")
    monkeypatch.setattr(owners, "_FORGE", tmp_path)
    before = owners.forge_hash.__wrapped__()
    (tmp_path / "part.py").write_text("x = 2")
    assert owners.forge_hash.__wrapped__() != before


@pytest.mark.usefixtures("kept")
def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "processor", lambda: "another one")
    keys._system.cache_clear()
    try:
        assert not hits()
    finally:
        keys._system.cache_clear()


def test_it_can_be_switched_off(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert not hits(cache=False)
    monkeypatch.setenv("FORGE_CACHE", "0")
    for _ in range(2):
        assert not hits()
    assert not programs.exists()


def test_copies_and_rejitted_modules_keep_the_option() -> None:
    jitted = forge.jit(model(), cache=False)
    copied = copy.deepcopy(jitted)
    copied(X)
    assert forge.explain(copied).uncached == []
    assert not hits()


def test_the_backend_takes_the_option(programs: Path) -> None:
    torch.compile(model(), backend="forge", options={"cache": False})(X)
    assert not programs.exists()
    torch._dynamo.reset()
    torch.compile(model(), backend="forge")(X)
    assert len(list(programs.iterdir())) == 1


# executors


def scaled(factor: float) -> OperatorExecutor:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.relu, lambda input, inplace=False: input.clamp(min=0) * factor)
    return mine


def test_the_functions_of_a_users_executor_decide() -> None:
    run = lambda: torch.relu
    assert not hits(make=run, executors=[scaled(1.0), "torch"])
    assert hits(make=run, executors=[scaled(1.0), "torch"])
    assert not hits(make=run, executors=[scaled(2.0), "torch"])
    torch._dynamo.reset()
    jitted = forge.jit(torch.relu, executors=[scaled(2.0), "torch"])
    torch.testing.assert_close(jitted(X), torch.relu(X) * 2)
    assert is_cached(jitted)


def test_a_program_whose_executor_overwrites_an_argument_is_not_kept() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.relu, lambda input, inplace=False: input.clamp_(min=0))
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="overwrites its argument input"):
            forge.jit(torch.relu, executors=[mine, "torch"])(X.clone())


class Fuser(FusionExecutor):
    """An executor of regions that torch runs."""

    def can_fuse(self, bound: Any) -> Any:
        return bound.symbol.name in ("sin", "cos")

    def fuse(self, region: Any) -> Any:
        self.text = str(region)
        return claim(region, resolve_executors(["torch"]))[0].python_callable()


class KeepingFuser(Fuser):
    loads = 0

    def identity(self) -> str:
        return "1"

    def dump(self, function: Callable) -> bytes:
        return self.text.encode()

    def load(self, data: bytes) -> Callable:
        assert b"sin" in data and b"cos" in data
        type(self).loads += 1
        return lambda x: (x.sin().cos(),)


def waves(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos()


def test_a_fuser_that_keeps_its_regions_gives_them_to_the_next_process() -> None:
    assert not hits(make=lambda: waves, executors=[KeepingFuser("keeps"), "torch"])
    for _ in range(2):
        torch._dynamo.reset()
        jitted = forge.jit(waves, executors=[KeepingFuser("keeps"), "torch"])
        torch.testing.assert_close(jitted(X), waves(X))
        assert is_cached(jitted)
    assert KeepingFuser.loads >= 1


def test_a_region_that_cannot_be_loaded_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not hits(make=lambda: waves, executors=[KeepingFuser("keeps"), "torch"])
    monkeypatch.setattr(KeepingFuser, "load", lambda self, data: 1 / 0)
    assert not hits(make=lambda: waves, executors=[KeepingFuser("keeps"), "torch"])
    assert "a program cannot be used, and is compiled again: ZeroDivisionError" in caplog.text


# programs that cannot be kept


def why(target: Any, *inputs: Any, **options: Any) -> list[str]:
    for _ in range(2):
        torch._dynamo.reset()
        jitted = forge.jit(target, **options)
        jitted(*inputs)
        explained = forge.explain(jitted)
        assert explained.cached == 0
        if explained.uncached:
            assert f"not kept on disk: {explained.uncached[0]}" in str(explained)
    return explained.uncached


def test_a_fuser_that_does_not_say_what_it_depends_on() -> None:
    reason = "executor fuser does not say what its programs depend on"
    assert why(waves, X, executors=[Fuser("fuser"), "torch"]) == [reason]


def test_a_fuser_that_does_not_keep_its_regions() -> None:
    fuser = Fuser("fuser")
    fuser.identity = lambda: "1"
    assert why(waves, X, executors=[fuser, "torch"]) == ["executor fuser does not keep its regions for another process"]


def test_a_transform_that_holds_what_no_other_process_has() -> None:
    lock = threading.Lock()

    def transform(trace: Any) -> Any:
        with lock:
            return trace

    assert why(torch.relu, X, transforms=[transform]) == ["one of its transforms is known to this process only"]


def test_a_torch_func_region() -> None:
    """The region stays an opaque call, because it is random."""
    (reason,) = why(lambda x: torch.func.vmap(torch.bernoulli, randomness="different")(x.abs() / 9) + 1, X)
    assert "which another process cannot find by a name" in reason


# functions of the user's


SOURCE = """
import torch

FACTOR = {factor}

def helper(x):
    return x * FACTOR

@torch._dynamo.allow_in_graph
def opaque(x):
    return helper(x) + 1
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Callable[[float], ModuleType]]:
    """Yield a function that writes a user's module with a factor and imports it."""

    def written(factor: float) -> ModuleType:
        path = tmp_path / "users_module.py"
        path.write_text(SOURCE.format(factor=factor))
        spec = importlib.util.spec_from_file_location("users_module", path)
        module = sys.modules["users_module"] = importlib.util.module_from_spec(spec)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        return module

    yield written
    sys.modules.pop("users_module", None)


def test_an_opaque_function_is_found_by_its_name_and_known_by_its_code(user: Callable) -> None:
    for factor, found in ((2.0, False), (2.0, True), (3.0, False)):
        torch._dynamo.reset()
        opaque = user(factor).opaque
        jitted = forge.jit(lambda x: opaque(x) * 2)  # noqa: B023
        torch.testing.assert_close(jitted(X), (X * factor + 1) * 2)
        assert is_cached(jitted) == found


def test_an_opaque_function_without_a_name_is_not_kept() -> None:
    @torch._dynamo.allow_in_graph
    def local(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    (reason,) = why(lambda x: local(x) * 2, X)
    assert reason.endswith("local, which another process cannot find by a name")


def test_an_operator_of_the_users_is_known_by_its_code() -> None:
    def define(factor: int) -> Any:
        @torch.library.custom_op(f"forge_tests::times_{define.count}", mutates_args=())
        def times(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        times.register_fake(torch.empty_like)
        return times

    define.count = 0
    times = define(2)
    for found in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(lambda x: times(x) + 1)
        torch.testing.assert_close(jitted(X), X * 2 + 1)
        assert is_cached(jitted) == found
    times._init_fn = lambda x: x * 3  # as if the next process had different code for it
    torch._dynamo.reset()
    jitted = forge.jit(lambda x: times(x) + 1)
    jitted(X)
    assert not is_cached(jitted)


def test_the_gradient_rules_of_a_users_symbols_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers the symbol of an operator, and the prim that its body calls: rules are registered with their
    symbols."""
    times = torch.library.custom_op(
        "forge_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    times.register_fake(torch.empty_like)
    monkeypatch.setattr(torchlang.core, "_entries", dict(torchlang.core._entries))
    monkeypatch.setattr(torchlang.core, "_symbols", dict(torchlang.core._symbols))
    monkeypatch.setattr(torchlang.core, "_functions", dict(torchlang.core._functions))
    monkeypatch.setattr(prims.core, "_prims", dict(prims.core._prims))
    monkeypatch.setattr(grad_rules, "_rules", dict(grad_rules._rules))
    prim = prims.make_prim("twice_of_tests", "twice", meta=lambda x: like(x))
    symbol = torchlang.torchsymbol(torch.ops.forge_tests.twice.default)(lambda x: prim(x))
    executor = OperatorExecutor("doubling")
    executor.register_implementation(prim, torch.ops.forge_tests.twice.default)
    x = torch.ones(3, requires_grad=True)

    def gradient() -> float:
        torch._dynamo.reset()
        jitted = forge.jit(lambda x: times(x).sum(), executors=["torch", executor])
        (found,) = torch.autograd.grad(jitted(x), x)
        gradient.cached = is_cached(jitted)
        return found[0].item()

    def rule_of(symbol: Any, factor: int) -> Callable:
        def rule(x: Any) -> Any:
            out = symbol(x)
            put_grad(x, get_grad(out) * factor)
            return out

        return rule

    for ruled, factor in ((prim, 2), (prim, 3), (symbol, 4), (symbol, 5)):
        monkeypatch.setitem(grad_rules._rules, ruled.id, rule_of(ruled, factor))
        assert (gradient(), gradient.cached) == (factor, False), f"as before {ruled.id} had this rule"
        assert (gradient(), gradient.cached) == (factor, True)


@pytest.mark.parametrize("name", ["torch", "torch-prims"])
def test_the_identity_of_torchs_executors_is_computed_once(name: str) -> None:
    (executor,) = resolve_executors([name])
    assert executor.identity() is executor.identity()
