"""The consistency of the registries: an operation that lacks a piece is named, with the file that needs it.

Everything is derived from the registries; nothing here lists operations.
"""

import contextlib
import operator
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from support import main_dtype, tensors_in

import forge
import forge.capture.numbers
from forge import clang, executors, prims, torchlang
from forge.api.functional import Direct
from forge.clang import all_symbols as all_clang_symbols
from forge.executors import torchex as torchex_package
from forge.executors.torchex.core import composites, torch_prims, torchex
from forge.ir import BoundSymbol, Symbol, Tag, grad_rules
from forge.ir.grad_rules import grad_rule
from forge.ir.printing import property_name, qualified_name
from forge.ir.pytree import tensors
from forge.testing import OpInfo, Sample, all_opinfos, opinfos
from forge.torch_internals.versions import TORCH

DATA = Path(__file__).parent / "data"


def _report(missing: Iterable[str]) -> None:
    """Fail with every missing piece, one per line."""
    lines = sorted(missing)
    if lines:
        pytest.fail(f"{len(lines)} missing:\n" + "\n".join(lines), pytrace=False)


def _family(symbol: Symbol) -> str:
    """Return the family of a symbol: 'elementwise', or 'nn/activation'."""
    module = (symbol.meta or symbol.body).__module__
    return module.split(".", 2)[2].replace(".", "/")


def _file(package: str, symbol: Symbol) -> str:
    """Return the file of a package in which a symbol's family has its piece."""
    family = _family(symbol)
    return f"forge/{package}/{family if package == 'torchlang' else family.removeprefix('nn/')}.py"


# calls that the OpInfos' samples record, once for all tests


@cache
def _recorded() -> dict[str, list[BoundSymbol]]:
    """Return every call that the OpInfos record at any depth, by symbol id."""
    found: dict[str, list[BoundSymbol]] = {}
    for info in all_opinfos():
        for dtype in {main_dtype(info), torch.complex64} & {main_dtype(info), *info.dtypes}:
            for sample in info.samples(info, torch.device("cpu"), dtype):
                try:
                    trace = forge.trace(info.op, *sample.args, **sample.kwargs)
                except Exception:
                    continue
                _collect(trace.bound_symbols, found)
    return found


def _collect(calls: Iterable[BoundSymbol], found: dict[str, list[BoundSymbol]]) -> None:
    for bound in calls:
        found.setdefault(bound.symbol.id, []).append(bound)
        _collect(bound.subsymbols, found)


# torchlang


def _covered() -> set[str]:
    ids = {name for info in all_opinfos() for name in info.symbols}
    own = [torchlang.find(info.op) for info in all_opinfos()]
    return ids | {symbol.id for symbol in own if symbol is not None}


def test_every_torchlang_symbol_has_an_opinfo() -> None:
    covered = _covered()
    _report(
        f"{id} has no OpInfo: add one, or name it in symbols= of one, in {_file('testing/opinfos', symbol)}"
        for id, symbol in torchlang.all_symbols().items()
        if id not in covered
    )


def test_opinfos_name_symbols_that_exist() -> None:
    known = torchlang.all_symbols()
    _report(
        f"OpInfo {info.name!r} names {id} in symbols=, which torchlang does not have"
        for info in all_opinfos()
        for id in info.symbols
        if id not in known
    )


def test_every_opinfo_has_error_samples() -> None:
    _report(
        f"OpInfo {info.name!r} has no errors=: every op has an error sample"
        for info in all_opinfos()
        if not info.errors
    )


def test_directives_apply_to_something() -> None:
    """A misspelt test, executor, device or dtype would silently disable a directive."""
    tests = {None, "test_consistency", "test_gradient", "test_strided"}
    tests |= {"test_half_gradient", "test_jit", "test_meta", "test_printing"}
    tests |= {"test_inputs_unchanged", "test_fused", "test_checked"}
    tests |= {f"test_a_caller_sees_eagers[{mode}]" for mode in ("plain", "grad", "no_grad", "inference", "dynamic")}
    layouts = {f"test_strided[{layout}]" for layout in ("transposed", "expanded", "offset", "every other")}

    def problems() -> Iterator[str]:
        for info in all_opinfos():
            for directive in info.directives:
                where = f"OpInfo {info.name!r}: a directive ({directive.reason})"
                if directive.test not in tests | (layouts if directive.kind != "tolerance" else set()):
                    yield f"{where} is about {directive.test}, which is no test with directives"
                if not set(directive.executors or ()) <= {"torch", "torch-prims"}:
                    yield f"{where} names executors {directive.executors}"
                if not set(directive.devices or ()) <= {"cpu", "cuda"}:
                    yield f"{where} names devices {directive.devices}"
                if not set(directive.dtypes or ()) <= {*info.dtypes, info.precise, torch.complex128}:
                    yield f"{where} names dtypes that the op is not tested with"

    _report(problems())


def test_every_torchlang_symbol_is_claimed_by_the_torch_executor() -> None:
    _report(
        f"{id} has no implementation in the torch executor: see {_file('executors/torchex', symbol)}"
        for id, symbol in torchlang.all_symbols().items()
        if symbol not in composites
        and (id not in torchex.implementations or torchex.implementations[id].symbol is not symbol)
    )


def test_every_decomposition_ends_in_prims() -> None:
    """A symbol without calls inside is a prim, and torch-prims runs it."""
    _report(
        f"{id} is called by a decomposition, but is no prim that torch-prims runs: "
        f"see {_file('executors/torchex', calls[0].symbol)}"
        for id, calls in _recorded().items()
        if any(not call.subsymbols for call in calls) and id not in torch_prims.implementations
    )


def _torch_functions() -> list[str]:
    lines = (DATA / "torch_functions.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _resolve(name: str) -> Any:
    """Return the function that Dynamo passes under this name: an object, or a method's name."""
    owner, _, last = name.rpartition(".")
    if owner == "Tensor":
        return last
    return getattr(operator, last) if owner == "operator" else pkgutil.resolve_name(name)


def test_torchlang_has_what_models_call() -> None:
    _report(
        f"{name} is called by many models, but torchlang does not have it: add a @torchsymbol in forge/torchlang"
        for name in _torch_functions()
        if torchlang.find(_resolve(name)) is None
    )


def test_no_function_has_two_meanings() -> None:
    """A method, and the torch function of the same name that is the same object or operation, mean one symbol."""
    _report(
        f"{id}: its first function means {torchlang.find(torchlang.torch_function_of(symbol))}"
        for id, symbol in torchlang.all_symbols().items()
        if torchlang.find(torchlang.torch_function_of(symbol)) is not symbol
    )


# prims


def test_every_prim_says_what_it_means() -> None:
    _report(
        f"{prim.id} has no docstring on its meta: write one in {_file('prims', prim)}"
        for prim in prims.all_prims().values()
        if not (prim.meta.__doc__ or "").strip()
    )


@pytest.mark.parametrize("executor", [torchex, torch_prims], ids=["torchex", "torchprims"])
def test_every_prim_has_an_implementation(executor: executors.OperatorExecutor) -> None:
    _report(
        f"{prim.id} has no implementation in {executor.name}: add one with run_prims or @run_prim "
        f"in {_file('executors/torchex', prim)}"
        for prim in prims.all_prims().values()
        if prim.id not in executor.implementations
    )


@pytest.mark.parametrize("executor", [torchex, torch_prims], ids=["torchex", "torchprims"])
def test_every_implementation_prints_as_a_name(executor: executors.OperatorExecutor) -> None:
    """A closure or a lambda prints as printed_object(7), which says nothing: give the function a name in its file."""
    _report(
        f"{id} is run by {implementation.op.op}, which no import finds: "
        f"make it a function of {_file('executors/torchex', implementation.symbol)}"
        for id, implementation in executor.implementations.items()
        if implementation.op is not None
        and not (qualified_name(implementation.op.op) or property_name(implementation.op.op))
    )


def _takes_and_gives_floats(call: BoundSymbol) -> bool:
    def floats(tree: Any) -> bool:
        return any(proxy.dtype.is_floating_point or proxy.dtype.is_complex for proxy in tensors(tree))

    return floats([call.args, call.kwargs]) and floats(call.output)


def test_every_prim_has_a_gradient_rule_or_needs_none() -> None:
    """A prim that was recorded with floats as input and output has a rule, or is tagged as stopping gradients."""
    _report(
        f"{prim.id} has no gradient rule: add one with @register_grad in {_file('prims', prim)}, "
        "or Tag.NOT_DIFFERENTIABLE where eager has none"
        for prim in prims.all_prims().values()
        if grad_rule(prim) is None
        and Tag.NOT_DIFFERENTIABLE not in prim.tags
        and any(map(_takes_and_gives_floats, _recorded().get(prim.id, ())))
    )


# torch 2.11 has no second derivative of grid_sampler_2d to compare with
_NOT_RECORDED = set() if TORCH >= (2, 13) else {"prims.grid_sampler_double_backward"}


def test_every_prim_is_recorded_by_some_opinfo() -> None:
    """A prim that no sample's forward or gradient records is dead, or untested.

    Front ends record the prims of the memory and modes families for writes and modes: tests/ir/test_memory.py,
    tests/capture/test_programs.py and tests/distributed/test_dtensors.py have them.
    """
    wanted = {prim.id: prim for prim in prims.all_prims().values() if _family(prim) not in ("memory", "modes")}
    missing = set(wanted) - _NOT_RECORDED - set(_recorded())
    for recorded in _recorded_with_backwards():
        missing -= recorded
        if not missing:
            break
    _report(
        f"{id} is recorded by no OpInfo's samples: it needs one in {_file('testing/opinfos', wanted[id])}, or to go"
        for id in missing
    )


def _recorded_with_backwards() -> Iterator[set[str]]:
    """Yield the ids that one sample's forward and gradient record: the first sample of each OpInfo, then the second."""
    infos = [info for info in all_opinfos() if info.gradient]
    for samples in zip_longest(*(info.samples(info, torch.device("cpu"), info.precise) for info in infos)):
        for info, sample in zip(infos, samples, strict=True):
            if sample is not None:
                yield _recorded_by(info, sample)


def _recorded_by(info: OpInfo, sample: Sample) -> set[str]:
    inputs = tensors_in((sample.args, sample.kwargs))
    floats = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point() and tensor.is_leaf]
    try:
        executable, report = Direct(info.op, executors=["torch-prims"]).compile(sample.args, sample.kwargs)
    except Exception:
        return set()
    with contextlib.suppress(Exception):  # a backward that torch does not have raises when it runs
        flowing = [out for out in tensors_in(executable.call(*inputs)) if out.requires_grad]
        torch.autograd.grad(flowing, floats, [torch.ones_like(out) for out in flowing], allow_unused=True)
    found: dict[str, list[BoundSymbol]] = {}
    for trace in (*report.traces, *report.backward_traces):
        _collect(trace.bound_symbols, found)
    return set(found)


def test_every_gradient_rule_belongs_to_a_symbol() -> None:
    """A rule registered for a symbol that a later definition replaced would never run."""
    known = {symbol.id for symbol in _all_symbols()}
    known |= {value.id for package in FAMILIES for name in _modules(package) for value in _symbols_in(name)}
    _report(
        f"the gradient rule of {id} belongs to no symbol"
        for id, rule in grad_rules._rules.items()
        if id not in known and rule.__module__.startswith("forge.")  # tests register rules of their own
    )


# names


def _all_symbols() -> list[Symbol]:
    tables = (prims.all_prims(), all_clang_symbols(), torchlang.all_symbols())
    return [symbol for table in tables for symbol in table.values()]


def test_no_symbol_is_defined_twice() -> None:
    """Ids are unique over all packages, whose registries refuse duplicates of their own."""
    counts = Counter(symbol.id for symbol in _all_symbols())
    _report(f"{id} is defined {count} times" for id, count in counts.items() if count > 1)


def _modules(package: ModuleType) -> Iterator[str]:
    """Yield the names of the files of a package and of the packages in it."""
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield found.name


def _symbols_in(module: str) -> list[Symbol]:
    return [value for value in vars(sys.modules[module]).values() if isinstance(value, Symbol)]


FAMILIES = [prims, clang, torchlang, torchex_package, opinfos]


@pytest.mark.parametrize("package", FAMILIES, ids=lambda package: package.__name__.removeprefix("forge."))
def test_every_family_file_is_imported(package: ModuleType) -> None:
    """A file that its package does not import silently registers nothing."""
    _report(
        f"{name} is imported by nobody: import it in {package.__name__}/__init__.py"
        for name in _modules(package)
        if name not in sys.modules
    )


@pytest.mark.parametrize("package", FAMILIES[:3], ids=lambda package: package.__name__.removeprefix("forge."))
def test_no_family_shadows_another_ones_symbol(package: ModuleType) -> None:
    """Families are star-imported into one namespace: a name in two files would silently be that of the last one."""
    homes: dict[str, dict[int, str]] = {}
    for name in _modules(package):
        for attribute, value in vars(sys.modules[name]).items():
            if isinstance(value, Symbol) and not attribute.startswith("_") and value in _of(package):
                homes.setdefault(attribute, {}).setdefault(id(value), name)
    _report(
        f"{package.__name__}.{attribute} is one symbol in {' and another in '.join(found.values())}: rename one"
        for attribute, found in homes.items()
        if len(found) > 1
    )


def _of(package: ModuleType) -> set[Symbol]:
    prefix = {prims: "prims.", clang: "clang."}.get(package)
    return {symbol for symbol in _all_symbols() if prefix is None or symbol.id.startswith(prefix)}


def test_a_missing_piece_is_named_with_its_file() -> None:
    """Users who add an op read these messages."""
    assert _file("prims", prims.exp2) == "forge/prims/elementwise.py"
    assert _file("executors/torchex", torchlang.silu) == "forge/executors/torchex/activation.py"
    assert _file("torchlang", torchlang.silu) == "forge/torchlang/nn/activation.py"
    with pytest.raises(pytest.fail.Exception, match="2 missing:\na\nb"):
        _report(["b", "a"])


@pytest.mark.parametrize("language", [prims, clang, torchlang], ids=lambda each: each.__name__)
def test_no_file_of_a_language_hides_what_another_one_defines(language: ModuleType) -> None:
    """The package takes all public names of its files."""
    files = re.findall(r"^from (\S+) import \*", Path(language.__file__).read_text(), re.MULTILINE)
    assert files
    owners: dict[str, str] = {}
    twice = []
    for file in files:
        for name, defined in vars(sys.modules[file]).items():
            if not isinstance(defined, FunctionType) or name.startswith("_"):
                continue
            where = defined.__module__
            if f"{where}.".startswith(f"{file}.") and owners.setdefault(name, where) != where:
                twice.append(f"{name} is defined in {owners[name]} and in {where}")
    assert not twice
