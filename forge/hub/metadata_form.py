"""The schema of metadata.json, and readable errors for a file that the library `kernels` refuses."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from forge.hub.variants import BACKENDS

REQUIRED = ("name", "id", "version", "license", "python-depends", "backend")
TYPES: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "id": (str, "a string"),
    "version": (int, "an integer"),
    "license": (str, "a string"),
    "python-depends": (list, "a list of strings"),
    "backend": (dict, "an object with type and archs"),
    "python-depends-backends": (dict, "an object of lists of strings"),
    "kernel-depends": (list, "a list of objects"),
    "kernels-minver": (str, "a string"),
    "upstream": (str, "a string"),
    "source": (str, "a string"),
    "digest": (dict, "an object with algorithm and files"),
    "provenance": (dict, "an object"),
    "build-info": (dict, "an object"),
}
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
ALGORITHMS = ("sha256", "sha512")
# the licenses that a repository of the Hub may declare, in lower case
LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license
    llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma grok2-community unknown other
    gpl-2.0-only gpl-2.0-or-later gpl-3.0-only gpl-3.0-or-later lgpl-2.1-only lgpl-2.1-or-later lgpl-3.0-only
    lgpl-3.0-or-later agpl-3.0-only agpl-3.0-or-later
    """.split()
)
_NULL = {"upstream", "source", "kernels-minver", "digest", "provenance"}  # may be null
_UNREAD = {"python-depends-backends", "build-info"}  # by the library, whatever they are
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_DEPENDENCY = {"repo-id": (str, "a string"), "version": (int, "an integer"), "revision": (str, "a string")}

Problem = tuple[str | None, str]  # the key that locates it, None for the whole file; the message


def fits(value: Any, kind: type) -> bool:
    """Return whether a JSON value is of a type; true and false are not integers."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def are_strings(value: Any) -> bool:
    """Return whether a JSON value is a list of strings."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ValueError for a duplicate key."""
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return values


def line_of(text: str, key: str | None) -> int:
    """Return the line of the first key of that name; 1 if it is absent."""
    lines = (number for number, line in enumerate(text.splitlines(), 1) if key is not None and f'"{key}"' in line)
    return next(lines, 1)


def first_problem(values: dict[str, Any], error: Exception) -> Problem:
    """Return the first problem of values that the library refused, or the library's message if forge finds none."""
    message = " ".join(str(error).removeprefix("Cannot parse metadata: ").split())
    return next(_problems(values), (None, f"is not accepted by the library kernels, which says: {message}"))


def _problems(values: dict[str, Any]) -> Iterator[Problem]:
    for key in REQUIRED:
        if key not in values:
            yield None, f"has no {key!r}, which must be {TYPES[key][1]}"
    for key, (kind, expectation) in TYPES.items():
        if key in values and key not in _UNREAD and not (values[key] is None and key in _NULL):
            strings = key != "python-depends" or are_strings(values[key])
            if not fits(values[key], kind) or not strings:
                yield _wrong(key, values[key], expectation)
            else:
                yield from _FORMS[key](values[key]) if key in _FORMS else ()


def _wrong(key: str, value: Any, expectation: str, inside: str = "", entry: int | None = None) -> Problem:
    """Return the problem of a value. inside: the top-level key whose object, or list's entry, contains the key."""
    where = f" of {f'entry {entry} of ' if entry else ''}{inside!r}" if inside else ""
    return inside or key, f"{key!r}{where} is {value!r}, but must be {expectation}"


def _name(value: str) -> Iterator[Problem]:
    if not NAME.fullmatch(value):
        expectation = "lower-case letters, digits and dashes, a letter first, no dash last, two or more of them"
        yield _wrong("name", value, expectation)


def _version(value: int, inside: str = "", entry: int | None = None) -> Iterator[Problem]:
    if value < 0 or value >= 1 << 64:
        yield _wrong("version", value, "an integer from 0 up", inside, entry)


def _backend(value: dict[str, Any]) -> Iterator[Problem]:
    if "type" not in value:
        yield "backend", "'backend' has no 'type', which must be the name of a backend"
    elif value["type"] not in BACKENDS:
        yield _wrong("type", value["type"], f"one of {', '.join(BACKENDS)}", "backend")
    if value.get("archs") is not None and not are_strings(value["archs"]):
        yield _wrong("archs", value["archs"], "a list of strings", "backend")


def _digest(value: dict[str, Any]) -> Iterator[Problem]:
    for key, expectation in {"algorithm": " or ".join(ALGORITHMS), "files": "an object of strings"}.items():
        if key not in value:
            yield "digest", f"'digest' has no {key!r}, which must be {expectation}"
    if value.get("algorithm") not in ALGORITHMS:
        yield _wrong("algorithm", value.get("algorithm"), " or ".join(ALGORITHMS), "digest")
    if not isinstance(value.get("files"), dict) or not are_strings([*value["files"].values()]):
        yield _wrong("files", value.get("files"), "an object of strings", "digest")


def _dependencies(value: list[Any]) -> Iterator[Problem]:
    key = "kernel-depends"
    for number, each in enumerate(value, 1):
        if not isinstance(each, dict):
            yield _wrong(key, value, "a list of objects")
            continue
        if "repo-id" not in each:
            yield key, f"entry {number} of {key!r} has no 'repo-id', which must be a string"
        for name in sorted(each.keys() - _DEPENDENCY.keys()):
            yield key, f"{name!r} is no key of entry {number} of {key!r}; those are {', '.join(_DEPENDENCY)}"
        for name, (kind, expectation) in _DEPENDENCY.items():
            if each.get(name) is not None and not fits(each[name], kind):
                yield _wrong(name, each[name], expectation, key, number)
            elif name == "version" and each.get(name) is not None:
                yield from _version(each[name], key, number)
        if (each.get("version") is None) == (each.get("revision") is None):
            yield key, f"entry {number} of {key!r} must have either 'version' or 'revision'"


def _minver(value: str) -> Iterator[Problem]:
    if not _VERSION.fullmatch(value):
        yield _wrong("kernels-minver", value, 'three numbers with dots between them, such as "0.17.0"')


_FORMS: dict[str, Callable[[Any], Iterator[Problem]]] = {
    "name": _name,
    "version": _version,
    "backend": _backend,
    "digest": _digest,
    "kernel-depends": _dependencies,
    "kernels-minver": _minver,
}
