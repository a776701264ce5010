"""The view of a repository that checks get: its variants, their files, metadata and parsed Python; and findings."""

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from forge.hub import compat
from forge.hub.errors import HubError, Place
from forge.hub.files import MANIFEST, NATIVE, File, read_files, read_small
from forge.hub.manifest.parse import MAX_BYTES
from forge.hub.metadata_form import fits, line_of, unique_keys
from forge.hub.policy import Policy
from forge.hub.variants import BACKENDS

SOURCES = "torch-ext"
NOARCH = ("cpu", "cuda", "metal", "npu", "neuron", "rocm", "tpu", "xpu", "universal")
PLATFORMS = ("x86_64", "aarch64", "arm64")
SYSTEMS = ("linux", "darwin", "windows")


@dataclass(frozen=True, order=True)
class Finding:
    """A violation or a recommendation. file: the path in the repository; line: from 1, or 0 for the whole file.

    requirement: the short name of the requirement, as docs/reference/checking-a-kernel.md lists them.
    """

    file: str
    line: int
    requirement: str
    text: str
    advice: bool = False

    def __str__(self) -> str:
        """Return one line with control characters escaped: a file's name may hold characters that a terminal
        interprets."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return escape(f"{where}: {self.requirement}: {self.text}{' (advice)' if self.advice else ''}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def escape(text: str) -> str:
    """Return the text with control characters and lone surrogates escaped as in Python."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@dataclass(frozen=True)
class Python:
    """A Python file. tree: its AST, or None if it does not parse; problem: the parser's message and the line."""

    path: str
    text: str
    tree: ast.Module | None
    problem: tuple[int, str] = (0, "")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if self.tree is not None else []


@dataclass
class Variant:
    """A folder below build/, or the Python sources of a repository that is not built (is_source).

    path: the folder in the repository. values: the object in metadata.json, None if it is missing or unreadable.
    """

    name: str
    path: str
    files: Mapping[str, File]
    is_source: bool = False
    metadata_text: str | None = None
    values: dict[str, Any] | None = None
    metadata_problem: tuple[int, str] | None = None
    python: dict[str, Python] = field(default_factory=dict)

    def finding(self, requirement: str, text: str, file: str = "", line: int = 0, advice: bool = False) -> Finding:
        path = "/".join(part for part in (self.path, file) if part)
        return Finding(path, line, requirement, text, advice)

    def of_metadata(self, requirement: str, text: str, key: str | None = None) -> Finding:
        """Return a finding in metadata.json, located at the line of a key."""
        return self.finding(requirement, text, "metadata.json", line_of(self.metadata_text or "", key))

    def value(self, key: str, kind: type) -> Any:
        """Return a value of metadata.json if it has this type, else None."""
        value = (self.values or {}).get(key)
        return value if fits(value, kind) else None

    @property
    def backend(self) -> str | None:
        """The backend in the metadata, else in the folder's name."""
        backend = self.value("backend", dict) or {}
        backend = backend.get("type")
        return backend if isinstance(backend, str) and backend in BACKENDS else self.named_backend

    @property
    def named_backend(self) -> str | None:
        """The backend in the folder's name; None for a universal one, and for an invalid name."""
        parts = self.name.split("-")
        part = parts[1] if self.is_noarch and len(parts) == 2 else parts[-3] if len(parts) > 3 else ""
        stem = {"cu": "cuda", "npu": "cann"}.get(re.sub(r"\d+$", "", part), re.sub(r"\d+$", "", part))
        return stem if stem in BACKENDS else None

    @property
    def is_noarch(self) -> bool:
        return self.is_source or (self.name.startswith("torch-") and not self.name.startswith("torch-stable-abi"))

    @property
    def native(self) -> list[str]:
        return [path for path in self.files if path.endswith(NATIVE)]

    @property
    def root(self) -> str | None:
        """The folder of the package: "" for the flat layout, the inner folder of the older one; None for neither."""
        if "__init__.py" in self.files:
            return ""
        inner = [path.split("/")[0] for path in self.files if path.count("/") == 1 and path.endswith("/__init__.py")]
        return inner[0] if len(inner) == 1 else None


@dataclass
class Repository:
    """A repository to check. folder: its path. name: its name on the Hub, if known. policy: the user's policy.

    is_folder: whether it is a local folder, which has its own files besides the variants.
    """

    folder: Path
    variants: list[Variant]
    policy: Policy
    name: str | None = None
    unreadable: list[Finding] = field(default_factory=list)
    is_folder: bool = True

    def first(self, key: str, kind: type) -> Any:
        """Return the first of the variants' values under a key of metadata.json."""
        values = (each.value(key, kind) for each in self.variants)
        return next((value for value in values if value is not None), None)

    def python(self) -> Iterator[tuple[Variant, Python, ast.Module]]:
        """Yield every Python file that parses, with its variant and its AST."""
        for variant in self.variants:
            for each in variant.python.values():
                if each.tree is not None:
                    yield variant, each, each.tree


def read_repository(
    folder: Path,
    *,
    policy: Policy,
    name: str | None = None,
    blobs: Path | None = None,
    only: Collection[str] | None = None,
) -> Repository:
    """Read a repository, its build/ folder or one variant; findings for unreadable files are in `unreadable`. Executes
    nothing.

    blobs: the folder that links may lead to, besides the repository itself. only: the variants to read, all by default.
    """
    folder = folder.resolve()
    repository = Repository(folder, [], policy, name, is_folder=blobs is None)
    for path in _variant_folders(folder):
        if only is not None and path.name not in only:
            continue
        place = Place(path.name)
        below = path.relative_to(folder).as_posix()
        try:
            if not path.resolve().is_relative_to(folder):
                repository.unreadable.append(Finding(below, 0, "files", f"is a link to {path.resolve()}, outside"))
                continue
            files = read_files(path, place, max_file_bytes=policy.max_file_bytes, links_into=blobs)
        except HubError as error:
            repository.unreadable.append(Finding(below, 0, "files", _short(error, place)))
            continue
        is_source = path.parent.name == SOURCES
        variant = Variant(path.name if not is_source else "sources", "" if below == "." else below, files, is_source)
        _read_metadata(variant)
        variant.python = {each: _parse(each, file.content) for each, file in files.items() if file.content is not None}
        repository.variants.append(variant)
    if repository.is_folder:  # of a Hub repository, only variants are fetched
        repository.unreadable += _unread_manifest(folder)
    return repository


def _unread_manifest(folder: Path) -> Iterator[Finding]:
    """Yield a finding if the manifest at the root of a folder, which is locked with it, cannot be read."""
    place = Place(str(folder), file=MANIFEST)
    try:
        read_small(folder / MANIFEST, place, MAX_BYTES, within=folder)
    except HubError as error:
        yield Finding(MANIFEST, 0, "files", _short(error, place))


def _short(error: HubError, place: Place) -> str:
    return str(error).removeprefix(f"{place}: ").replace("\n", " ")


def _variant_folders(folder: Path) -> list[Path]:
    """Return the variant folders in build/, those in the folder, the folder itself, or the sources in torch-ext/; the
    first that exist."""
    if (folder / "build").is_dir():
        return _folders(folder / "build")
    if variants := [each for each in _folders(folder) if variant_problem(each.name) is None]:
        return variants
    if any((folder / name).is_file() for name in ("__init__.py", "metadata.json")):
        return [folder]
    return _folders(folder / SOURCES) if (folder / SOURCES).is_dir() else []


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "_")))


def variant_problem(name: str) -> str | None:
    """Return the reason why a folder's name is not that of a variant, or None."""
    try:
        compat.parse_variant(name)
    except (ValueError, TypeError) as error:
        return str(error)
    parts = name.split("-")
    if name.startswith("torch-") and not name.startswith("torch-stable-abi"):
        is_known = len(parts) == 2 and parts[1] in NOARCH
        return None if is_known else f"{name.removeprefix('torch-')!r} is none of {', '.join(NOARCH)}"
    if parts[-2] not in PLATFORMS:
        return f"the processor {parts[-2]!r} is none of {', '.join(PLATFORMS)}"
    return None if parts[-1] in SYSTEMS else f"the system {parts[-1]!r} is none of {', '.join(SYSTEMS)}"


def _read_metadata(variant: Variant) -> None:
    file = variant.files.get("metadata.json")
    if file is None:
        return
    try:
        variant.metadata_text = file.read().decode()
        values = json.loads(variant.metadata_text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        variant.metadata_problem = (error.lineno, f"is not JSON: {error.msg}")
    except (OSError, ValueError, RecursionError) as error:
        variant.metadata_problem = (1, f"is not JSON: {str(error) or type(error).__name__}")
    else:
        if isinstance(values, dict):
            variant.values = values
        else:
            variant.metadata_problem = (1, f"is a JSON {type(values).__name__}, but must be an object")


def _parse(path: str, content: bytes) -> Python:
    """Parse bytes as Python reads a file: without a byte order mark, in the declared encoding."""
    text = content.decode(errors="replace")
    try:
        text = _decode(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"is not Python: the byte {content[error.start]:#x} is not {error.encoding}; save the file as UTF-8"
        return Python(path, text, None, (line, problem))
    except (LookupError, ValueError):
        pass  # a coding line with an unknown encoding, which parsing refuses
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
            sum(1 for _ in ast.walk(tree))
    except SyntaxError as error:
        return Python(path, text, None, (error.lineno or 1, f"is not Python: {error.msg}"))
    except (ValueError, RecursionError, MemoryError) as error:
        return Python(path, text, None, (1, f"is not Python: {str(error) or type(error).__name__}"))
    return Python(path, text, tree)


def _decode(content: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError:
        encoding = "utf-8"
    return content.decode(encoding)
