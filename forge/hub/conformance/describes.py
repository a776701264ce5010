"""Requirements on metadata.json: the schema, name, id, version, license, backend, dependencies and digest."""

import re
import sys
from collections.abc import Iterator
from typing import Any

from forge.hub import compat
from forge.hub.conformance.finding import Finding
from forge.hub.conformance.licenses import LICENSES
from forge.hub.conformance.repository import Repository, Variant
from forge.hub.errors import HubError, Place
from forge.hub.files import check_pins, digest_pins
from forge.hub.metadata_form import ALGORITHMS, NAME, REQUIRED, TYPES, are_strings, fits, refused
from forge.hub.variants import BACKENDS

ARCH = {"cuda": re.compile(r"\d+\.\d+[af]?(\+PTX)?"), "rocm": re.compile(r"gfx[0-9a-f]+")}


def _described(repository: Repository) -> Iterator[Variant]:
    """The variants whose metadata can be read."""
    yield from (each for each in repository.variants if each.values is not None)


def schema(repository: Repository) -> Iterator[Finding]:
    """metadata.json is there, is a JSON object, has what it must have in its types, and nothing else."""
    for variant in repository.variants:
        if variant.is_source:
            continue
        if variant.metadata_problem is not None:
            line, text = variant.metadata_problem
            yield variant.finding("metadata", text, "metadata.json", line)
        elif variant.values is None:
            yield variant.finding("metadata", "has no metadata.json")
        else:
            found = list(_schema(variant))
            yield from found or _of_library(variant, list(_others(variant, repository)))


def _schema(variant: Variant) -> Iterator[Finding]:
    values = variant.values
    if missing := [key for key in REQUIRED if key not in values and key != "python-depends"]:
        yield variant.of_metadata("metadata", f"lacks {', '.join(missing)}")
    for key, came in values.items():
        if key not in TYPES:
            yield variant.of_metadata("metadata", f"{key!r} is no key of it", key)
            continue
        kind, wanted = TYPES[key]
        good = fits(came, kind)
        if good and key == "python-depends":
            good = are_strings(came)
        if good and key == "python-depends-backends":
            good = all(are_strings(each) for each in came.values())
        if not good:
            yield variant.of_metadata("metadata", f"{key!r} is {came!r}, but must be {wanted}", key)


def _others(variant: Variant, repository: Repository) -> Iterator[Finding]:
    """What the requirements below say of this variant: the library's own complaint would be about the same."""
    alone = Repository(repository.folder, [variant], repository.policy, repository.name)
    for requirement in REQUIREMENTS:
        if requirement is not schema:
            yield from requirement(alone)


def _of_library(variant: Variant, others: list[Finding]) -> Iterator[Finding]:
    """What the `kernels` library, which reads the file on every load, does not accept beyond all this."""
    lenient = {"python-depends-backends", "build-info"} & variant.values.keys()
    if others or lenient or "python-depends" not in variant.values:
        return
    try:
        compat.parse_metadata((variant.metadata_text or "").encode())
    except (ValueError, TypeError) as error:
        key, text = refused(variant.values, error)
        yield variant.of_metadata("metadata", text, key)


def kernel_name(repository: Repository) -> Iterator[Finding]:
    """The name is lower-case words joined by dashes, and one for all variants."""
    first: str | None = None
    for variant in _described(repository):
        name = variant.value("name", str)
        if name is None:
            continue
        if not NAME.fullmatch(name):
            yield variant.of_metadata("name", f"{name!r} must match {NAME.pattern}", "name")
        elif repository.name is not None and name.replace("-", "_") != repository.name.lower().replace("-", "_"):
            yield variant.of_metadata("name", f"is {name!r}, but the repository is {repository.name!r}", "name")
        elif first not in (None, name):
            yield variant.of_metadata("name", f"is {name!r}, but {first!r} in another variant", "name")
        first = first or name


def kernel_id(repository: Repository) -> Iterator[Finding]:
    """The id is the name of a Python module, and shadows none that a kernel imports."""
    for variant in _described(repository):
        given = variant.value("id", str)
        if given is None:
            continue
        if not given.isidentifier() or not given.isascii():
            yield variant.of_metadata("id", f"{given!r} is not the name of a Python module", "id")
        elif given in sys.stdlib_module_names or given in {"torch", "triton", "kernels"}:
            yield variant.of_metadata("id", f"{given!r} shadows the module of that name", "id")


def kernel_version(repository: Repository) -> Iterator[Finding]:
    """The version is a number from 0, one for all variants of a branch."""
    first: int | None = None
    for variant in _described(repository):
        version = variant.value("version", int)
        if version is None:
            continue
        if version < 0:
            yield variant.of_metadata("version", f"is {version}, but must be 0 or more", "version")
        elif first not in (None, version):
            yield variant.of_metadata("version", f"is {version}, but {first} in another variant", "version")
        first = version if first is None else first


def kernel_license(repository: Repository) -> Iterator[Finding]:
    """The license is one of the identifiers that the Hub knows."""
    for variant in _described(repository):
        given = variant.value("license", str)
        if given is not None and given.lower() not in LICENSES:
            yield variant.of_metadata("license", f"{given!r} is not a license identifier of the Hub", "license")


def backend(repository: Repository) -> Iterator[Finding]:
    """The backend is a known one, the one in the folder's name, and lists its architectures if code was compiled."""
    for variant in _described(repository):
        given = variant.value("backend", dict)
        if given is None:
            continue
        kind, archs, named = given.get("type"), given.get("archs"), variant.named_backend
        if not isinstance(kind, str) or kind not in BACKENDS:
            yield variant.of_metadata("backend", f"the type {kind!r} is none of {', '.join(BACKENDS)}", "type")
        elif named is not None and kind != named:
            yield variant.of_metadata("backend", f"is {kind}, but the variant's name says {named}", "type")
        elif archs is not None and not are_strings(archs):
            yield variant.of_metadata("archs", f"archs is {archs!r}, but must be a list of strings", "archs")
        elif kind in ARCH and not archs and variant.native and not variant.is_noarch:
            yield variant.of_metadata("archs", f"a native build for {kind} must list its architectures", "backend")
        else:
            wrong = [each for each in archs or () if kind in ARCH and not ARCH[kind].fullmatch(each)]
            if wrong:
                yield variant.of_metadata("archs", f"{wrong[0]!r} is no architecture of {kind}", "archs")
        if extra := given.keys() - {"type", "archs"}:
            yield variant.of_metadata("metadata", f"'backend' has no key {min(extra)!r}", min(extra))


def dependencies(repository: Repository) -> Iterator[Finding]:
    """Python dependencies are those that the Hub allows, for all backends or for one."""
    for variant in _described(repository):
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


def digest(repository: Repository) -> Iterator[Finding]:
    """The digest, where there is one, is that of the files: what `forge kernels lock` asks too."""
    for variant in _described(repository):
        given = variant.value("digest", dict)
        if given is None:
            continue
        algorithm, files = given.get("algorithm"), given.get("files")
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


REQUIREMENTS = (
    schema,
    kernel_name,
    kernel_id,
    kernel_version,
    kernel_license,
    backend,
    dependencies,
    digest,
)
