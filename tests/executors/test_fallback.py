"""A region that fails does not abort the program: its calls run without it, once and from then on."""

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.capture.handles import handle_of
from forge.executors import Declined, FusionExecutor, RegionError, claim, decline, resolve_executors
from forge.ir import BoundSymbol, Trace

pytestmark = pytest.mark.usefixtures("compiled_regions")  # under check="regions" a failure is raised

TAKEN = frozenset("add cos exp mul neg relu sigmoid sin sub tanh".split())


class Failing(FusionExecutor):
    """An executor of regions that torch runs; each raises `error`, `times` times, after it has consumed its inputs."""

    def __init__(self, error: Exception | None = None, *, boxed: bool = True, times: float = float("inf")) -> None:
        super().__init__("failing")
        self.boxed = boxed
        self.error = error
        self.times = times
        self.calls = 0

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return bound.symbol.name in TAKEN

    def fuse(self, region: Trace) -> Callable:
        inside = claim(region, resolve_executors(["torch"]))[0].python_callable()

        def run(*given: Any) -> Any:
            self.calls += 1
            inputs = list(given[0]) if self.boxed else given
            if self.boxed:
                given[0].clear()
            results = inside(*inputs)
            if self.calls <= self.times and self.error is not None:
                raise self.error
            return results

        return run


def activated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2 + 1) @ w.cos().mul(3)


def grads(function: Callable, *given: torch.Tensor) -> list[torch.Tensor]:
    given = [each.clone().requires_grad_() for each in given]
    result = function(*given)
    result.square().sum().backward()
    return [result, *(each.grad for each in given)]


def two() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4), torch.randn(4, 4)]


ERRORS = [NameError("name 's18' is not defined"), RuntimeError("expected a size:\nframe #0"), KeyError("kernel")]


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_torch_runs_a_region_that_fails_from_then_on(error: Exception, boxed: bool) -> None:
    failing = Failing(error, boxed=boxed)
    jitted = forge.jit(activated, executors=[failing, "torch"])
    with pytest.warns(UserWarning, match="forge: failing.fusion") as told:
        torch.testing.assert_close(grads(jitted, *two()), grads(activated, *two()))
    calls = failing.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(grads(jitted, *two()), grads(activated, *two()))
    assert failing.calls == calls == len(told)
    assert {Path(each.filename).name for each in told} == {"test_fallback.py"}
    assert "from now on: " + type(error).__name__ in str(told[0].message)


def test_one_that_fails_later_is_left_too() -> None:
    failing = Failing()
    jitted = forge.jit(activated, executors=[failing, "torch"])
    torch.testing.assert_close(jitted(*two()), activated(*two()))
    failing.error = NameError("gone")
    with pytest.warns(UserWarning, match=r"failing\.fusion0 failed, torch runs its calls from now on: NameError: gone"):
        torch.testing.assert_close(jitted(*two()), activated(*two()))
    calls, failing.error = failing.calls, None
    torch.testing.assert_close(jitted(*two()), activated(*two()))
    assert failing.calls == calls  # although it would work again


def test_explain_says_who_runs_the_calls_and_why() -> None:
    jitted = forge.jit(activated, executors=[Failing(NameError("name 's18'")), "torch"])
    assert {row.executor for row in forge.explain(jitted).rows} == set()
    with pytest.warns(UserWarning, match="failed"):
        jitted(*two())
    rows = forge.explain(jitted).rows
    assert {(row.executor, row.region) for row in rows} == {("torch", None)}
    assert ("failing", "its region failed: NameError: name 's18'") in rows[0].declined
    assert "its region failed: NameError: name 's18'" in str(forge.explain(jitted))


def test_regions_that_are_alike_fail_once() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x.sin() * 2 + 1) @ x
        return x

    failing = Failing(NameError("gone"))
    jitted = forge.jit(chain, executors=[failing, "torch"])
    x = torch.eye(4)
    with pytest.warns(UserWarning, match="failed") as told:
        torch.testing.assert_close(jitted(x), chain(x))
    assert failing.calls == len(told) == 1
    assert {row.executor for row in forge.explain(jitted).rows} == {"torch"}


def test_under_strict_it_is_an_error() -> None:
    jitted = forge.jit(activated, executors=[Failing(NameError("gone")), "torch"], strict=True)
    for _ in range(2):
        with pytest.raises(NameError, match="gone") as raised:
            jitted(*two())
        assert any("test_fallback.py:" in note and "call_fusion0" in note for note in raised.value.__notes__)


# writes and random numbers


def test_what_a_program_writes_is_written_once() -> None:
    def step(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count += 1
        total.add_(x.sin() * 2).mul_(3)
        x[0] = x[0].cos() + count
        return x.exp() + 1

    torch.manual_seed(0)
    given = torch.randn(3, 4), torch.zeros(3, 4), torch.zeros(())
    ours, theirs = ([each.clone() for each in given] for _ in range(2))
    jitted = forge.jit(step, executors=[Failing(NameError("gone")), "torch"])
    with pytest.warns(UserWarning, match="failed"):
        results = [jitted(*ours), jitted(*ours)]
    torch.testing.assert_close((results, ours), ([step(*theirs), step(*theirs)], theirs))


def test_statistics_and_random_numbers_move_on_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Dropout(0.5))
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Dropout(0.5))
    other.load_state_dict(model.state_dict())
    jitted = forge.jit(model, executors=[Failing(NameError("gone"), times=2), "torch"])
    x, found = torch.randn(8, 4), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (jitted, other):
            torch.manual_seed(1)
            loss = call(x).sum() + call(x + 1).sum()
            loss.backward()
            found.append(loss)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(model.state_dict(), other.state_dict())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


# errors of the program itself


class Taking(Failing):
    """An executor that also takes look-ups, whose index may be out of range."""

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return bound.symbol.name in ("embedding", "index_select", *TAKEN)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError("index out of bounds in a kernel")])
def test_an_error_of_the_program_is_eagers_and_replaces_nothing(error: Exception | None, strict: bool) -> None:
    def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, table).sin() * 2

    failing = Taking(None)
    jitted = forge.jit(look_up, executors=[failing, "torch"], strict=strict)
    table, good, bad = torch.randn(3, 4), torch.tensor([0, 2]), torch.tensor([7, 0])
    torch.testing.assert_close(jitted(table, good), look_up(table, good))
    failing.error = error
    with pytest.raises(IndexError, match="index out of range in self") as raised, warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(table, bad)
    assert any("test_fallback.py:" in note and "embedding" in note for note in raised.value.__notes__)
    failing.error = None
    calls = failing.calls
    torch.testing.assert_close(jitted(table, good), look_up(table, good))
    assert failing.calls == calls + 1 and {row.executor for row in forge.explain(jitted).rows} == {"failing"}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_stays_that(error: Exception) -> None:
    failing = Failing(error)
    jitted = forge.jit(activated, executors=[failing, "torch"])
    for _ in range(2):
        with pytest.raises(type(error)):
            jitted(*two())
    failing.error = None
    torch.testing.assert_close(jitted(*two()), activated(*two()))
    assert failing.calls > 2


def test_an_interrupt_is_one() -> None:
    jitted = forge.jit(activated, executors=[Failing(KeyboardInterrupt()), "torch"])
    with pytest.raises(KeyboardInterrupt):
        jitted(*two())


# compiling


class Broken(Failing):
    """An executor that compiles nothing: `fuse` raises the error that `fails` makes for a region, or declines with
    it."""

    def __init__(self, fails: Callable[[Trace], Exception], *, declines: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.declines = declines
        self.regions = 0

    def fuse(self, region: Trace) -> Callable | Declined:
        self.regions += 1
        error = self.fails(region)
        if self.declines:
            return decline(f"fusing a region failed: ValueError: {error}", error=error)
        raise error


@pytest.mark.parametrize("declines", [False, True])
def test_an_executor_that_fails_at_a_region_leaves_it_to_the_next(declines: bool) -> None:
    broken = Broken(lambda region: ValueError("no code for this"), declines=declines)
    jitted = forge.jit(activated, executors=[broken, "torch"])
    message = (
        r"forge: failing\.fusion0 cannot be compiled, torch runs its calls from now on: ValueError: no code for this"
    )
    with pytest.warns(UserWarning, match=message) as told:
        torch.testing.assert_close(grads(jitted, *two()), grads(activated, *two()))
    assert broken.regions > len(told) == 1  # forward and backward fail for the same reason
    assert (Path(told[0].filename).name, told[0].lineno) == ("test_fallback.py", activated.__code__.co_firstlineno + 1)
    (who, why), *_ = handle_of(jitted).reports[-1].claims[0].declined
    assert (who, why) == ("failing", "fusing a region failed: ValueError: no code for this")
    strict = forge.jit(activated, executors=[broken, "torch"], strict=True)
    for _ in range(2):
        with pytest.raises(
            RegionError, match=r"failing\.fusion0 .*test_fallback\.py:.*: ValueError: no code"
        ) as raised:
            strict(*two())
        assert type(raised.value.__cause__) is ValueError and str(raised.value.__cause__) == "no code for this"


def test_each_reason_for_which_regions_cannot_be_compiled_is_told() -> None:
    broken = Broken(lambda region: ValueError(f"no code for {region.bound_symbols[0].symbol.name}"))
    with pytest.warns(UserWarning, match="cannot be compiled") as told:
        jitted = forge.jit(lambda x: (x.sin() * 2) @ (x.cos() * 2).mm(x).exp().neg(), executors=[broken, "torch"])
        jitted(torch.eye(4))
    assert broken.regions == len(told) == 2
    messages = [str(each.message) for each in told]
    assert all(f"failing.fusion{place} cannot be compiled" in message for place, message in enumerate(messages))


def test_a_region_that_an_executor_declines_is_no_failure() -> None:
    class Choosy(Failing):
        def fuse(self, region: Trace) -> Callable | Declined:
            return decline("it is too short")

    jitted = forge.jit(activated, executors=[Choosy(), "torch"], strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(grads(jitted, *two()), grads(activated, *two()))
    assert ("failing", "it is too short") in handle_of(jitted).reports[-1].claims[0].declined


def test_an_error_that_is_kept_holds_nothing_of_the_program() -> None:
    held: list[weakref.ref] = []

    def fails(region: Trace) -> Exception:
        constant = torch.zeros(1)
        held.append(weakref.ref(constant))
        try:
            raise KeyError("kernel")
        except KeyError as error:
            raise ValueError("no code for this") from error

    broken = Broken(fails)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        forge.jit(activated, executors=[broken, "torch"])(*two())
    gc.collect()
    assert held and not any(each() is not None for each in held)


def test_a_value_may_be_called_as_what_a_program_calls_its_own() -> None:
    def named(failure: torch.Tensor, call_fusion0: torch.Tensor) -> torch.Tensor:
        fallback_fusion0 = failure.sin() * 2
        return (fallback_fusion0 + 1) @ call_fusion0

    jitted = forge.jit(named, executors=[Failing(NameError("gone")), "torch"])
    with pytest.warns(UserWarning, match="failed"):
        torch.testing.assert_close(jitted(*two()), named(*two()))
    torch.testing.assert_close(jitted(*two()), named(*two()))


def test_it_is_right_at_every_size() -> None:
    def sized(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return (x.sin() * n + torch.arange(n).cos()).view(-1, 2) @ torch.ones(2, 2) + x.shape[0] * 2

    failing = Failing(NameError("gone"))
    jitted = forge.jit(sized, executors=[failing, "torch"])
    for length in (4, 6, 8, 10):
        x = torch.randn(length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(jitted(x), sized(x))
    assert len(forge.explain(jitted).recompiles) == 1
