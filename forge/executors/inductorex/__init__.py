"""Inductor, torch's own compiler of kernels, as the default fusion executor on CPUs and CUDA devices.

It takes what torch's function for a call runs as aten operators that Inductor writes loops for; matrix products,
convolutions, attention and random numbers stay torch's. Importing Inductor takes a second, so that it is done when a
program is first compiled.
"""

import functools
import importlib
import importlib.metadata
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from forge.executors.can_fuse_cache import CanFuseCache
from forge.executors.executor import Decision, Declined, FusionExecutor, decline, register_executor
from forge.executors.inductorex import isa_probe
from forge.ir import BoundSymbol, Tag, Trace
from forge.ir.pytree import leaves, tensors
from forge.torch_internals.tensors import has_triton

_NEVER = {
    Tag.RANDOM: "random numbers are drawn by torch, as in eager",
    Tag.EFFECT: "it has an effect",
    Tag.OPAQUE: "it is an opaque call",
    Tag.SYNCHRONIZING: "it reads values back to Python",
    Tag.UNINITIALIZED: "it gives memory that others write to",
}


class InductorExecutor(FusionExecutor):
    """Regions of pointwise calls, reductions and views, each one artifact of Inductor."""

    strided = True
    boxed = True
    whole = False  # takes calls that Inductor hands to torch's kernels, too

    def __init__(self, name: str, *, rounds: bool = False) -> None:
        """rounds: each value of a region is rounded to its dtype, as in eager."""
        super().__init__(name)
        self.rounds = rounds
        self._decisions = CanFuseCache(partial(_decide, whole=self.whole, rounds=rounds))
        self._checking: FusionExecutor | None = None
        self._rounding: FusionExecutor | None = None

    def is_available(self) -> Decision:
        return True if any(map(_can_compile_for, _devices())) else decline("there is no C++ compiler and no Triton")

    def prepare(self) -> None:
        if not torch.cuda.is_available() and _can_compile_for("cpu"):
            isa_probe.ask()

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._decisions.get(bound)

    def fuse(self, region: Trace) -> Callable | Declined:
        return _inductor().compile_region(region, whole=self.whole, rounds=self.rounds)

    def identity(self) -> str | Declined:
        """Return what Inductor's code depends on: its settings, its compilers, the number of threads, how it rounds."""
        if _inductor.cache_info().currsize and _inductor().compile_wait.has_failed():
            return decline("Inductor could not compile a region")
        config = importlib.import_module("forge.torch_internals.inductor.config").inductor_config
        return repr((config.get_hash(), os.environ.get("CXX"), torch.get_num_threads(), _triton(), self.rounds))

    def dump(self, function: Callable) -> bytes | Declined:
        return _artifacts().dump(function)

    def load(self, data: bytes) -> Callable:
        return _artifacts().load(data)

    def finish(self) -> Mapping[Callable, Declined]:
        return _inductor().compile_wait.finish() if _inductor.cache_info().currsize else {}

    def later(self) -> FusionExecutor | None:
        return _OutOfProcess(rounds=self.rounds)

    def checking(self) -> FusionExecutor:
        if self._checking is None:
            self._checking = _Checking(self)
        return self._checking

    def rounding(self) -> FusionExecutor:
        if self.rounds:
            return self
        if self._rounding is None:
            self._rounding = type(self)(self.name, rounds=True)
        return self._rounding

    def pays(self, calls: list[BoundSymbol]) -> bool:
        """Return a region costs a call and, once, a compilation: it runs more than one kernel of torch's."""
        kernels = 0
        for bound in calls:
            kernels += _kernels.get(bound)
            if kernels > 1:
                return True
        return False


def _decide(bound: BoundSymbol, *, whole: bool, rounds: bool) -> Decision:
    for tag in bound.all_tags:
        if tag in _NEVER:
            return decline(_NEVER[tag])
    if any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves((bound.args, bound.kwargs))):
        return decline("it reads a float or bool that differs from run to run, for which Inductor has no argument")
    proxies = [*tensors(bound.output), *tensors(bound.args), *tensors(bound.kwargs)]
    if not tensors(bound.output):
        return decline("it returns no tensor")
    devices = {proxy.device for proxy in proxies}
    if len(devices) > 1:
        return decline(f"its tensors are on {' and '.join(sorted(map(str, devices)))}")
    for proxy in proxies:
        if proxy.dtype.is_complex:
            return decline(f"Inductor has no code for {proxy.dtype}")
    if not _can_compile_for(proxies[0].device.type):
        return decline(f"Inductor cannot compile for {proxies[0].device.type} here")
    return _inductor().takes(bound, whole=whole, rounds=rounds)


_kernels = CanFuseCache(lambda bound: _inductor().count_kernels(bound))


class WholeProgram(InductorExecutor):
    """A program as one artifact, in which C++ calls all kernels, matrix products and attention included: for programs
    whose overhead per call exceeds their compute. It takes longest to compile, so that it runs only if it is named."""

    whole = True

    def later(self) -> FusionExecutor | None:
        return None


class _OutOfProcess(WholeProgram):
    """A fusion executor of whole programs, one artifact each, which other processes compile."""

    def __init__(self, *, rounds: bool = False) -> None:
        super().__init__(whole.name, rounds=rounds)
        self._decisions = (whole.rounding() if rounds else whole)._decisions
        self._made: list[Any] = []

    def fuse(self, region: Trace) -> Callable | Declined:
        made = _inductor().compile_region_in_worker(region, rounds=self.rounds)
        self._made.append(made)
        return made

    def finish(self) -> Mapping[Callable, Declined]:
        return {}  # nobody waits: `ready` is asked

    def dump(self, function: Callable) -> bytes | Declined:
        if not function.on_cpu:  # a process would wait for it longer than for compiling the smaller regions
            return decline("larger regions on a GPU load slowly")
        return super().dump(function.function)

    def ready(self) -> Decision:
        states = [made if isinstance(made, Declined) else made.state() for made in self._made]
        return next((state for state in states if isinstance(state, Declined)), all(states))


class _Checking(InductorExecutor):
    """Regions as Inductor is given them, run by torch's operators and checked at their edges (checking.py)."""

    checks = True

    def __init__(self, executor: InductorExecutor) -> None:
        super().__init__(executor.name, rounds=executor.rounds)
        self.whole = executor.whole
        self.can_fuse = executor.can_fuse
        self.pays = executor.pays

    def prepare(self) -> None:
        pass  # no processor is asked about

    def fuse(self, region: Trace) -> Callable | Declined:
        return _inductor().compile_region(region, _checking().check_region, whole=self.whole)

    def identity(self) -> str | Declined:
        return "regions run by torch's operators"

    def dump(self, function: Callable) -> bytes | Declined:
        return function.dump()

    def load(self, data: bytes) -> Callable:
        return _checking().load(data)

    def finish(self) -> Mapping[Callable, Declined]:
        return {}

    def later(self) -> FusionExecutor | None:
        return None if self.whole else _CheckingOutOfProcess(rounds=self.rounds)

    def checking(self) -> FusionExecutor:
        return self


class _CheckingOutOfProcess(_OutOfProcess):
    """Whole programs that are described for another process, and run and checked in this one."""

    checks = True

    def fuse(self, region: Trace) -> Callable | Declined:
        made = _inductor().compile_region_in_worker(region, _checking().CheckedProgram)
        self._made.append(made)
        return made

    def dump(self, function: Callable) -> bytes | Declined:
        return function.function.dump()

    def identity(self) -> str | Declined:
        return "regions run by torch's operators"

    def load(self, data: bytes) -> Callable:
        return _checking().load(data)

    def checking(self) -> FusionExecutor:
        return self


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@functools.cache
def _can_compile_for(device: str) -> bool:
    """Return whether there is a compiler for the device's kernels; a notice where there is none."""
    if device == "cpu":
        found = any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++"]))
        missing = "no C++ compiler was found (g++ or clang++, or what CXX names)"
    elif device == "cuda":
        found, missing = has_triton(), "Triton is not installed"
    else:
        return False
    if not found:
        warnings.warn(f"forge: {missing}: programs on {device} run unfused, by torch", stacklevel=2)
    return found


def _import_inductor(name: str) -> ModuleType:
    """Import a module that needs Inductor, without its deprecation warnings: they are torch's own, and the program may
    have turned warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


@functools.cache
def _inductor() -> ModuleType:
    return _import_inductor("forge.executors.inductorex.lower")


@functools.cache
def _artifacts() -> ModuleType:
    return _import_inductor("forge.executors.inductorex.artifacts")


@functools.cache
def _checking() -> ModuleType:
    return _import_inductor("forge.executors.inductorex.checking")


@functools.cache
def _triton() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


whole = register_executor(WholeProgram("inductor-whole"))
inductorex = register_executor(InductorExecutor("inductor"), default=True, first=True)
