"""Whether a repository meets the Hub's requirements: one function for each, one finding for each place that does not.

Nothing of a repository is executed: its files are read and its Python is parsed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from forge.hub.conformance import describes, layers, layout, native, operators, python
from forge.hub.conformance.finding import Finding
from forge.hub.conformance.repository import Repository, read_repository
from forge.hub.policy import Policy

__all__ = ["REQUIREMENTS", "Finding", "Repository", "check_repository"]

REQUIREMENTS: tuple[Callable[[Repository], Iterator[Finding]], ...] = (
    *layout.REQUIREMENTS,
    *describes.REQUIREMENTS,
    *python.REQUIREMENTS,
    *native.REQUIREMENTS,
    *operators.REQUIREMENTS,
    *layers.REQUIREMENTS,
)


def check_repository(
    folder: Path, *, policy: Policy | None = None, name: str | None = None, blobs: Path | None = None
) -> list[Finding]:
    """Every finding of a repository, its build/ folder or one variant, in the order of files and lines.

    policy: its `imports` are allowed beside the Hub's, and its `max_file_bytes` holds. name: what the repository is
    called on the Hub. blobs: where links of its files may lead.
    """
    repository = read_repository(folder, policy=policy or Policy(), name=name, blobs=blobs)
    return sorted({finding for requirement in REQUIREMENTS for finding in requirement(repository)})
