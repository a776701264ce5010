"""One entry point: an exported program, compiled to an AOTInductor package or to functions of forge."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from forge.aot import tree
from forge.aot.dim_names import DimNames
from forge.aot.errors import ExportError
from forge.aot.kernels import kernels_of
from forge.aot.package import find_failure
from forge.aot.signature import ConstantInput, Input, NumberInput, Signature, TensorInput, place_of
from forge.cache.graphs import Uncacheable
from forge.cache.objects import Writer
from forge.cache.store import Entry
from forge.capture.exported import record
from forge.compiler import pipeline
from forge.compiler.claim import ClaimedCall, claim_calls
from forge.compiler.config import Config
from forge.compiler.context import Kind
from forge.compiler.freezing import freezing_of
from forge.compiler.program import EagerFallback, Unsupported
from forge.compiler.report import CompileReport
from forge.executors.executor import Declined, Executor, FusionExecutor, decline
from forge.executors.hubex import Kernel
from forge.executors.inductorex import InductorExecutor
from forge.ir import NumberProxy, TensorProxy, Trace
from forge.ir.interpreter import paused_gc
from forge.ir.printing import symbolic_expression
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import tensors
from forge.ir.unresolved import refuse_guards
from forge.runtime.torch_state import preserve_torch_state
from forge.support import progress
from forge.torch_internals.sympy import PythonPrinter, int_oo
from forge.torchlang import autocast_mode

_printer = PythonPrinter()
AOTINDUCTOR, FORGE = "aotinductor", "forge"  # the two forms


@dataclass
class CompiledEntry:
    """A compiled entry point, in parts that a file holds.

    form: AOTINDUCTOR or FORGE. reason: why it is not AOTINDUCTOR. weights: (name in the program, tensor, whether the
    program writes to it) of those that it takes. files: the contents of files by name. data: what else `load` needs.
    text: the program, as Python. claims: (executor, number of calls). executors: those that it was compiled by.
    kernels: those of repositories that it calls.
    """

    form: str
    signature: Signature
    reason: str | None
    text: str
    claims: dict[str, int]
    executors: Sequence[Executor]
    weights: list[tuple[str, torch.Tensor, bool]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    kernels: list[Kernel] = field(default_factory=list)


def compile_entry(
    exported: ExportedProgram, config: Config, parameters: Sequence[str], dims: Sequence[DimNames], *, alone: bool
) -> CompiledEntry:
    """Return an exported program compiled.

    parameters: the names of its positional parameters. dims: for each leaf of its arguments the user's names of its
    dims. alone: its weights are shared with no other entry point, so that a package holds them itself.

    Raises ExportError for a program that forge cannot compile.
    """
    try:
        with paused_gc(), preserve_torch_state(), torch.no_grad():
            return _Compiler(exported, config, parameters, dims, alone=alone).compile()
    except (Unsupported, Uncacheable) as error:
        raise ExportError(f"forge.export: {error}") from error
    except EagerFallback as error:
        raise ExportError(f"forge.export: {error.reason}") from error


class _Compiler:
    """The compilation of one entry point."""

    def __init__(
        self,
        exported: ExportedProgram,
        config: Config,
        parameters: Sequence[str],
        dims: Sequence[DimNames],
        *,
        alone: bool,
    ) -> None:
        self.exported = exported
        self.config = config
        self.parameters = parameters
        self.dims = dims
        self.alone = alone
        self.captured = record(exported)
        self.report = CompileReport(opaque_calls=self.captured.capture.opaque_calls)
        self.program = self.captured.capture.program
        self.context = pipeline.context_of(Kind.PROGRAM, config, self.program, self.report)
        self.context.freezing = freezing_of(self.program)
        first = len(self.captured.symbols) + len(self.captured.weights)
        self.user_inputs = self.program.trace.inputs[first:]
        numbers = [proxy.value for proxy in self.user_inputs if isinstance(proxy, NumberProxy)]
        own = {str(each.node.expr): each for each in numbers if isinstance(each, torch.SymInt)}
        self.sizes = {**self.captured.symbols, **own}
        self.device = _device_of([*self.captured.weights.values(), *tensors(self.user_inputs)])
        self.inputs = self._inputs()  # now: later guards may replace sizes
        self.results = [_in_words(each) if isinstance(each, SYMBOLIC_TYPES) else each for each in self.captured.results]

    def compile(self) -> CompiledEntry:
        with autocast_mode.disable(), progress.display():
            trace = pipeline.optimize(self.program.trace, self.context)
            weights = self._weights(trace)
            claimed = claim_calls(trace, self.config.executors, self.context.declined, self.config.selection)[1]
            files = self._compile_package(trace, claimed, weights)
            if isinstance(files, Declined):
                return self._compile_functions(trace, weights, files.reason)
        return self._entry(
            AOTINDUCTOR,
            trace,
            _counts_of(claimed),
            files=files,
            weights=[] if self.alone else self._used(trace, weights),
        )

    def _weights(self, trace: Trace) -> dict[str, torch.Tensor]:
        """Return the tensors that the program takes beside the user's, by name: weights and what is folded of them."""
        first = len(self.captured.symbols)
        inputs = trace.inputs[first : first + len(self.captured.weights)]
        weights = {proxy.name: each for proxy, each in zip(inputs, self.captured.weights.values(), strict=True)}
        folded_weights = self.context.folded_weights
        if folded_weights is not None:
            proxies = [self.program.trace.inputs[place].name for place in folded_weights.reads]
            values = folded_weights.function(*[weights[name] for name in proxies])
            weights |= {proxy.name: each for proxy, each in zip(trace.inputs[-len(values) :], values, strict=True)}
        return weights

    def _used(self, trace: Trace, weights: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, bool]]:
        used = {*trace.output_names, *[name for bound in trace.bound_symbols for name in bound.inputs]}
        changed = {self.program.trace.inputs[place].name for place in self.program.mutated}
        return [(name, each, name in changed) for name, each in weights.items() if name in used]

    def _compile_package(
        self, trace: Trace, claimed: Sequence[ClaimedCall], weights: Mapping[str, torch.Tensor]
    ) -> dict[str, bytes] | Declined:
        if any(isinstance(proxy, NumberProxy) for proxy in self.user_inputs):
            return decline("an input is a number")
        compiler = next((each for each in self.config.executors if isinstance(each, InductorExecutor)), None)
        if compiler is None:
            return decline("inductor is not among its executors")
        used = self._used(trace, weights)
        constants = {name: each for name, each, _ in used} | trace.constants
        sizes = [proxy for proxy in trace.inputs if proxy.name in self.captured.symbols]
        weight_proxies = [_proxy_of(name, each) for name, each in constants.items()]
        whole = trace.derive("whole program", trace.bound_symbols, inputs=[*sizes, *weight_proxies, *self.user_inputs])
        with refuse_guards(self.sizes.values()):
            paths = compiler.compile_ahead_of_time(whole, claimed, constants, alone=self.alone)
        if isinstance(paths, Declined):
            return paths
        copies = {name: each.clone() if changes else each for name, each, changes in used} | trace.constants
        failure = find_failure(paths, self.exported, {} if self.alone else copies, self.device)
        if failure is not None:
            return failure
        return {os.path.basename(path): Path(path).read_bytes() for path in paths}

    def _compile_functions(self, trace: Trace, weights: Mapping[str, torch.Tensor], reason: str) -> CompiledEntry:
        plan, _ = pipeline.lower(trace, self.context)
        final = plan.forward.trace
        assert final is not None
        entry = Entry({})
        fused = {
            id(bound.symbol.op): (bound.symbol.executor, bound.symbol.op)
            for bound in final.bound_symbols
            if isinstance(bound.symbol.executor, FusionExecutor) and bound.symbol.op is not None
        }
        writer = Writer(entry, self.config.executors, {key: fuser for key, (fuser, _) in fused.items()}, {})
        code = writer.code(final.python_source())
        regions, libraries = _libraries_of(entry, fused.values())
        result = self._entry(
            FORGE,
            final,
            dict(Counter(each.executor for each in self.report.claims)),
            reason=reason,
            weights=self._used(final, weights),
        )
        result.data = {
            "name": final.name,
            "code": code,
            "inputs": final.input_names,
            "user_inputs": self._user_names(),
            "blobs": len(entry.blobs),
            "regions": regions,
        }
        result.kernels = list(kernels_of(final))
        result.files = {**{f"blob_{number}": blob for number, blob in enumerate(entry.blobs)}, **libraries}
        return result

    def _user_names(self) -> list[str | None]:
        """Return the program's names of the user's inputs, None for those that are constants."""
        proxies = iter(self.user_inputs)
        return [None if isinstance(each, ConstantInput) else next(proxies).name for each in self.inputs]

    def _entry(self, form: str, trace: Trace, claims: dict[str, int], **fields: Any) -> CompiledEntry:
        signature = self._signature()
        return CompiledEntry(
            form,
            signature,
            fields.pop("reason", None),
            str(trace),
            claims,
            self.config.executors,
            device=self.device.type,
            **fields,
        )

    # the signature

    def _signature(self) -> Signature:
        """Return the signature. Raises ExportError where a size that may differ was compiled as a number."""
        for name, each in self.sizes.items():
            if not each.node.expr.is_symbol:
                problem = f"may differ, but the program is for {symbolic_expression(each)} alone"
                raise ExportError(f"forge.export: {place_of(name, self.inputs)} {problem}")
        ranges = self.exported.range_constraints
        spec = self.exported.call_spec
        return Signature(
            self.parameters,
            tree.describe(spec.in_spec),
            self.inputs,
            {name: _limits(ranges.get(each.node.expr)) for name, each in self.sizes.items()},
            _guards(self.sizes, self.captured.guards, self.captured.asserted),
            tree.describe(spec.out_spec),
            self.results,
            self._names(),
        )

    def _names(self) -> dict[str, str]:
        """Return the user's names of sizes, by symbol."""
        result: dict[str, str] = {}
        for each, names in zip(self.inputs, self.dims, strict=False):
            for dim, name in names.items():
                if isinstance(each, TensorInput) and each.shape[dim] in self.sizes:
                    result[str(each.shape[dim])] = name
        return result

    def _inputs(self) -> list[Input]:
        changed = {self.program.trace.inputs[place].name for place in self.program.mutated}
        proxies = iter(self.user_inputs)
        inputs: list[Input] = []
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT:
                continue
            if isinstance(spec.arg, ConstantArgument):
                inputs.append(_constant(spec.arg.name, spec.arg.value))
                continue
            proxy = next(proxies)
            if isinstance(proxy, NumberProxy):
                inputs.append(NumberInput(spec.arg.name, symbolic_expression(proxy.value)))
                continue
            assert isinstance(proxy, TensorProxy) and proxy.strides is not None
            shape, strides = (list(map(_in_words, sizes)) for sizes in (proxy.shape, proxy.strides))
            dtype = str(proxy.dtype).removeprefix("torch.")
            inputs.append(TensorInput(spec.arg.name, shape, strides, dtype, proxy.device.type, proxy.name in changed))
        return inputs


def _device_of(values: Iterable[torch.Tensor | TensorProxy]) -> torch.device:
    """Return the one device beside the CPU that tensors are on, the CPU where they are on no other. Raises
    ExportError where they are on several."""
    others = sorted({each.device for each in values if each.device.type != "cpu"}, key=str)
    if len(others) > 1:
        listing = " and ".join(map(str, others))
        raise ExportError(f"forge.export: the program is on {listing}, but must be on one device")
    return others[0] if others else torch.device("cpu")


def _constant(name: str, value: Any) -> ConstantInput:
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ExportError(f"forge.export: input {name} is {value!r}, but must be a tensor, a number or a string")
    return ConstantInput(name, value)


def _in_words(size: Any) -> int | str:
    return symbolic_expression(size) if isinstance(size, SYMBOLIC_TYPES) else int(size)


def _limits(value_range: Any) -> list[int | None]:
    """Return the smallest and the largest of a size, None where there is no limit."""
    if value_range is None:
        return [0, None]
    low, high = (None if each in (int_oo, -int_oo) else int(each) for each in (value_range.lower, value_range.upper))
    return [max(low or 0, 0), high]


def _guards(sizes: Mapping[str, torch.SymInt], exported: int, assertions: Sequence[sympy.Basic]) -> list[str]:
    """Return what the program assumes of its sizes, as Python expressions. exported: how many guards torch.export had
    added, among which limits of one size are in its range. assertions: what its graph asserts."""
    expressions: dict[str, None] = {}
    for environment in {id(each.node.shape_env): each.node.shape_env for each in sizes.values()}.values():
        for number, condition in enumerate([*(guard.expr for guard in environment.guards), *assertions]):
            expression = condition.xreplace(environment.replacements)
            symbols = set(map(str, expression.free_symbols))
            if symbols and symbols.issubset(sizes) and not (number < exported and _is_limit(expression)):
                expressions[str(_printer.doprint(expression))] = None
    return list(expressions)


def _is_limit(expression: sympy.Basic) -> bool:
    is_relation = isinstance(expression, sympy.core.relational.Relational)
    return is_relation and all(each.is_symbol or each.is_number for each in expression.args)


# other parts


def _counts_of(claimed: Sequence[ClaimedCall]) -> dict[str, int]:
    """Return the number of calls by executor."""
    return dict(
        Counter(
            each.fuser.name if each.fuser is not None else claim.executor
            for each in claimed
            for claim in each.claims[:1]
        )
    )


def _libraries_of(
    entry: Entry, fused: Iterable[tuple[FusionExecutor, Callable[..., Any]]]
) -> tuple[dict[str, dict[str, str]], dict[str, bytes]]:
    """Return the files that the blobs of regions refer to: for each blob, by its number, path → name; and name →
    content."""
    regions: dict[str, dict[str, str]] = {}
    libraries: dict[str, bytes] = {}
    for fuser, function in fused:
        data = fuser.dump(function)
        assert isinstance(data, bytes), "the writer has dumped it"
        files = {
            path: (f"{hashlib.sha256(content).hexdigest()}.so", content)
            for path, content in fuser.files_of(data).items()
        }
        libraries |= dict(files.values())
        regions[str(entry.blobs.index(data))] = {path: name for path, (name, _) in files.items()}
    return regions, libraries


def _proxy_of(name: str, tensor: torch.Tensor) -> TensorProxy:
    return TensorProxy(name, tuple(tensor.shape), tensor.dtype, tensor.device, strides=tuple(tensor.stride()))
