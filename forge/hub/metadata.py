"""The reader of metadata.json in its current form, its earlier form, or absent."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from forge.hub import compat
from forge.hub.errors import MalformedError, NotFoundError, Place
from forge.hub.files import MAX_METADATA_BYTES, Pins, digest_pins, read_small
from forge.hub.metadata_form import are_strings, first_problem, line_of, unique_keys


@dataclass(frozen=True)
class KernelDependency:
    """Another kernel that a kernel requests while it is imported."""

    repository: str
    version: int | None
    revision: str | None


@dataclass(frozen=True)
class Metadata:
    """A variant's metadata.json. The file has no operators, dtypes, shapes or gradients.

    form: the published form. name: the kernel's, with dashes; the repository's if the file has none. python_depends:
    names from the Hub's list of allowed dependencies, those for this backend included.
    archs: the device architectures of a native build. digest: the declared hashes of the files. sha256: of the file.
    """

    form: Literal["current", "earlier", "none"]
    name: str
    id: str | None = None
    version: int | None = None
    license: str | None = None
    python_depends: tuple[str, ...] = ()
    kernel_depends: tuple[KernelDependency, ...] = ()
    backend: str | None = None
    archs: tuple[str, ...] = ()
    digest: Pins | None = None
    sha256: str | None = field(default=None, compare=False)


def read_metadata(folder: Path, place: Place, *, name: str, backend: str, links_into: Path | None = None) -> Metadata:
    """Read the metadata of a variant's folder; `name` is the kernel's if the file has none.

    Raises: MalformedError if the file has neither published form; NotFoundError if it needs a newer `kernels`.
    """
    place = place.at("metadata.json")
    content = read_small(folder / "metadata.json", place, MAX_METADATA_BYTES, links_into=links_into)
    if content is None:
        return Metadata("none", name)
    metadata = _parse(content, place, name, backend)
    return replace(metadata, sha256=hashlib.sha256(content).hexdigest())


def _parse(content: bytes, place: Place, name: str, backend: str) -> Metadata:
    values = _json_object(content, place)
    backend_depends = _backend_depends(values, backend, place)
    if {"name", "id", "backend"} & values.keys():
        return _current(content, values, backend_depends, place)
    return Metadata(
        "earlier",
        name,
        version=_value(values, "version", lambda each: type(each) is int, "an integer", None, place),
        license=_value(values, "license", lambda each: isinstance(each, str), "a string", None, place),
        python_depends=(*_strings(values, "python-depends", place), *backend_depends),
    )


def _json_object(content: bytes, place: Place) -> dict[str, Any]:
    try:
        values = json.loads(content, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{place}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise MalformedError(f"{place}: is a JSON {type(values).__name__}, but must be an object")
    return values


def _current(content: bytes, values: dict[str, Any], backend_depends: tuple[str, ...], place: Place) -> Metadata:
    try:
        parsed = compat.parse_metadata(content)
    except ValueError as error:
        key, text = first_problem(values, error)
        line = f"line {line_of(content.decode(errors='replace'), key)}: " if key is not None else ""
        raise MalformedError(f"{place}: {line}{text}") from error
    if parsed.kernels_minver is not None and compat.newer_than_installed(parsed.kernels_minver):
        raise NotFoundError(f"{place}: needs kernels>={parsed.kernels_minver}: pip install --upgrade kernels")
    return Metadata(
        "current",
        str(parsed.name),
        id=parsed.id,
        version=parsed.version,
        license=parsed.license,
        python_depends=(*parsed.python_depends, *backend_depends),
        kernel_depends=tuple(KernelDependency(*compat.kernel_dependency(each)) for each in parsed.kernel_depends),
        backend=str(parsed.backend.backend_type),
        archs=tuple(parsed.backend.archs or ()),
        digest=digest_pins(str(parsed.digest.algorithm).lower(), parsed.digest.files, place) if parsed.digest else None,
    )


def _backend_depends(values: dict[str, Any], backend: str, place: Place) -> tuple[str, ...]:
    """Return the dependencies in `python-depends-backends` for the active backend; `kernels` itself ignores the key."""
    by_backend = _value(
        values, "python-depends-backends", lambda each: isinstance(each, dict), "an object of lists", {}, place
    )
    for name in by_backend:
        _strings(by_backend, name, place)
    return _strings(by_backend, backend, place)


def _strings(values: dict[str, Any], key: str, place: Place) -> tuple[str, ...]:
    return tuple(_value(values, key, are_strings, "a list of strings", [], place))


def _value(
    values: dict[str, Any], key: str, accepts: Callable[[Any], bool], expectation: str, default: Any, place: Place
) -> Any:
    value = values.get(key, default)
    if key in values and not accepts(value):
        raise MalformedError(f"{place}: {key!r} is {value!r}, but must be {expectation}")
    return value


def dependency_modules(metadata: Metadata, backend: str, place: Place) -> tuple[str, ...]:
    """Return the modules that the declared Python dependencies provide.

    Raises: MalformedError for a dependency that the Hub does not allow; NotFoundError for one that is not installed.
    """
    allowed = compat.python_dependencies(backend)
    modules = []
    for name in metadata.python_depends:
        if name not in allowed:
            raise MalformedError(
                f"{place}: depends on {name!r}, which the Hub does not allow on {backend}; allowed: {sorted(allowed)}"
            )
        for package, module in allowed[name]:
            if module is not None and importlib.util.find_spec(module) is None:
                raise NotFoundError(f"{place}: needs the package {package}: pip install {package}")
            modules += [module] if module is not None else []
    return tuple(modules)
