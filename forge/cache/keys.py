"""The key of a captured graph: a hash of all that decides what it is compiled to."""

import hashlib
import platform
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from forge.cache.graphs import Described, Uncacheable
from forge.compiler.config import Config
from forge.executors.executor import Declined, Executor, OperatorExecutor
from forge.executors.fingerprint import fingerprint_of, here, name_in_torch, owner_of_module
from forge.executors.hubex import HubExecutor, Kernel, verifier
from forge.executors.hubex.verification.fingerprint import fingerprint
from forge.runtime.torch_state import modes
from forge.support.machine import device_name, processor


def key_of(graph: Described, config: Config, parameters: Sequence[str]) -> str:
    """Raises Uncacheable where something of it is known to this process only."""
    if config.cuda_graphs:
        raise Uncacheable("CUDA graphs are of one process")
    if config.freeze:
        raise Uncacheable("what a frozen program computes of its weights is of one process")
    parts = [
        *_system(),
        *_devices(graph),
        repr(modes()),
        repr((config.strict, config.memory, config.select, config.numerics, list(parameters))),
        *map(_identity, config.executors),
        _of_transforms(config),
        *graph.words,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _system() -> tuple[str, ...]:
    where = (platform.platform(), torch.backends.cpu.get_cpu_capability(), processor())
    return (*here(), str(torch.version.cuda), *where)


def _devices(graph: Described) -> list[str]:
    """The devices of a graph's tensors."""
    return [device_name(device) for device in sorted(graph.devices, key=str)]


def _of_transforms(config: Config) -> str:
    found = fingerprint_of(*config.transforms)
    if not found.is_lasting:
        raise Uncacheable("one of its transforms is known to this process only")
    return found.digest


# executors


def _identity(executor: Executor) -> str:
    return f"{executor.name} {type(executor).__module__}.{type(executor).__qualname__} {_said(executor)}"


def _said(executor: Executor) -> str:
    """What an executor's programs depend on: what it says itself, or else what it consists of."""
    if isinstance(executor, HubExecutor):
        return _of_kernels(executor)
    if type(executor) is OperatorExecutor:
        return _of_functions(executor)
    said = executor.identity()
    if isinstance(said, Declined):
        raise Uncacheable(said.reason)
    if executor.patterns:
        raise Uncacheable(f"executor {executor.name} has patterns")
    return said


def _of_functions(executor: OperatorExecutor) -> str:
    """An executor that is a table: its functions; those of forge, torch and Python are known by their versions."""
    size = len(executor._operators) + len(executor.implementations)
    known, text = _tables.get(executor, (0, ""))
    if known == size and not executor.patterns:
        return text
    parts = list(_parts(executor))
    functions = [each for part in parts for each in part if callable(each)]
    foreign = [each for each in functions if owner_of_module(getattr(each, "__module__", None)) is None]
    foreign = [each for each in foreign if name_in_torch(each) is None]
    found = fingerprint_of(foreign, list(executor.patterns))
    if not found.is_lasting:
        raise Uncacheable(f"a function of executor {executor.name} is known to this process only")
    text = repr((found.digest, [[each if isinstance(each, str) else _called(each) for each in part] for part in parts]))
    if not foreign:
        _tables[executor] = size, text
    return text


_tables: "weakref.WeakKeyDictionary[OperatorExecutor, tuple[int, str]]" = weakref.WeakKeyDictionary()


def _parts(executor: OperatorExecutor) -> Iterator[tuple]:
    for name, symbol in executor._operators.items():
        yield name, symbol.op, symbol.meta, *sorted(map(str, symbol.tags))
    for name, each in executor.implementations.items():
        op = each.op and each.op.op
        yield name, op, each.checker, each.execution_transform, each.grad_transform, each.grad


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _of_kernels(executor: HubExecutor) -> str:
    if not executor.kernels:
        return ""
    if executor._verdict not in (None, verifier.verdict):
        raise Uncacheable(f"the kernels of executor {executor.name} have a verifier of their own")
    if not verifier.is_lasting:
        raise Uncacheable("a kernel could not be verified, for a reason that may pass")
    verified = executor._verdict is not None
    return repr([executor.checked, executor.faster, verified, [_of_kernel(kernel) for kernel in executor.kernels]])


def _of_kernel(kernel: Kernel) -> tuple:
    if kernel.extension is not None:
        raise Uncacheable(f"kernel {kernel.name} is a class's, and what it loads is known to this process only")
    found = fingerprint(kernel)
    if not found.is_lasting:
        raise Uncacheable(f"kernel {kernel.name} is known to this process only")
    return found.digest, verifier.trusts(kernel), kernel.shipped
