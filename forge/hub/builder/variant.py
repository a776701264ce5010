"""The folder of a variant: the Python side of a source tree, its shared object, the manifest, and metadata."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.hub import build, toolchain
from forge.hub.builder.compilation import TargetCompilation
from forge.hub.builder.config import Config, read_config
from forge.hub.builder.targets import Target, targets
from forge.hub.errors import BuildError, MalformedError, Place
from forge.hub.files import MANIFEST, MAX_SOURCE_BYTES, read_small
from forge.support import child_processes
from forge.support.owner_only_store import user_cache

_OPS = """\
import torch
{imported}
ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
"""
_LOADS = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import importlib.util, torch
importlib.util.module_from_spec(importlib.util.spec_from_file_location(*sys.argv[2:]))
"""


@dataclass(frozen=True)
class BuiltVariant:
    """A variant's folder. fresh: it was built now; otherwise an earlier build of the same files, flags and compilers is
    reused."""

    path: Path
    backend: str
    fresh: bool


@dataclass(frozen=True)
class BuiltTree:
    """The variants built from a source tree, and the reason for each backend that was skipped."""

    variants: tuple[BuiltVariant, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)


def build_tree(
    folder: str | Path, *, output: Path | None = None, jobs: int | None = None, force: bool = False
) -> BuiltTree:
    """Build the variants of a source tree for this machine, each into output/<variant>/ atomically.

    output: folder/build by default. jobs: the number of concurrent compilers, one per core by default. force: rebuild
    existing variants. Raises: MalformedError if build.toml or a file that it names cannot be read; BuildError if
    nothing can be built here, with the reason for each backend, or if a compiler fails, with its errors and command.
    """
    config = read_config(Path(folder).resolve())
    output = config.folder / "build" if output is None else Path(output).resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with build.lock(output / ".lock", config.name):
            for leftover in output.glob(".unfinished-*"):  # left by builders that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            available, skipped = targets(config)
            if not available:
                reasons = "".join(f"\n  {backend}: {reason}" for backend, reason in skipped.items())
                raise BuildError(f"{config.folder}: nothing of it can be built here:{reasons}")
            jobs = jobs or os.cpu_count() or 1
            return BuiltTree(tuple(_build(config, target, output, jobs, force) for target in available), skipped)
    except (OSError, NotImplementedError, toolchain.NoCompilerError) as error:
        raise BuildError(f"{config.folder}: {error}") from error


def _build(config: Config, target: Target, output: Path, jobs: int, force: bool) -> BuiltVariant:
    native = TargetCompilation(config, target) if target.components else None
    python = _python_files(config)
    contents = [part for path, content in python.items() for part in (path.encode(), content)]
    described = repr((target.variant, _metadata(config, target))).encode()
    key = (
        hashlib.sha256(b"\0".join([described, *contents])).hexdigest()
        if native is None
        else native.key(described, *contents)
    )
    id = f"_{config.module}_{key[:12]}"
    place = output / target.variant
    if not force and _is_whole(place, id):
        return BuiltVariant(place, target.backend, fresh=False)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output, ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        fresh = work / target.variant
        fresh.mkdir()
        for path, content in python.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_bytes(content)
        if native is not None:
            module = native.run(id, work / "native", jobs=jobs, logs=user_cache() / "logs" / id)
            _check_loads(module, id)
            shutil.copy(module, fresh)
        imported = f"\nfrom . import {id}\n" if native is not None else ""
        (fresh / "_ops.py").write_text(_OPS.format(imported=imported, id=id))
        metadata = {"id": id, **_metadata(config, target), "digest": _digest(fresh)}
        (fresh / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        if place.exists():
            place.rename(work / "before")
        fresh.rename(place)
    return BuiltVariant(place, target.backend, fresh=True)


def _python_files(config: Config) -> dict[str, bytes]:
    """Return the package's files of the shipped extensions, and forge's manifest, by path in the variant."""
    paths = {
        path.relative_to(config.package): path for path in sorted(config.package.rglob("*")) if _ships(config, path)
    }
    manifest = config.folder / MANIFEST
    paths |= {Path(MANIFEST): manifest} if manifest.exists() else {}
    if Path("__init__.py") not in paths:
        raise MalformedError(f"{config.package}: there is no __init__.py")
    contents = {}
    for path, file in paths.items():
        place = Place(str(config.folder), file=str(path))
        contents[str(path)] = read_small(file, place, MAX_SOURCE_BYTES, within=config.folder) or b""
    return contents


def _ships(config: Config, path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(config.package).parts)
    return path.is_file() and not hidden and path.suffix.removeprefix(".") in config.pyext and path.name != "_ops.py"


def _metadata(config: Config, target: Target) -> dict[str, Any]:
    """Return the content of metadata.json except the parts that depend on the files."""
    depends = dict.fromkeys([*config.python_depends.get("", ()), *config.python_depends.get(target.backend, ())])
    archs = list(config.archs.get(target.backend, ()))
    if target.backend == "cuda" and target.components:
        archs = sorted({arch for part in target.components for arch in part.archs or toolchain.architectures()})
    values = {
        "name": config.name,
        "version": config.version,
        "license": config.license,
        "upstream": config.upstream,
        "source": config.source,
        "python-depends": list(depends),
        "backend": {"type": target.backend, **({"archs": archs} if archs else {})},
    }
    return {key: value for key, value in values.items() if value is not None}


def _digest(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files}
    return {"algorithm": "sha256", "files": {path: base64.b64encode(each).decode() for path, each in digests.items()}}


def _is_whole(place: Path, id: str) -> bool:
    """Return whether the folder holds this build, unmodified."""
    try:
        metadata = json.loads((place / "metadata.json").read_bytes())
        digest = metadata.pop("digest")
        files = {**_digest(place)["files"]}
        files.pop("metadata.json", None)
        return metadata.get("id") == id and digest["files"] == files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_loads(module: Path, id: str) -> None:
    """Load a module in another process. Raises BuildError with the system's message."""
    command = [sys.executable, "-P", "-c", _LOADS, json.dumps(child_processes.search_path()), id, str(module)]
    process = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=child_processes.environment()
    )
    if process.returncode:
        message = process.stderr.strip().splitlines()[-1:] or [f"its process ended with {process.returncode}"]
        raise BuildError(f"{module.name}: was built, but cannot be loaded: {message[0]}")
