"""The kernels of repositories that programs run, as the files of a bundle (forge/hub/bundle.py)."""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge import hub
from forge.executors.hubex import HubExecutor, Kernel, kernel_executor, operators
from forge.hub.bundle import Part, write_bundle
from forge.hub.compat import library
from forge.hub.files import MANIFEST
from forge.hub.manifest import read_manifest
from forge.hub.manifest.parse import Node, read_document
from forge.hub.manifest.validate import is_bound
from forge.ir import Trace, check

_unpacked: list[tempfile.TemporaryDirectory[str]] = []  # kernels read their sources when they are compiled


def bundle_parts(kernels: Iterable[Kernel], caller: str) -> dict[Part, Mapping[str, bytes]]:
    """Return the parts of a bundle of kernels, each with its files by their paths in the bundle.

    Raises ValueError or NotImplementedError, which name the caller, for a kernel that has no files of its own, HubError
    for one that depends on others.
    """
    used = list({id(kernel): kernel for kernel in kernels}.values())
    for kernel in used:
        check(
            kernel.origin.source is not None,
            lambda kernel=kernel: (
                f"{caller}: kernel {kernel.name} of {kernel.operation} was declared in Python at "
                f"{kernel.entry.mark}, and has no files; put it in a repository (docs/tutorial/writing-a-kernel.md)"
            ),
        )
        check(
            not is_bound(kernel.entry, kernel.entry.library),
            lambda kernel=kernel: (
                f"{caller}: kernel {kernel.name} of {kernel.operation} is in {kernel.entry.mark.file}, which "
                "another manifest names; a bundle holds what a manifest itself declares"
            ),
            NotImplementedError,
        )
    by_manifest: dict[str, list[Kernel]] = {}
    for kernel in used:
        by_manifest.setdefault(kernel.entry.mark.file, []).append(kernel)
    names = _unique(kernels[0].entry.library or "kernels" for kernels in by_manifest.values())
    return dict(map(_part, names, by_manifest.values()))


def bundle_files(kernels: Iterable[Kernel]) -> dict[str, bytes]:
    """Return the files of a bundle of kernels, by their paths in it; nothing where there are no kernels."""
    parts = bundle_parts(kernels, "forge.export")
    if not parts:
        return {}
    with tempfile.TemporaryDirectory(prefix="forge-bundle") as folder:
        write_bundle(Path(folder), parts)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def load_bundle(files: Mapping[str, bytes]) -> HubExecutor:
    """Return the executor of the kernels in a bundle's files; they were verified when the bundle was made."""
    if not files:
        return kernel_executor([])
    folder = tempfile.TemporaryDirectory(prefix="forge-kernels")
    _unpacked.append(folder)
    for name, content in files.items():
        path = Path(folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return kernel_executor([folder.name], verify=False)


def kernels_of(trace: Trace) -> Iterator[Kernel]:
    """Return the kernels that a trace calls."""
    for bound in trace.bound_symbols:
        if isinstance(bound.symbol.executor, Kernel):
            yield bound.symbol.executor


def _unique(names: Iterable[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for name in names:
        stem = re.sub(r"[^\w.-]", "_", name)
        counts[stem] = counts.get(stem, 0) + 1
        yield stem if counts[stem] == 1 else f"{stem}-{counts[stem]}"


def _part(name: str, kernels: list[Kernel]) -> tuple[Part, dict[str, bytes]]:
    """Return the part of one manifest, and its files by their paths in the bundle."""
    path = Path(kernels[0].entry.mark.file)
    content = kernels[0].origin.content
    verified = next((each.verified for each in hub.loaded_kernels() if each.verified.content == content), None)
    files = hub.source_files(read_manifest(path, operators())) if verified is None else _variant(verified)
    kernel_names = tuple((kernel.operation, kernel.name) for kernel in kernels)
    manifest = MANIFEST if verified is not None or files else path.name
    dropped = "build" if verified is not None else None  # the sources of a variant stay where they are
    members = {manifest: _prune_manifest(path, kernels, dropped), **files}
    return Part(f"{name}/{manifest}", verified is not None, kernel_names), {
        f"{name}/{file}": members[file] for file in members
    }


def _variant(verified: hub.VerifiedKernel) -> dict[str, bytes]:
    """Return a repository's files, as they were verified."""
    place = verified.resolved.place()
    if verified.depends:
        dependencies = ", ".join(each.resolved.source for each in verified.depends)
        raise hub.HubError(f"{place}: asks for other kernels ({dependencies}), which a bundle does not hold")
    files = {path: file.location.read_bytes() for path, file in verified.files.items()}
    hub.verify(verified.resolved)  # they are still what was loaded
    return {f"build/{verified.resolved.variant}/{path}": content for path, content in files.items()}


def _prune_manifest(path: Path, kernels: list[Kernel], dropped: str | None) -> bytes:
    """Return the manifest with these kernels alone, and without the key `dropped`."""
    places = {(kernel.entry.mark.line, kernel.entry.mark.column) for kernel in kernels}
    root = read_document(path).root
    assert root is not None, "a manifest with kernels is not empty"
    pruned: Any
    if root.is_list:  # ExecuTorch's functions.yaml
        pruned = _prune_ops(root, places)
    else:
        items = {key: node for key, node in root.value.items() if key != dropped}
        pruned = {key: _prune_ops(node, places) if key == "ops" else node.plain() for key, node in items.items()}
    return library("yaml").safe_dump(pruned, sort_keys=False, width=1 << 20).encode()


def _prune_ops(ops: Node, places: set[tuple[int, int]]) -> list[Any]:
    pruned = []
    for op in ops.value:
        selection = {key: _select(op.value[key], places) for key in ("kernels", "dispatch") if key in op.value}
        if any(selection.values()):
            pruned.append({**op.plain(), **selection})
    return pruned


def _select(node: Node, places: set[tuple[int, int]]) -> list[Any] | dict[str, Any]:
    """Return the kernels at these places, in a list of them or by dispatch key."""
    if node.is_mapping:
        marks = node.keys.items()
        return {key: node.value[key].plain() for key, mark in marks if (mark.line, mark.column) in places}
    return [item.plain() for item in node.items if (item.mark.line, item.mark.column) in places]
