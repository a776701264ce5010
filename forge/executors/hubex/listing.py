"""forge.kernels: the table of kernels, with their operations, constraints and status."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

import torch

from forge import hub
from forge.executors.hubex.executor import HubExecutor, in_order
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.verification_cache import Verifier
from forge.hub.lockfile import ALONE
from forge.hub.manifest import KernelEntry
from forge.ir.printing import table


@dataclass(frozen=True)
class KernelRow:
    """A kernel on a device. op: its operation. status: "verified", "not verified yet", "declined" or "trusted", with
    the reason. constraints: the supported calls, as text. place: the file and line that declare it. next: the kernel
    that is tried after it, the condition, and the rule that orders the two."""

    op: str
    kernel: str
    device: str
    status: str
    reason: str
    constraints: str
    place: str
    next: str


class KernelTable(tuple[KernelRow, ...]):
    """The rows of forge.kernels(); prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no kernels: forge.use_kernels([...]) adds some"
        header = tuple(field.name for field in fields(KernelRow))
        return "\n".join(table([header, *map(astuple, self)]))

    __repr__ = __str__


@dataclass(frozen=True)
class LayerRow:
    """A layer of a repository. layer: its name after the repository's. forward: its parameters besides the module.
    gradient: whether it declares a gradient; a layer without one declares that. place: the file and line of its
    class."""

    layer: str
    forward: str
    gradient: str
    place: str


def layers_in(
    source: str | os.PathLike[str], *, policy: hub.Policy | None = None, backend: str | None = None
) -> list[LayerRow]:
    """Return the layers of a repository's variant for this system, without executing code; none for other sources."""
    if os.fspath(source).endswith((".lock", *ALONE)):
        return []
    try:
        resolved = hub.resolve(source, policy=policy, backend=backend)
    except hub.HubError:  # gather reports the problem, and takes sources that are not built
        return []
    library = resolved.metadata.name
    return [
        LayerRow(
            f"{library}.{each.name}",
            each.forward,
            "yes" if each.has_backward else "no",
            f"{_short(str(resolved.folder / each.file))}:{each.line}",
        )
        for each in hub.layer_classes(resolved)
    ]


def layer_table(rows: Sequence[LayerRow]) -> str:
    """Return rows of layers, in columns."""
    return "\n".join(table([tuple(field.name for field in fields(LayerRow)), *map(astuple, rows)]))


def table_of(kernels: Iterable[Kernel], verifier: Verifier) -> KernelTable:
    """Return a row per kernel and device, with the kernels of an operation in the executor's order. Raises ValueError
    if no executor takes them, since two kernels of an operation have the same name."""
    executor = HubExecutor("kernels")
    executor.add(kernels)
    return KernelTable(_rows(executor.kernels, executor, verifier))


def _rows(kernels: list[Kernel], executor: HubExecutor, verifier: Verifier) -> Iterator[KernelRow]:
    symbols = {kernel.target.symbol.id: kernel.target.symbol for kernel in in_order(kernels)}
    for symbol in symbols.values():
        by_name = {kernel.name: kernel for kernel in kernels if kernel.target.symbol is symbol}
        candidates = [by_name[each.name or ""] for each in executor.candidates(symbol)]
        for kernel, following in zip(candidates, [*candidates[1:], None], strict=True):
            entry = kernel.entry
            place = f"{_short(entry.mark.file)}:{entry.mark.line}"
            devices: list[torch.device | None] = [*kernel.devices]
            for device in devices or [None]:
                status, reason = _status(kernel, device, verifier)
                text = "-" if device is None else str(device)
                after = _next(kernel, status, following)
                yield KernelRow(kernel.operation, kernel.name, text, status, reason, constraints(entry), place, after)


def _next(kernel: Kernel, status: str, following: Kernel | None) -> str:
    """Return 'norm_any, where the constraints do not hold; it has fewer of them (0, not 3)'."""
    name = "what runs without kernels" if following is None else following.name
    entry = kernel.entry
    when = [
        *(["the constraints do not hold"] if entry.specificity else []),
        *(["a gradient is needed"] if entry.grad.kind == "none" else []),
        *(["it is not faster"] if entry.faster else []),
    ]
    where = "always" if status == "declined" else f"where {' or '.join(when)}" if when else "where this one fails"
    return f"{name}, {where}" + ("" if following is None else f"; {_why_after(entry, following.entry)}")


def _why_after(first: KernelEntry, second: KernelEntry) -> str:
    """Return the rule that orders the second of two kernels after the first (forge/hub/manifest/ordering.py)."""
    if first.priority != second.priority:
        return f"its priority is lower ({second.priority}, not {first.priority})"
    if first.specificity != second.specificity:
        return f"it has fewer constraints ({second.specificity}, not {first.specificity})"
    return "it was declared later"


def _short(path: str) -> str:
    """Return a path relative to the current folder if that is shorter."""
    try:
        return min(path, os.path.relpath(path), key=len)
    except ValueError:  # on another drive
        return path


def _status(kernel: Kernel, device: torch.device | None, verifier: Verifier) -> tuple[str, str]:
    if device is None:
        types = kernel.entry.device.types if kernel.entry.device is not None else ()
        return "declined", f"no {' or '.join(types)} device is here"
    reason = kernel.unusable() or (kernel.extension.failed if kernel.extension is not None else None)
    if reason is not None:
        return "declined", reason
    if not kernel.is_loaded:
        return "not loaded yet", "its first use does it"
    return verifier.status(kernel, device)


def constraints(entry: KernelEntry) -> str:
    """Return a kernel's constraints as text: 'cuda >=8.0; input, weight: T (float16, bfloat16); input: [..., H]; H % 8
    == 0'."""
    parts = (
        [] if entry.device is None else [f"{' or '.join(entry.device.types)} {entry.device.capability_text}".strip()]
    )
    by_meta: dict[str, list[str]] = {}
    for name, dtype in entry.dtypes.items():
        by_meta.setdefault(str(dtype), []).append(name)
    for name, order in entry.orders.items():
        by_meta.setdefault(str(order), []).append(name)
    parts += [f"{', '.join(names)}: {meta}" for meta, names in by_meta.items()]
    parts += [f"{name}: {shape}" for name, shape in entry.shape.items()]
    parts += [condition.text for condition in entry.where]
    parts += [f"faster where {condition.text}" for condition in entry.faster]
    grad = {"none": "no gradient", "composite": "derived gradient"}.get(entry.grad.kind, "own gradient")
    return "; ".join([*parts, grad, *([f"priority {entry.priority}"] if entry.priority else [])])
