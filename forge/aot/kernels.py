"""The kernels of repositories that a program runs, as members of its file."""

from collections.abc import Iterable

from forge.aot.entry import CompiledEntry


def bundle_members(entries: Iterable[CompiledEntry]) -> dict[str, bytes]:
    return {}
