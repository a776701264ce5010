"""A bundle: a folder with the kernels that a program runs, for its deployment.

forge_bundle.json    what the program needs, and the sha256 of every other file
<part>/<manifest>    the needed kernels of a manifest, with the sources that they are compiled from
<part>/build/        the verified variant of a repository
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.hub.errors import MalformedError, Place, expect
from forge.hub.files import MAX_METADATA_BYTES, Pins, check_pins, read_files, read_small, unsafe_path
from forge.hub.policy import Policy

NAME = "forge_bundle.json"
VERSION = 1


@dataclass(frozen=True)
class Part:
    """The kernels of a bundle from one manifest. manifest: its path in the bundle. repository: True if a variant lies
    beside it. kernels: (operation, name) of each that the program needs."""

    manifest: str
    repository: bool
    kernels: tuple[tuple[str, str], ...]


def write_bundle(folder: Path, parts: Mapping[Part, Mapping[str, bytes]]) -> None:
    """Write the parts, each with its files by their paths in the bundle: atomically.

    Raises ValueError if the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"forge.bundle: {folder} is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}", dir=folder.parent))
    try:
        files = {path: content for contents in parts.values() for path, content in contents.items()}
        for path, content in files.items():
            target = fresh / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        hashes = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
        values = {"forge_bundle": VERSION, "parts": [asdict(part) for part in parts], "files": hashes}
        (fresh / NAME).write_text(json.dumps(values, indent=2) + "\n")
        fresh.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def read_bundle(folder: Path, policy: Policy) -> tuple[Part, ...]:
    """Return the parts of a bundle after its files are verified against the hashes from when it was written.

    Raises MalformedError if the bundle is malformed, IntegrityError if files are missing, changed or unexpected.
    """
    place = Place(str(folder), file=NAME)
    try:
        values = json.loads(read_small(folder / NAME, place, MAX_METADATA_BYTES) or b"null")
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{place}: is not JSON: {error}") from error
    expect(isinstance(values, dict) and values.get("forge_bundle") == VERSION, place, f"has no forge_bundle: {VERSION}")
    expect(set(values) == {"forge_bundle", "parts", "files"}, place, "needs the keys parts and files")
    files, parts = values["files"], values["parts"]
    is_listing = isinstance(files, dict) and all(isinstance(each, str) for each in files.values())
    expect(is_listing, place, "files must be an object of path → sha256")
    for path in files:
        expect(unsafe_path(path) is None, place, f"the path {path!r} {unsafe_path(path)}")
    expect(isinstance(parts, list), place, "parts must be a list")
    result = tuple(_part(values, files, place) for values in parts)
    contents = read_files(folder, Place(str(folder)), max_file_bytes=policy.max_file_bytes)
    contents.pop(NAME)
    pins = Pins({path: f"sha256:{sha}" for path, sha in files.items()}, f"the bundle ({NAME})", exact=True)
    check_pins(contents, pins, Place(str(folder)))
    return result


def _part(values: Any, files: Mapping[str, str], place: Place) -> Part:
    expect(isinstance(values, dict) and set(values) == set(Part.__dataclass_fields__), place, f"{values!r} is no part")
    manifest, kernels = values["manifest"], values["kernels"]
    expect(isinstance(manifest, str) and manifest in files, place, f"the manifest {manifest!r} is not among its files")
    expect(isinstance(values["repository"], bool), place, "repository must be true or false")
    pairs = isinstance(kernels, list) and all(isinstance(each, list) and len(each) == 2 for each in kernels)
    expect(pairs and all(isinstance(each, str) for pair in kernels for each in pair), place, "kernels must be pairs")
    return Part(manifest, values["repository"], tuple((op, name) for op, name in kernels))
