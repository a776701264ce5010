"""Selection by forge.jit(select="measured"): the fastest candidate for a call is kept. All tests but one have their own
timer."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import clang, torchlang
from forge.api.functional import Direct
from forge.api.options import resolve_options
from forge.compiler import autotune_store
from forge.compiler.autotune import PARTS, Measurement
from forge.executors import FusionExecutor, OperatorExecutor, claim, decline, resolve_executors
from forge.executors.hubex import kernel_executor
from forge.ir import BoundSymbol, Symbol, Trace
from forge.ir.bounded import BoundedDict
from forge.support import timing

FAST, SLOW = 10e-6, 40e-6


class Timer:
    """A timer that reports the times that a test sets for each candidate, and runs it once. asked: the candidates by
    name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.asked: list[list[str]] = []
        self.wait: Callable[[], Any] = lambda: None

    def __call__(self, runs: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
        self.asked.append(list(runs))
        self.wait()
        for run in runs.values():
            run()
        return {name: self.seconds[name] for name in runs}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Timer:
    """Return the timer of a process that has measured nothing yet, with its own folder for measurements."""
    found = Timer()
    monkeypatch.setattr(timing, "time_candidates", found)
    monkeypatch.setattr(autotune_store, "_noticed", set())
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "forge"))
    another_process(monkeypatch)
    return found


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate another process: only files on disk are kept, and programs are compiled again."""
    monkeypatch.setattr(autotune_store, "_memo", BoundedDict(100))
    shutil.rmtree(autotune_store.folder().parent / "programs", ignore_errors=True)
    torch._dynamo.reset()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def mine(symbol: Symbol = torchlang.silu, function: Callable = silu, name: str = "mine") -> OperatorExecutor:
    found = OperatorExecutor(name)
    found.register_implementation(symbol, function)
    return found


class Fuser(FusionExecutor):
    """An executor that takes calls by name and has torch run regions of at least two."""

    def __init__(self, *names: str) -> None:
        super().__init__("fuser")
        self.names = names
        self.regions: list[list[str]] = []

    def identity(self) -> str:
        return "1"

    def can_fuse(self, bound: BoundSymbol) -> Any:
        return bound.symbol.name in self.names or decline("not mine")

    def fuse(self, region: Trace) -> Callable:
        self.regions.append([bound.symbol.name for bound in region.bound_symbols])
        return claim(region, resolve_executors(["torch"]))[0].python_callable()


def swiglu_kernel(function: Callable, **how: Any) -> Any:
    return forge.kernel("pattern:swiglu", function, **{"dtypes": [torch.float32], "grad": "composite", **how})


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def feed_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def measured(function: Callable, *inputs: torch.Tensor, executors: list, **options: Any) -> Any:
    """Call a function once, check it and its gradients against eager, and return its explanation."""
    jitted = forge.jit(function, executors=executors, **{"select": "measured", **options})
    actual, expected = jitted(*inputs), function(*inputs)
    torch.testing.assert_close(actual, expected)
    wanted = [each for each in inputs if each.requires_grad]
    if wanted and torch.is_grad_enabled():
        seed = torch.randn_like(expected)
        ours = torch.autograd.grad(actual, wanted, seed)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted, seed))
    return forge.explain(jitted)


def who(told: Any, phase: str = "forward") -> list[str]:
    return [row.executor for row in told.rows if row.phase == phase]


# the candidate that is kept


@pytest.mark.parametrize(("seconds", "kept"), [((FAST, SLOW), "mine"), ((SLOW, FAST), "torch")])
def test_the_faster_of_two_executors_is_kept(timer: Timer, seconds: tuple[float, float], kept: str) -> None:
    timer.seconds = dict(zip(("mine", "torch"), seconds, strict=True))
    told = measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
    assert who(told) == [kept]
    assert timer.asked == [["mine", "torch"]]


@pytest.mark.parametrize("kept", ["first", "second", "torch"])
def test_of_several_kernels_of_one_operation_the_fastest_is_kept(timer: Timer, kept: str) -> None:
    timer.seconds = {name: FAST if name == kept else SLOW for name in ("first", "second", "torch")}
    how = {"dtypes": [torch.float32], "grad": "none"}
    op = "torch.nn.functional.silu"
    kernels = [forge.kernel(op, lambda input: silu(input), name=name, **how) for name in ("first", "second")]
    told = measured(F.silu, torch.randn(4), executors=[kernel_executor(kernels, verify=False), "torch"])
    assert who(told) == [kept]
    assert sorted(timer.asked[0]) == ["first", "second", "torch"]


def test_kernels_of_one_name_are_told_apart(timer: Timer) -> None:
    timer.seconds = {"swiglu (1)": SLOW, "swiglu (2)": FAST, PARTS: SLOW}
    ran: list[str] = []

    def first(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ran.append("first")
        return swiglu(gate, up)

    def second(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ran.append("second")
        return swiglu(gate, up)

    kernels = [kernel_executor([swiglu_kernel(each, name="swiglu")], verify=False) for each in (first, second)]
    kernels[1].name = "more kernels"
    told = measured(feed_forward, torch.randn(4), torch.randn(4), executors=[*kernels, "torch"])
    assert who(told) == ["swiglu"] and ran[-1] == "second"


@pytest.mark.parametrize(("seconds", "kept"), [((FAST, SLOW), ["swiglu"]), ((SLOW, FAST), ["torch", "torch"])])
def test_a_kernel_of_a_pattern_against_its_parts(timer: Timer, seconds: tuple[float, float], kept: list[str]) -> None:
    timer.seconds = dict(zip(("swiglu", PARTS), seconds, strict=True))
    kernels = kernel_executor([swiglu_kernel(swiglu)], verify=False)
    told = measured(feed_forward, torch.randn(4), torch.randn(4), executors=[kernels, "torch"])
    assert who(told) == kept


@pytest.mark.parametrize(("seconds", "kept"), [((FAST, SLOW), ["swiglu"]), ((SLOW, FAST), ["fuser", "fuser"])])
def test_a_kernel_against_a_region_of_its_parts(timer: Timer, seconds: tuple[float, float], kept: list[str]) -> None:
    timer.seconds = dict(zip(("swiglu", "fuser"), seconds, strict=True))
    kernels, fuser = kernel_executor([swiglu_kernel(swiglu)], verify=False), Fuser("silu", "mul")
    told = measured(feed_forward, torch.randn(4), torch.randn(4), executors=[kernels, fuser, "torch"])
    assert who(told) == kept
    assert fuser.regions[0] == ["silu", "mul"]  # as it was measured


def test_one_call_is_measured_as_a_region_though_it_is_worth_none(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "fuser": FAST, "torch": 20e-6}
    fuser = Fuser("silu")
    told = measured(F.silu, torch.randn(4), executors=[mine(), fuser, "torch"])
    assert fuser.regions == [["silu"]]
    assert who(told) == ["torch"]  # alone in the program, too
    assert ("mine", "measured: 40.0 µs against 10.0 µs of fuser") in told.rows[0].declined


def test_torch_is_kept_before_a_fusion_executor_that_would_take_the_parts(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "fuser": SLOW, "torch": FAST}
    told = measured(F.silu, torch.randn(4), executors=[mine(), Fuser("sigmoid", "mul"), "torch"])
    assert [row.operation for row in told.rows] == ["torch.nn.functional.silu"] and who(told) == ["torch"]


def test_between_torch_and_a_fusion_executor_the_order_decides(timer: Timer) -> None:
    told = measured(lambda x: F.silu(x).exp(), torch.randn(4), executors=[Fuser("silu", "exp"), "torch"])
    assert who(told) == ["fuser", "fuser"]
    assert timer.asked == [] and told.measured == []


def test_a_kernel_that_declines_is_no_candidate(timer: Timer) -> None:
    kernel = forge.kernel("torch.nn.functional.silu", lambda input: silu(input), dtypes=[torch.float64], grad="none")
    executors = [kernel_executor([kernel], verify=False), Fuser("silu", "exp"), "torch"]
    told = measured(lambda x: F.silu(x).exp(), torch.randn(4), executors=executors)
    assert who(told) == ["fuser", "fuser"]
    assert timer.asked == [] and told.measured == []


def test_a_call_inside_of_another_is_measured_where_nobody_takes_the_whole(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch-prims": FAST}
    told = measured(F.silu, torch.randn(4), executors=[mine(forge.prims.sigmoid, torch.sigmoid), "torch-prims"])
    assert who(told) == ["torch-prims", "torch-prims"]
    assert [each.operation for each in told.measured] == ["prims.sigmoid"]


def test_the_order_is_as_ever(timer: Timer) -> None:
    told = measured(F.silu, torch.randn(4), executors=[mine(), "torch"], select="order")
    assert who(told) == ["mine"]
    assert timer.asked == [] and told.measured == [] and not autotune_store.folder().exists()


# gradients

NORM = {
    "arg_meta": {"x": "T", "weight": "T"},
    "type_alias": {"T": [torch.float32]},
    "shape": {"x": "[..., H]", "weight": "[H]"},
}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def norm_kernel(ran: list[str]) -> Any:
    """Return a kernel with its own backward, which returns only x's gradient."""

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ran.append("forward")
        return F.rms_norm(x, weight.shape, weight, eps)

    def rms_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ran.append("backward")
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        inner = grad * weight
        return rstd * (inner - x * rstd * (inner * x * rstd).mean(-1, keepdim=True))

    grad = {"kernel_name": rms_backward, "returns": ["x"]}
    return kernel_executor([forge.kernel("pattern:rms_norm", rms, name="own", grad=grad, **NORM)], verify=False)


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(("seconds", "kept"), [((FAST, SLOW), "own"), ((SLOW, FAST), "torch")])
def test_forward_and_backward_are_measured_where_a_gradient_flows(
    timer: Timer, seconds: tuple[float, float], kept: str
) -> None:
    timer.seconds = dict(zip(("own", PARTS), seconds, strict=True))
    ran: list[str] = []
    x = torch.randn(3, 8, requires_grad=True)
    told = measured(llama_norm, x, torch.randn(8), executors=[norm_kernel(ran), "torch"])
    assert all(kept in who(told, phase) for phase in ("forward", "backward"))
    (found,) = told.measured
    assert found.gradients and found.choice == (kept if kept == "own" else PARTS)
    assert ran.count("backward") >= 2  # it ran when it was measured, with the gradient that the program needs


def test_a_gradient_is_measured_of_the_arguments_that_need_one(timer: Timer) -> None:
    """They may be intermediate values; gradients that the kernel does not have are not requested."""
    timer.seconds = {"own": SLOW, PARTS: FAST}
    ran: list[str] = []
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    measured(lambda x, w: llama_norm(x.sin(), w.cos()), x, w, executors=[norm_kernel(ran), "torch"])
    assert "backward" in ran


def test_without_gradients_the_forward_alone_is_measured(timer: Timer) -> None:
    timer.seconds = {"own": FAST, PARTS: SLOW}
    ran: list[str] = []
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        told = measured(llama_norm, x, torch.randn(8), executors=[norm_kernel(ran), "torch"])
    assert not told.measured[0].gradients and "backward" not in ran


def test_a_call_of_the_backward_alone_is_measured_forward(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    inputs = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    told = measured(torch.mm, *inputs, executors=[mine(clang.matmul, torch.matmul), "torch"])
    assert [(each.operation, each.calls) for each in told.measured if not each.gradients] == [("clang.matmul", 2)]
    assert "mine" not in who(told, "backward")


def test_the_loser_is_differentiated_by_nobody(timer: Timer) -> None:
    """Forward and backward are fused, although the kernel would take the call with a composite gradient."""
    timer.seconds = {"swiglu": SLOW, "fuser": FAST}
    kernels, fuser = kernel_executor([swiglu_kernel(swiglu)], verify=False), Fuser("silu", "mul", "sigmoid")
    inputs = [torch.randn(4, requires_grad=True) for _ in range(2)]
    told = measured(feed_forward, *inputs, executors=[kernels, fuser, "torch"])
    assert "swiglu" not in [*who(told), *who(told, "backward")]
    assert who(told) == ["fuser", "fuser"]


# cached measurements, and for how long


def test_what_was_measured_is_read_from_disk(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    for _ in range(2):
        told = measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
        assert who(told) == ["torch"] and told.measured[0].candidates[0].seconds == SLOW
        another_process(monkeypatch)
    assert len(timer.asked) == 1
    (file,) = autotune_store.folder().iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_what_another_process_would_not_know_again_is_not_kept(timer: Timer) -> None:
    class Unknown(Fuser):
        def identity(self) -> Any:
            return decline("it depends on the weather")

    timer.seconds = {"mine": SLOW, "fuser": SLOW, "torch": FAST}
    executors = [mine(), Unknown("silu"), "torch"]
    for _ in range(2):
        torch._dynamo.reset()
        assert who(measured(F.silu, torch.randn(4), executors=executors)) == ["torch"]
    assert len(timer.asked) == 1 and not autotune_store.folder().exists()


@pytest.mark.parametrize("options", [{"cache": False}, {}])
def test_nothing_is_kept_where_the_cache_is_off(
    timer: Timer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        monkeypatch.setenv("FORGE_CACHE", "0")
    timer.seconds = {"mine": SLOW, "torch": FAST}
    measured(F.silu, torch.randn(4), executors=[mine(), "torch"], **options)
    assert len(timer.asked) == 1 and not autotune_store.folder().exists()


def test_a_candidate_whose_code_changes_is_measured_again(timer: Timer) -> None:
    timer.seconds = {"swiglu": FAST, PARTS: SLOW}

    def other(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate / (1 + torch.exp(-gate)) * up

    for function in (swiglu, other, swiglu):
        torch._dynamo.reset()
        kernels = kernel_executor([swiglu_kernel(function, name="swiglu")], verify=False)
        measured(feed_forward, torch.randn(4), torch.randn(4), executors=[kernels, "torch"], cache=False)
    assert len(timer.asked) == 2


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(8),
        torch.randn(4, dtype=torch.float64),
        torch.randn(2, 2),
        torch.randn(8)[::2],
        torch.randn(4, requires_grad=True),
    ],
    ids=["length", "dtype", "rank", "strides", "gradient"],
)
def test_another_call_is_measured_for_itself(timer: Timer, other: torch.Tensor) -> None:
    timer.seconds = {"mine": FAST, "torch": SLOW}
    for x in (torch.randn(4), other, torch.randn(4)):
        torch._dynamo.reset()
        measured(F.silu, x, executors=[mine(), "torch"], cache=False)
    assert len(timer.asked) == 2


def test_which_arguments_need_a_gradient_is_part_of_a_call(timer: Timer) -> None:
    timer.seconds = {"mine": FAST, "torch": SLOW}
    for both in (False, True, False):
        torch._dynamo.reset()
        inputs = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=both)
        measured(torch.mul, *inputs, executors=[mine(torchlang.mul, torch.mul), "torch"], cache=False)
    assert len(timer.asked) == 2


def test_constants_of_a_call_are_part_of_it(timer: Timer) -> None:
    timer.seconds = {"mine": FAST, "torch": SLOW}
    for alpha in (1.0, 2.0, 1.0):
        torch._dynamo.reset()
        executors = [mine(torchlang.elu, F.elu), "torch"]
        measured(lambda x, alpha=alpha: F.elu(x, alpha), torch.randn(4), executors=executors, cache=False)
    assert len(timer.asked) == 2


def test_layers_that_are_alike_are_measured_once(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    told = measured(lambda x: F.silu(F.silu(F.silu(x) + 1) + 2), torch.randn(4), executors=[mine(), "torch"])
    assert len(timer.asked) == 1
    (found,) = told.measured
    assert found.calls == 3 and set(who(told)) == {"torch"}


def test_a_program_from_disk_tells_what_was_measured_for_it(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    told = [measured(F.silu, torch.randn(4), executors=[EXECUTOR, "torch"])]
    torch._dynamo.reset()
    told.append(measured(F.silu, torch.randn(4), executors=[EXECUTOR, "torch"]))
    assert [each.cached for each in told] == [0, 1]
    assert told[0].measured == told[1].measured and told[0].rows == told[1].rows
    torch._dynamo.reset()
    assert who(measured(F.silu, torch.randn(4), executors=[EXECUTOR, "torch"], select="order")) == ["mine"]


EXECUTOR = mine()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-9] + b"x" + content[-8:], "the file is damaged"),
        (lambda content: b"", "the file is of another format"),
        (lambda content: content.replace(b"times 1", b"times 9"), "the file is of another format"),
    ],
    ids=["a byte", "empty", "format"],
)
def test_a_damaged_file_is_ignored_with_a_notice(
    timer: Timer,
    damage: Callable[[bytes], bytes],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
    (file,) = autotune_store.folder().iterdir()
    file.write_bytes(damage(file.read_bytes()))
    another_process(monkeypatch)
    with caplog.at_level(logging.WARNING, "forge.select"):
        assert who(measured(F.silu, torch.randn(4), executors=[mine(), "torch"])) == ["torch"]
    assert len(timer.asked) == 2
    assert f"{file} is ignored: {reason}" in caplog.text
    another_process(monkeypatch)
    measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
    assert len(timer.asked) == 2  # it was rewritten


def test_a_file_that_holds_another_calls_times_is_ignored(
    timer: Timer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
    (first,) = autotune_store.folder().iterdir()
    measured(F.silu, torch.randn(8), executors=[mine(), "torch"])
    (second,) = set(autotune_store.folder().iterdir()) - {first}
    shutil.copy(first, second)
    another_process(monkeypatch)
    with caplog.at_level(logging.WARNING, "forge.select"):
        measured(F.silu, torch.randn(8), executors=[mine(), "torch"])
    assert len(timer.asked) == 3 and "the file holds other times" in caplog.text


# candidates that fail, and calls that are not measured


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "measured: RuntimeError: no such instruction"),
        (lambda x: silu(x)[:2], "measured: its result is float32[2], but must be float32[4]"),
        (lambda x: silu(x).double(), "measured: its result is float64[4], but must be float32[4]"),
    ],
    ids=["raises", "shape", "dtype"],
)
def test_a_candidate_that_fails_is_dropped(timer: Timer, function: Callable, reason: str) -> None:
    timer.seconds = {"second": FAST, "torch": SLOW}
    executors = [mine(function=function), mine(name="second"), "torch"]
    told = measured(F.silu, torch.randn(4), executors=executors)
    assert who(told) == ["second"] and told.rows[0].declined == (("mine", reason),)
    assert timer.asked == [["second", "torch"]]
    assert reason.removeprefix("measured: ") in str(told.measured[0])


def test_one_candidate_that_is_left_is_kept_untimed(timer: Timer) -> None:
    told = measured(F.silu, torch.randn(4), executors=[mine(function=raises), "torch"])
    assert who(told) == ["torch"] and timer.asked == []


def test_a_region_that_cannot_be_made_is_dropped(timer: Timer) -> None:
    class Failing(Fuser):
        def fuse(self, region: Trace) -> Any:
            return decline("no compiler")

    timer.seconds = {"mine": SLOW, "torch": FAST}
    told = measured(F.silu, torch.randn(4), executors=[mine(), Failing("silu"), "torch"])
    assert who(told) == ["torch"] and ("fuser", "measured: no compiler") in told.rows[0].declined


@pytest.mark.parametrize("when", ["it is made", "it runs"])
def test_a_region_that_fails_is_dropped(timer: Timer, when: str, recwarn: pytest.WarningsRecorder) -> None:
    class Failing(Fuser):
        def fuse(self, region: Trace) -> Any:
            if when == "it is made":
                raise NameError("no such size")
            return lambda *inputs: raises(inputs[0])

    timer.seconds = {"mine": SLOW, "torch": FAST}
    told = measured(F.silu, torch.randn(4), executors=[mine(), Failing("silu"), "torch"])
    error = "NameError: no such size" if when == "it is made" else "RuntimeError: no such instruction"
    assert who(told) == ["torch"] and ("fuser", f"measured: {error}") in told.rows[0].declined
    assert not [each for each in recwarn if "forge" in str(each.message)]


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("too large")


def test_where_memory_runs_out_the_order_decides(timer: Timer) -> None:
    """Memory may run out while a candidate is measured beside the program's own tensors."""
    told = measured(F.silu, torch.randn(4), executors=[mine(), mine(function=out_of_memory, name="large"), "torch"])
    assert who(told) == ["mine"] and timer.asked == []
    assert told.measured[0].why_not == "measuring failed: OutOfMemoryError: too large"


def test_a_candidate_that_fails_while_it_is_timed_leaves_the_order(timer: Timer) -> None:
    def fail() -> None:
        raise RuntimeError("a bad moment")

    timer.wait = fail
    told = measured(F.silu, torch.randn(4), executors=[mine(), "torch"])
    assert who(told) == ["mine"] and not autotune_store.folder().exists()
    assert told.measured[0].why_not == "measuring failed: RuntimeError: a bad moment"


def test_a_random_call_is_not_measured(timer: Timer) -> None:
    executors = [mine(torchlang.find(F.dropout), lambda x, p=0.5, training=True, inplace=False: x * 2), "torch"]
    jitted = forge.jit(lambda x: F.dropout(x, 0.5), executors=executors, select="measured")
    jitted(torch.ones(4))
    told = forge.explain(jitted)
    assert who(told) == ["mine"] and timer.asked == []
    assert [each.why_not for each in told.measured] == ["the call draws random numbers"]
    assert "mine by order, since the call draws random numbers" in str(told)


def test_integers_are_valid_indices(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    indices, weight = torch.tensor([4, 1]), torch.randn(5, 3)
    told = measured(F.embedding, indices, weight, executors=[mine(torchlang.embedding, F.embedding), "torch"])
    assert who(told) == ["torch"]
    assert told.measured[0].arguments == "int64[2], float32[5, 3]"


def test_a_tensor_that_is_given_twice_is_one(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    told = measured(lambda x: torch.mul(x, x), torch.randn(4), executors=[mine(torchlang.mul, torch.mul), "torch"])
    assert told.measured[0].arguments == "float32[4]"


def test_random_numbers_of_the_program_are_what_they_were(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    torch.manual_seed(3)
    jitted = forge.jit(lambda x: F.silu(x) + torch.rand(4), executors=[mine(), "torch"], select="measured")
    actual = jitted(torch.ones(4))
    torch.manual_seed(3)
    torch.testing.assert_close(actual, F.silu(torch.ones(4)) + torch.rand(4))


# shapes that change, threads, options


def test_of_a_changing_length_the_one_at_hand_is_measured(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    jitted = forge.jit(F.silu, executors=[mine(), "torch"], select="measured", dynamic=True)
    for length in (6, 9):
        x = torch.randn(length, 3)
        torch.testing.assert_close(jitted(x), F.silu(x))
    told = forge.explain(jitted)
    assert told.graphs == 1 and len(timer.asked) == 1
    assert told.rows[0].declined == (("mine", "measured at float32[6, 3]: 40.0 µs against 10.0 µs of torch"),)


def test_two_threads_measure_once_each_call(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    executors, found, errors = [mine(), "torch"], [], []

    def work() -> None:
        try:
            x = torch.randn(5, requires_grad=True)
            found.append(measured(lambda x: F.silu(x) * 2, x, executors=executors, cache=False))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    assert [row.executor for told in found for row in told.rows if row.operation.endswith("silu")] == ["torch"] * 2
    assert len(timer.asked) == 1


def test_one_thread_waits_for_what_another_one_measures(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    timer.wait = lambda: time.sleep(0.2)  # the other thread could measure meanwhile
    direct = [Direct(F.silu) for _ in range(2)]
    for each in direct:
        each.config = resolve_options([mine(), "torch"], select="measured")
    threads = [threading.Thread(target=each.compile, args=((torch.randn(4),), {})) for each in direct]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(timer.asked) == 1


def test_explain_shows_the_times(timer: Timer) -> None:
    timer.seconds = {"mine": 41.2e-6, "torch": 18.9e-6}
    x = torch.randn(2, 3, requires_grad=True)
    told = measured(lambda x: F.silu(F.silu(x)), x, executors=[mine(), "torch"])
    shown = "measured: 2 calls of torch.nn.functional.silu(float32[2, 3]), forward and backward: "
    assert f"{shown}mine 41.2 µs, torch 18.9 µs (kept)" in str(told).splitlines()
    assert told.rows[0].declined == (("mine", "measured: 41.2 µs against 18.9 µs of torch"),)
    (found,) = told.measured
    assert isinstance(found, Measurement) and found.choice == "torch" and found.calls == 2
    assert [(each.name, each.seconds) for each in found.candidates] == list(timer.seconds.items())


def test_an_unknown_selection_is_an_error() -> None:
    with pytest.raises(ValueError, match="select is 'fastest', but must be one of order, measured"):
        forge.jit(F.silu, select="fastest")


def test_torch_compile_takes_it_as_an_option(timer: Timer) -> None:
    timer.seconds = {"mine": SLOW, "torch": FAST}
    options = {"executors": [mine(), "torch"], "select": "measured"}
    x = torch.randn(4)
    compiled = torch.compile(F.silu, backend="forge", options=options)
    torch.testing.assert_close(compiled(x), F.silu(x))
    assert timer.asked == [["mine", "torch"]]


def test_what_is_kept_is_measured_indeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real timer is used: whichever candidate is faster, each was timed."""
    monkeypatch.setattr(autotune_store, "_memo", BoundedDict(100))
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    told = measured(F.silu, torch.randn(4, requires_grad=True), executors=[mine(), "torch"])
    (found,) = told.measured
    seconds = {each.name: each.seconds for each in found.candidates}
    assert found.choice == min(seconds, key=seconds.get) and all(0 < each < 1 for each in seconds.values())


def test_each_candidate_is_called_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    ran: list[str] = []
    timing.time_candidates({name: lambda name=name: ran.append(name) for name in "ab"}, torch.device("cpu"))
    changes = "".join(name for place, name in enumerate(ran) if ran[place - 1 : place] != [name])
    assert changes == "ab" * 5  # warm-up, one call, three rounds
