"""Inductor, torch's own compiler of kernels, as the default fusion executor on CPUs and CUDA devices.

It accepts calls whose torch functions run aten operators that Inductor lowers to loops; matrix products,
convolutions, attention and random numbers stay torch's, but for products that are measured (`Products`). Importing
Inductor takes a second, so it is imported when a program is first compiled.
"""

import functools
import importlib
import importlib.metadata
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from forge.executors.can_fuse_cache import CanFuseCache
from forge.executors.executor import Decision, Declined, FusionExecutor, ProductExecutor, decline
from forge.executors.inductorex import isa_probe
from forge.executors.registry import register_executor
from forge.ir import BoundSymbol, Tag, Trace
from forge.ir.pytree import leaves, tensors
from forge.torch_internals.tensors import has_triton

if TYPE_CHECKING:
    from forge.compiler.claim import ClaimedCall

_NEVER = {
    Tag.RANDOM: "random numbers are drawn by torch, as in eager",
    Tag.EFFECT: "the call has an effect",
    Tag.OPAQUE: "the call is an opaque call",
    Tag.SYNCHRONIZING: "the call reads values back to Python",
    Tag.UNINITIALIZED: "the call gives memory that others write to",
}


@functools.cache
def _module(name: str) -> ModuleType:
    """Import a module of this package that needs Inductor, without its deprecation warnings: they are torch's own, and
    the program may have turned warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(f"{__name__}.{name}")


def _compiles() -> bool:
    """Return whether this process has compiled a region, or tried to."""
    return f"{__name__}.lower" in sys.modules


class InductorExecutor(FusionExecutor):
    """Regions of pointwise calls, reductions and views, each one artifact of Inductor."""

    strided = True
    boxed = True
    whole_program = False  # accepts calls that Inductor passes to torch's kernels, too

    def __init__(self, name: str, *, eager_numerics: bool = False) -> None:
        """Make an executor. eager_numerics: each value of a region is rounded to its dtype, as in eager."""
        super().__init__(name)
        self.eager_numerics = eager_numerics
        self._decisions = CanFuseCache(
            partial(_decide, whole_program=self.whole_program, eager_numerics=eager_numerics)
        )
        self._with_region_checks: FusionExecutor | None = None
        self._with_eager_numerics: InductorExecutor | None = None
        self._products: Products | None = None

    def is_available(self) -> Decision:
        return True if any(map(_can_compile_for, _devices())) else decline("there is no C++ compiler and no Triton")

    def prepare(self) -> None:
        if not torch.cuda.is_available() and _can_compile_for("cpu"):
            isa_probe.ask()

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._decisions.get(bound)

    def fuse(self, region: Trace) -> Callable | Declined:
        return _module("lower").compile_region(
            region, whole_program=self.whole_program, eager_numerics=self.eager_numerics
        )

    def identity(self) -> str | Declined:
        """Return a key of everything that Inductor's code depends on: its settings, its compilers, the number of
        threads, its rounding."""
        if _compiles() and _module("compile_wait").has_failed():
            return decline("Inductor could not compile a region")
        config = importlib.import_module("forge.torch_internals.inductor.config").inductor_config
        return repr((config.get_hash(), os.environ.get("CXX"), torch.get_num_threads(), _triton(), self.eager_numerics))

    def dump(self, function: Callable) -> bytes | Declined:
        return _module("artifacts").dump(function)

    def load(self, data: bytes) -> Callable:
        return _module("artifacts").load(data)

    def files_of(self, data: bytes) -> Mapping[str, bytes]:
        return _module("artifacts").files_of(data)

    def with_files(self, data: bytes, paths: Mapping[str, str]) -> bytes:
        return _module("artifacts").with_files(data, paths)

    def finish(self) -> Mapping[Callable, Callable | Declined]:
        return _module("compile_wait").finish() if _compiles() else {}

    def compile_ahead_of_time(
        self, program: Trace, claimed: Sequence["ClaimedCall"], weights: Mapping[str, torch.Tensor], *, alone: bool
    ) -> list[str] | Declined:
        """Return the paths of the files of an AOTInductor package of a claimed program, or Declined if there is
        none. alone: the package holds the weights, by name, which are inputs of the program."""
        return _module("ahead_of_time").compile_program(
            program, claimed, weights, alone=alone, eager_numerics=self.eager_numerics
        )

    def second_tier(self) -> FusionExecutor | None:
        return _OutOfProcess(eager_numerics=self.eager_numerics)

    def product_executor(self) -> ProductExecutor | None:
        if self.eager_numerics:  # whose products are rounded before any epilogue
            return None
        if self._products is None:
            self._products = Products(f"{self.name}-products", self)
        return self._products

    def with_region_checks(self) -> FusionExecutor:
        if self._with_region_checks is None:
            self._with_region_checks = _RegionChecks(self)
        return self._with_region_checks

    def with_eager_numerics(self) -> "InductorExecutor":
        if self.eager_numerics:
            return self
        if self._with_eager_numerics is None:
            self._with_eager_numerics = type(self)(self.name, eager_numerics=True)
        return self._with_eager_numerics

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        """Return whether a region replaces more than one kernel of torch's: it costs a call, and once a compilation."""
        kernels = 0
        for bound in calls:
            kernels += _kernels.get(bound)
            if kernels > 1:
                return True
        return False


def _decide(bound: BoundSymbol, *, whole_program: bool, eager_numerics: bool) -> Decision:
    refused = _refuse(bound)
    if refused is not None:
        return refused
    return _module("operators").takes(bound, whole_program=whole_program, eager_numerics=eager_numerics)


def _decide_product(bound: BoundSymbol) -> Decision:
    refused = _refuse(bound)
    return _module("operators").is_product(bound) if refused is None else refused


def _refuse(bound: BoundSymbol) -> Declined | None:
    """Return why Inductor compiles no call like this one, None if it may."""
    for tag in bound.all_tags:
        if tag in _NEVER:
            return decline(_NEVER[tag])
    if any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves((bound.args, bound.kwargs))):
        return decline(
            "the call reads a float or bool that differs from run to run, for which Inductor has no argument"
        )
    proxies = [*tensors(bound.output), *tensors(bound.args), *tensors(bound.kwargs)]
    if not tensors(bound.output):
        return decline("the call returns no tensor")
    devices = {proxy.device for proxy in proxies}
    if len(devices) > 1:
        return decline(f"the call's tensors are on {' and '.join(sorted(map(str, devices)))}")
    for proxy in proxies:
        if proxy.dtype.is_complex:
            return decline(f"Inductor has no code for {proxy.dtype}")
    if not _can_compile_for(proxies[0].device.type):
        return decline(f"Inductor cannot compile for {proxies[0].device.type} here")
    return None


_kernels = CanFuseCache(lambda bound: _module("operators").count_kernels(bound))
_is_pointwise = CanFuseCache(lambda bound: _module("operators").is_pointwise(bound))


class WholeProgram(InductorExecutor):
    """A program as one artifact, in which C++ calls all kernels, matrix products and attention included: for programs
    whose overhead per call exceeds their compute. It takes longest to compile, so that it is used only on request."""

    whole_program = True

    def second_tier(self) -> FusionExecutor | None:
        return None

    def product_executor(self) -> ProductExecutor | None:
        return None


class Products(ProductExecutor):
    """Matrix products with pointwise epilogues, by the template that Inductor's search selects: kernels in Triton on a
    GPU, in C++ on a CPU."""

    strided = True
    boxed = True

    def __init__(self, name: str, executor: InductorExecutor) -> None:
        """Make an executor. executor: accepts the calls of epilogues."""
        super().__init__(name)
        self._executor = executor
        self._decisions = CanFuseCache(_decide_product)

    def is_product(self, bound: BoundSymbol) -> Decision:
        return self._decisions.get(bound)

    def is_epilogue(self, bound: BoundSymbol) -> Decision:
        decision = self._executor.can_fuse(bound)
        return _is_pointwise.get(bound) if decision else decision

    def fuse_product(self, region: Trace) -> Callable | Declined:
        return _module("lower").compile_region(region, _module("lower").generate_product)

    def identity(self) -> str | Declined:
        return self._executor.identity()

    def dump(self, function: Callable) -> bytes | Declined:
        return self._executor.dump(function)

    def load(self, data: bytes) -> Callable:
        return self._executor.load(data)


class _OutOfProcess(WholeProgram):
    """A fusion executor of whole programs, one artifact each, which other processes compile."""

    def __init__(self, *, eager_numerics: bool = False) -> None:
        super().__init__(inductor_whole.name, eager_numerics=eager_numerics)
        self._decisions = (inductor_whole.with_eager_numerics() if eager_numerics else inductor_whole)._decisions
        self._compilations: list[Any] = []

    def fuse(self, region: Trace) -> Callable | Declined:
        compilation = _module("lower").compile_region_in_worker(region, eager_numerics=self.eager_numerics)
        self._compilations.append(compilation)
        return compilation

    def finish(self) -> Mapping[Callable, Callable | Declined]:
        return {}  # nothing waits: `is_ready` is polled

    def dump(self, function: Any) -> bytes | Declined:
        if not function.on_cpu:  # waiting for a process would take longer than compiling the smaller regions
            return decline("larger regions on a GPU load slowly")
        return super().dump(function.function)

    def is_ready(self) -> Decision:
        states = [
            compilation if isinstance(compilation, Declined) else compilation.state()
            for compilation in self._compilations
        ]
        return next((state for state in states if isinstance(state, Declined)), all(states))


class _Checks(InductorExecutor):
    """A fusion executor whose regions are run by torch's operators and checked at their edges (checking.py)."""

    checks_regions = True

    def prepare(self) -> None:
        pass  # no CPU is probed

    def identity(self) -> str | Declined:
        return "regions run by torch's operators"

    def load(self, data: bytes) -> Callable:
        return _module("checking").load(data)

    def with_region_checks(self) -> FusionExecutor:
        return self

    def product_executor(self) -> ProductExecutor | None:
        return None


class _RegionChecks(_Checks):
    """Regions in the form that Inductor compiles."""

    def __init__(self, executor: InductorExecutor) -> None:
        super().__init__(executor.name, eager_numerics=executor.eager_numerics)
        self.whole_program = executor.whole_program
        self._executor = executor

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._executor.can_fuse(bound)

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        return self._executor.is_profitable(calls)

    def fuse(self, region: Trace) -> Callable | Declined:
        return _module("lower").compile_region(
            region, _module("checking").check_region, whole_program=self.whole_program
        )

    def dump(self, function: Any) -> bytes | Declined:
        return function.dump()

    def finish(self) -> Mapping[Callable, Callable | Declined]:
        return {}

    def second_tier(self) -> FusionExecutor | None:
        return None if self.whole_program else _CheckingOutOfProcess(eager_numerics=self.eager_numerics)


class _CheckingOutOfProcess(_Checks, _OutOfProcess):
    """Whole programs that are serialized for another process, and run and checked in this one."""

    def fuse(self, region: Trace) -> Callable | Declined:
        compilation = _module("lower").compile_region_in_worker(region, _module("checking").CheckedProgram)
        self._compilations.append(compilation)
        return compilation

    def dump(self, function: Any) -> bytes | Declined:
        return function.function.dump()


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@functools.cache
def _can_compile_for(device: str) -> bool:
    """Return whether there is a compiler for the device's kernels; warn if there is none."""
    if device == "cpu":
        has_compiler = any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++"]))
        missing = "no C++ compiler was found (g++ or clang++, or what CXX names)"
    elif device == "cuda":
        has_compiler, missing = has_triton(), "Triton is not installed"
    else:
        return False
    if not has_compiler:
        warnings.warn(f"forge: {missing}: programs on {device} run unfused, by torch", stacklevel=2)
    return has_compiler


@functools.cache
def _triton() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


inductor_whole = register_executor(WholeProgram("inductor-whole"))
inductorex = register_executor(InductorExecutor("inductor"))
