"""The key of a captured graph: a hash of all inputs of its compilation."""

import hashlib
import platform
from collections.abc import Sequence
from functools import cache

import torch

from forge.cache.graphs import GraphKey, Uncacheable
from forge.compiler.config import Config
from forge.executors.executor import Declined, Executor
from forge.executors.fingerprint import fingerprint_of, verifier_versions
from forge.runtime.torch_state import modes
from forge.support.machine import device_name, processor


def key_of(graph: GraphKey, config: Config, parameters: Sequence[str]) -> str:
    """Return the key of a graph's program. Raises Uncacheable if part of it exists only in this process."""
    if config.records_graphs:
        raise Uncacheable("CUDA graphs are of one process")
    if config.freeze:
        raise Uncacheable("what a frozen program computes of its weights is of one process")
    parts = [
        *_system(),
        *_devices(graph),
        repr(modes()),
        repr((config.strict, config.memory, config.select, config.numerics, config.cuda_graphs, list(parameters))),
        *map(_identity, config.executors),
        _of_transforms(config),
        *graph.words,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _system() -> tuple[str, ...]:
    where = (platform.platform(), torch.backends.cpu.get_cpu_capability(), processor())
    return (*verifier_versions(), str(torch.version.cuda), *where)


def _devices(graph: GraphKey) -> list[str]:
    """Return the devices of a graph's tensors."""
    return [device_name(device) for device in sorted(graph.devices, key=str)]


def _of_transforms(config: Config) -> str:
    fingerprint = fingerprint_of(*config.transforms)
    if not fingerprint.is_lasting:
        raise Uncacheable("one of its transforms is known to this process only")
    return fingerprint.digest


def _identity(executor: Executor) -> str:
    identity = executor.identity()
    if isinstance(identity, Declined):
        raise Uncacheable(identity.reason)
    patterns = fingerprint_of(*executor.patterns)
    if not patterns.is_lasting:
        raise Uncacheable(f"a pattern of executor {executor.name} is known to this process only")
    kind = type(executor)
    return f"{executor.name} {kind.__module__}.{kind.__qualname__} {identity} {patterns.digest}"
