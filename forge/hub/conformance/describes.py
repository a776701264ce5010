"""The requirements on metadata.json: the schema, name, id, version, license, backend, dependencies and digest."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from forge.hub import compat
from forge.hub.conformance.repository import Finding, Repository, Variant
from forge.hub.errors import HubError, Place
from forge.hub.files import check_pins, digest_pins
from forge.hub.metadata_form import ALGORITHMS, LICENSES, NAME, REQUIRED, TYPES, are_strings, first_problem, fits
from forge.hub.variants import BACKENDS

Check = Callable[[Repository, Variant, Any], Iterator[Finding]]
Requirement = Callable[[Repository], Iterator[Finding]]
ARCH = {"cuda": re.compile(r"\d+\.\d+[af]?(\+PTX)?"), "rocm": re.compile(r"gfx[0-9a-f]+")}


def _of_each(key: str, kind: type) -> Callable[[Check], Requirement]:
    """Return a decorator for a check of one value of metadata.json, called for each variant that has it in its type."""

    def decorate(check: Check) -> Requirement:
        @wraps(check)
        def requirement(repository: Repository) -> Iterator[Finding]:
            for variant in repository.variants:
                if (value := variant.value(key, kind)) is not None:
                    yield from check(repository, variant, value)

        return requirement

    return decorate


def schema(repository: Repository) -> Iterator[Finding]:
    """Require that metadata.json exists, is a JSON object, and has exactly the required and optional keys in their
    types."""
    for variant in repository.variants:
        if variant.is_source:
            continue
        if variant.metadata_problem is not None:
            line, text = variant.metadata_problem
            yield variant.finding("metadata", text, "metadata.json", line)
        elif variant.values is None:
            yield variant.finding("metadata", "has no metadata.json")
        else:
            problems = list(_schema(variant, variant.values))
            yield from problems or _of_library(variant, variant.values, list(_others(variant, repository)))


def _schema(variant: Variant, values: Mapping[str, Any]) -> Iterator[Finding]:
    if missing := [key for key in REQUIRED if key not in values and key != "python-depends"]:
        yield variant.of_metadata("metadata", f"lacks {', '.join(missing)}")
    for key, value in values.items():
        if key not in TYPES:
            yield variant.of_metadata("metadata", f"{key!r} is no key of it", key)
            continue
        kind, description = TYPES[key]
        good = fits(value, kind) and (key != "python-depends" or are_strings(value))
        if not good or (key == "python-depends-backends" and not all(map(are_strings, value.values()))):
            yield variant.of_metadata("metadata", f"{key!r} is {value!r}, but must be {description}", key)


def _others(variant: Variant, repository: Repository) -> Iterator[Finding]:
    """Yield the problems that the other requirements find in this variant, which the library would report again."""
    alone = Repository(repository.folder, [variant], repository.policy, repository.name)
    for requirement in OF_METADATA:
        yield from requirement(alone)


def _of_library(variant: Variant, values: dict[str, Any], others: list[Finding]) -> Iterator[Finding]:
    """Yield the problems that the `kernels` library, which reads the file on every load, reports beyond all these."""
    lenient = {"python-depends-backends", "build-info"} & values.keys()
    if others or lenient or "python-depends" not in values:
        return
    try:
        compat.parse_metadata((variant.metadata_text or "").encode())
    except (ValueError, TypeError) as error:
        key, text = first_problem(values, error)
        yield variant.of_metadata("metadata", text, key)


@_of_each("name", str)
def kernel_name(repository: Repository, variant: Variant, name: str) -> Iterator[Finding]:
    """Require that the name is lower-case words joined by dashes, and the same for all variants."""
    first = repository.first("name", str)
    if not NAME.fullmatch(name):
        yield variant.of_metadata("name", f"{name!r} must match {NAME.pattern}", "name")
    elif repository.name is not None and name.replace("-", "_") != repository.name.lower().replace("-", "_"):
        yield variant.of_metadata("name", f"is {name!r}, but the repository is {repository.name!r}", "name")
    elif first != name:
        yield variant.of_metadata("name", f"is {name!r}, but {first!r} in another variant", "name")


@_of_each("id", str)
def kernel_id(repository: Repository, variant: Variant, id: str) -> Iterator[Finding]:
    """Require that the id is a valid module name, and shadows no module that a kernel imports."""
    if not id.isidentifier() or not id.isascii():
        yield variant.of_metadata("id", f"{id!r} is not the name of a Python module", "id")
    elif id in sys.stdlib_module_names or id in {"torch", "triton", "kernels"}:
        yield variant.of_metadata("id", f"{id!r} shadows the module of that name", "id")


@_of_each("version", int)
def kernel_version(repository: Repository, variant: Variant, version: int) -> Iterator[Finding]:
    """Require that the version is a number from 0, the same for all variants of a branch."""
    if version < 0:
        yield variant.of_metadata("version", f"is {version}, but must be 0 or more", "version")
    elif version != (first := repository.first("version", int)):
        yield variant.of_metadata("version", f"is {version}, but {first} in another variant", "version")


@_of_each("license", str)
def kernel_license(repository: Repository, variant: Variant, license: str) -> Iterator[Finding]:
    """Require that the license is one of the identifiers that the Hub knows."""
    if license.lower() not in LICENSES:
        yield variant.of_metadata("license", f"{license!r} is not a license identifier of the Hub", "license")


@_of_each("backend", dict)
def backend(repository: Repository, variant: Variant, values: dict[str, Any]) -> Iterator[Finding]:
    """Require that the backend is a known one, is the one in the folder's name, and lists its architectures if it has
    compiled code."""
    kind, archs, folder_backend = values.get("type"), values.get("archs"), variant.named_backend
    if not isinstance(kind, str) or kind not in BACKENDS:
        yield variant.of_metadata("backend", f"the type {kind!r} is none of {', '.join(BACKENDS)}", "type")
    elif folder_backend is not None and kind != folder_backend:
        yield variant.of_metadata("backend", f"is {kind}, but the variant's name says {folder_backend}", "type")
    elif archs is not None and not are_strings(archs):
        yield variant.of_metadata("archs", f"archs is {archs!r}, but must be a list of strings", "archs")
    elif kind in ARCH and not archs and variant.native and not variant.is_noarch:
        yield variant.of_metadata("archs", f"a native build for {kind} must list its architectures", "backend")
    elif wrong := [each for each in archs or () if kind in ARCH and not ARCH[kind].fullmatch(each)]:
        yield variant.of_metadata("archs", f"{wrong[0]!r} is no architecture of {kind}", "archs")
    if extra := values.keys() - {"type", "archs"}:
        yield variant.of_metadata("metadata", f"'backend' has no key {min(extra)!r}", min(extra))


def dependencies(repository: Repository) -> Iterator[Finding]:
    """Require that Python dependencies are those that the Hub allows, for all backends or for one."""
    for variant in repository.variants:
        own = variant.backend or "cpu"
        for name in variant.value("python-depends", list) or ():
            yield from _dependency(variant, name, own)
        for kind, names in (variant.value("python-depends-backends", dict) or {}).items():
            if kind not in BACKENDS:
                yield variant.of_metadata("python-depends", f"{kind!r} is no backend", kind)
                continue
            for name in names if isinstance(names, list) else ():
                yield from _dependency(variant, name, kind)


def _dependency(variant: Variant, name: Any, kind: str) -> Iterator[Finding]:
    allowed = compat.python_dependencies(kind)
    if isinstance(name, str) and name not in allowed:
        text = f"{name!r} is not allowed on {kind}; allowed: {', '.join(sorted(allowed))}"
        yield variant.of_metadata("python-depends", text, name)


@_of_each("digest", dict)
def digest(repository: Repository, variant: Variant, values: dict[str, Any]) -> Iterator[Finding]:
    """Require that the digest, if present, matches the files: `forge kernels lock` requires the same."""
    algorithm, files = values.get("algorithm"), values.get("files")
    if algorithm not in ALGORITHMS:
        yield variant.of_metadata("digest", f"{algorithm!r} is neither sha256 nor sha512", "algorithm")
    elif not isinstance(files, dict) or not are_strings(list(files.values())):
        yield variant.of_metadata("digest", "files must be an object of strings", "files")
    else:
        place = Place(variant.name)
        try:
            check_pins(variant.files, digest_pins(algorithm, files, place), place)
        except (HubError, ValueError, OSError) as error:
            text = " ".join(str(error).removeprefix(f"{place}: ").split())
            yield variant.of_metadata("digest", text, "digest")


OF_METADATA = (kernel_name, kernel_id, kernel_version, kernel_license, backend, dependencies, digest)
REQUIREMENTS = (schema, *OF_METADATA)
