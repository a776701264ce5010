"""Jitted functions inside other programs: jit in jit, torch.compile, checkpoints, DDP, workers, forks, threads; and the
parts of forge that Dynamo must not trace."""

import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch._dynamo.convert_frame import ConvertFrame
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import forge
from tests.unknown_operator import rounded

X = torch.linspace(-1, 1, 6).view(2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(call: Callable, module: nn.Module) -> list[torch.Tensor]:
    module.zero_grad()
    call(X).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


# inside another compiler


def double(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


@pytest.mark.parametrize("inner", [double, torch.sin, net()], ids=["function", "builtin", "module"])
@pytest.mark.parametrize(
    "around",
    [forge.jit, lambda f: torch.compile(f, backend="eager"), lambda f: torch.compile(f, backend="forge")],
    ids=["forge.jit", "torch.compile", "torch.compile with forge"],
)
@pytest.mark.parametrize("called", [True, False], ids=["compiled before", "not called before"])
def test_a_jitted_target_inside_a_compiled_function_is_part_of_it(
    inner: Callable, around: Callable, called: bool
) -> None:
    jitted = forge.jit(inner)
    if called:
        jitted(X)
    outer = around(lambda x: jitted(x) + jitted(x * 2))
    torch.testing.assert_close(outer(X), inner(X) + inner(X * 2))


def test_a_jitted_closure_inside_two_jits_sees_its_variables() -> None:
    scale = 2.0
    inner = forge.jit(lambda x: x * scale)
    middle = forge.jit(lambda x: inner(x) + 1)
    outer = forge.jit(lambda x: middle(x).tanh(), fullgraph=True)
    for scale in (2.0, 3.0):
        torch.testing.assert_close(outer(X), (X * scale + 1).tanh())
    assert forge.explain(outer).graphs == 2


def test_a_jitted_method_inside_a_jitted_module_is_part_of_it() -> None:
    class Net(nn.Module):
        @forge.jit
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x) + 1

    module = forge.jit(Net(), fullgraph=True)
    torch.testing.assert_close(module(X), X * 2 + 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_jitted_module_inside_a_checkpoint_has_its_gradients(reentrant: bool) -> None:
    module = net()
    expected = gradients(module, module)
    jitted = forge.jit(module)
    x = X.clone().requires_grad_()
    module.zero_grad()
    checkpoint(jitted, x, use_reentrant=reentrant).pow(2).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected)


class Noted(nn.Module):
    """A module that changes statistics and a counter while it runs, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}])
def test_a_recomputed_jitted_module_changes_its_buffers_as_often_as_eager(options: dict) -> None:
    def after_a_step(model: nn.Module, module: Noted) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(8, 4, requires_grad=True)
        checkpoint(model, x, **options).square().sum().backward()
        return [*module.buffers(), x.grad, *[each.grad for each in module.parameters()], torch.rand(2)]

    plain, module = Noted(), Noted()
    jitted = forge.jit(module)
    torch.testing.assert_close(after_a_step(jitted, module), after_a_step(plain, plain))
    assert module.calls == 2
    assert not forge.explain(jitted).graph_breaks


def test_a_backward_reads_what_a_buffer_was_before_the_program_changed_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin() * self.scale.clone()
            self.scale += 1
            return y

    jitted, x = forge.jit(Scaled()), X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(jitted(x).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, 3 * X.cos())
    slope.sum().backward()
    torch.testing.assert_close(x.grad, -3 * X.sin())
    assert jitted.scale == 4


def test_a_jit_made_and_first_called_under_force_eager_compiles_nothing_there() -> None:
    with torch.compiler.set_stance("force_eager"):
        jitted = forge.jit(double)
        for _ in range(3):
            torch.testing.assert_close(jitted(X), double(X))
    assert forge.explain(jitted).graphs == 0
    jitted(X)
    assert forge.explain(jitted).graphs == 1
    with torch.compiler.set_stance("force_eager"):
        jitted(X[0])
    assert forge.explain(jitted).graphs == 1


# frames that Dynamo converts


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files of the frames that Dynamo converts."""
    seen: list[str] = []
    convert = ConvertFrame.__call__

    def spy(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if not frame.f_code.co_name.startswith("forge_"):  # the entries
            seen.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(ConvertFrame, "__call__", spy)
    return seen


def broken_step(module: nn.Module) -> Callable:
    """Return a training step that runs all of forge's own Python between graphs."""
    inner = forge.jit(double)

    def step(x: torch.Tensor) -> torch.Tensor:
        value = module(x).sum()
        torch._dynamo.graph_break()
        value.backward()
        rounded(module(x)).sum().backward()  # an opaque call's
        gradient = forge.grad(lambda y: (y * y).sum())(x)
        _, pullback = forge.vjp(lambda y: y * 3, x)
        return gradient + pullback(x)[0] + forge.jit(lambda y: y * 2)(x) + inner(x)

    return step


def test_dynamo_converts_nothing_of_forges_own(converted: list[str]) -> None:
    step = broken_step(net())
    jitted = forge.jit(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache.*")
        for _ in range(2):
            torch.testing.assert_close(jitted(X), X * 2 + X * 3 + X * 2 + double(X))
    package = str(Path(forge.__file__).parent)
    assert converted and not [file for file in converted if file.startswith((package, "<forge"))]


# processes and threads


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: DistributedDataParallel(forge.jit(module)),
        lambda module: forge.jit(DistributedDataParallel(module)),
        lambda module: forge.jit(DistributedDataParallel(forge.jit(module)).forward),
    ],
    ids=["DDP of jit", "jit of DDP", "jit of the forward of DDP of jit"],
)
def test_distributed_data_parallel_has_the_gradients(wrap: Callable, one_process: None) -> None:
    module = net()
    expected = gradients(module, module)
    wrapped = wrap(module)
    for _ in range(2):
        torch.testing.assert_close(gradients(wrapped, module), expected)


class Doubled(Dataset):
    """A dataset whose items are made by a jitted function, compiled in the parent or in the worker."""

    def __init__(self, call: Callable, *, compiled: bool) -> None:
        self.call = call
        if compiled:
            call(X[0])

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.call(torch.full((3,), float(index)))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_jitted_function_runs_in_the_workers_of_a_loader(compiled: bool) -> None:
    loader = DataLoader(Doubled(forge.jit(double), compiled=compiled), num_workers=2, timeout=60)
    expected = [double(torch.full((1, 3), float(index))) for index in range(4)]
    torch.testing.assert_close(list(loader), expected)


def in_a_process(program: str) -> None:
    """Run a program in its own interpreter: uses of torch's autograd in this process decide whether a fork may use
    it."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, torch neither compiles nor differentiates in a fork")
def test_a_forked_child_uses_what_was_compiled_and_compiles_more() -> None:
    in_a_process(
        """
        import os
        import torch
        import forge
        from tests.capture.test_nesting import X, double, gradients, net

        module = net()
        expected = gradients(module, module)
        jitted = forge.jit(module)
        gradients(jitted, module)
        child = os.fork()
        torch.testing.assert_close(gradients(jitted, module), expected)
        torch.testing.assert_close(jitted(X[:1]), module(X[:1]))
        torch.testing.assert_close(forge.jit(double)(X), double(X))
        torch.testing.assert_close(forge.grad(lambda x: double(x).sum())(X), 2 * X.cos())
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """
    )


@pytest.mark.parametrize("holder", ["another thread", pytest.param("the thread that forks", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_child_forked_while_something_is_compiled_compiles(holder: str) -> None:
    in_a_process(
        f"""
        import os, signal, threading
        import torch
        from torch._dynamo.convert_frame import compile_lock
        import forge
        from tests.capture.test_nesting import X, double

        held, done = threading.Event(), threading.Event()

        def hold():
            with compile_lock:
                held.set()
                done.wait()

        def fork():
            child = os.fork()
            if not child:
                signal.alarm(120)
                torch.testing.assert_close(forge.jit(double)(X), double(X))
            return child

        forge.jit(lambda x: x + 1)(X)
        if {holder!r} == "another thread":
            threading.Thread(target=hold).start()
            held.wait()
            child = fork()
        else:
            with compile_lock:
                child = fork()
        if not child:
            os._exit(0)
        done.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


@pytest.mark.slow
def test_forks_of_a_program_whose_threads_compile_run_torch() -> None:
    in_a_process(
        """
        import os, threading
        import torch
        import forge
        from tests.capture.test_nesting import X, net

        module = net()
        jitted = forge.jit(module)
        torch.ones(2).sum()  # the first call of an operator holds a lock of torch's, and a fork may see it held
        threads = [threading.Thread(target=lambda: jitted(X).sum().backward()) for _ in range(3)]
        for thread in threads:
            thread.start()
        children = []
        for _ in range(4):
            children.append(os.fork())
            if not children[-1]:
                os._exit(int(torch.ones(2).sum()) - 2)
        for thread in threads:
            thread.join()
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        """
    )


@pytest.mark.slow
def test_an_interpreter_that_ends_waits_for_its_threads_calls() -> None:
    """Threads that Python does not wait for (daemon=True) abort the process if they run torch, in eager, too."""
    in_a_process(
        """
        import sys, threading
        import forge
        from tests.capture.test_nesting import X, net

        sys.setswitchinterval(1e-6)
        module = net()
        jitted = forge.jit(module)
        for _ in range(3):
            threading.Thread(target=lambda: jitted(X).sum().backward()).start()
        """
    )


@pytest.fixture
def _switching() -> Iterator[None]:
    """Make the interpreter switch threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(work: Callable[[], Any], count: int) -> list[Any]:
    """Run `work` in `count` threads that start together, and return their results."""
    barrier, found = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        found.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("number", range(4))
@pytest.mark.usefixtures("_switching")
def test_a_step_that_starts_in_many_threads_at_once_has_its_gradients(number: int) -> None:
    module = net()
    jitted, parameters = forge.jit(module), list(module.parameters())
    expected = torch.autograd.grad(module(X).pow(2).sum(), parameters)
    found = in_threads(lambda: torch.autograd.grad(jitted(X).pow(2).sum(), parameters), 4)
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, expected)


@pytest.mark.usefixtures("_switching")
def test_a_backward_that_starts_in_many_threads_at_once_has_its_gradients() -> None:
    module = net()
    jitted, parameters = forge.jit(module), list(module.parameters())
    jitted(X)
    expected = torch.autograd.grad(module(X).pow(2).sum(), parameters)
    for each in in_threads(lambda: torch.autograd.grad(jitted(X).pow(2).sum(), parameters), 6):
        torch.testing.assert_close(each, expected)


@pytest.mark.usefixtures("_switching")
def test_dynamos_settings_are_as_before_after_threads_compiled() -> None:
    config = torch._dynamo.config
    before = config.skip_nnmodule_hook_guards
    jitted = [forge.jit(double) for _ in range(6)]
    waiting = iter(jitted)
    in_threads(lambda: next(waiting)(X), len(jitted))
    assert config.skip_nnmodule_hook_guards == before
    assert [forge.explain(each).graphs for each in jitted] == [1] * 6


TRACERS: dict[str, Callable] = {
    "torch.fx": lambda function: torch.fx.symbolic_trace(function),
    "make_fx": lambda function: make_fx(function)(X),
    "torch.jit.trace": lambda function: torch.jit.trace(function, (X,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRACERS)
def test_a_tracer_sees_the_calls_of_a_jitted_function(name: str) -> None:
    inner = forge.jit(lambda x: x.sin() + 1)
    traced = TRACERS[name](lambda x: inner(x) * 2)
    torch.testing.assert_close(traced(2 * X), ((2 * X).sin() + 1) * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRACERS)
def test_a_tracer_sees_the_calls_of_a_jitted_function_that_was_compiled_before(name: str) -> None:
    inner = forge.jit(lambda x: x.sin() + 1)
    inner(X)
    traced = TRACERS[name](lambda x: inner(x) * 2)
    torch.testing.assert_close(traced(2 * X), ((2 * X).sin() + 1) * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_a_jitted_module_that_was_compiled_before_has_its_calls() -> None:
    module = net()
    jitted = forge.jit(module)
    jitted(X)
    traced = torch.jit.trace(jitted, (X,), check_trace=False)
    torch.testing.assert_close(traced(2 * X), module(2 * X))
