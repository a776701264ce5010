"""The errors in a manifest: all problems at once, each with its place and a suggestion."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from forge.hub.errors import HubError


@dataclass(frozen=True, order=True)
class Mark:
    """A place in a file; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, order=True)
class Problem:
    """A mistake in a manifest, and its place."""

    mark: Mark
    text: str

    def __str__(self) -> str:
        return f"{self.mark}: {self.text}"


class ManifestError(HubError, ValueError):
    """The error for an invalid manifest: `problems` holds all of its problems, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))


class InvalidText(ValueError):
    """The error for a text that does not match its grammar; the message is the reason."""


class Problems:
    """A collector of problems, so that reading goes on after the first."""

    def __init__(self) -> None:
        self.entries: list[Problem] = []

    def add(self, mark: Mark, text: str) -> None:
        """Add one more problem."""
        self.entries.append(Problem(mark, text))

    def raise_any(self) -> None:
        """Raise ManifestError if there are any problems."""
        if self.entries:
            raise ManifestError(self.entries)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'kernel_name'?", or an empty string if no known name is similar."""
    near = _near(name, choices)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _near(name: str, choices: Iterable[str]) -> list[str]:
    candidates = list(dict.fromkeys(choices))
    overloads = [other for other in candidates if other.startswith(name + ".")]
    if overloads:
        return overloads[:3]
    if "::" in name:
        return _near_operator(name, candidates)
    last = name.rpartition(".")[2]
    elsewhere = [other for other in candidates if other.endswith("." + last) and "::" not in other]
    if len(last) > 2 and elsewhere:
        return sorted(elsewhere, key=len)[:1]
    similar = [other for other in candidates if abs(len(other) - len(name)) <= 3]
    matches = difflib.get_close_matches(name, similar, n=1, cutoff=0.6)
    if not matches:
        matches = [other for other in similar if other.lower() == name.lower()][:1]
    return matches


def _near_operator(name: str, candidates: list[str]) -> list[str]:
    """Return the names similar to `ns::base.overload`: the bases are compared, and names with the same overload are
    preferred."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    bases: dict[str, list[str]] = {}
    for other in candidates:
        if other.startswith(namespace + "::"):
            bases.setdefault(other.partition("::")[2].partition(".")[0], []).append(other)
    similar = [other for other in bases if abs(len(other) - len(base)) <= 3]
    near = [other for match in difflib.get_close_matches(base, similar, n=3, cutoff=0.6) for other in bases[match]]
    if not near:
        elsewhere = [other for other in candidates if other.partition("::")[2] == rest]
        return difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.6)
    return sorted(near, key=lambda other: other.partition(".")[2] != overload)[:1]
