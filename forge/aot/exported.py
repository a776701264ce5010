"""Exported: entry points that were compiled, to be written to one file."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge.aot import archive
from forge.aot.entry_point import AOTINDUCTOR, CompiledEntry
from forge.aot.errors import ExportError
from forge.aot.kernels import bundle_files
from forge.aot.requirements import requirements
from forge.aot.signature import Signature
from forge.aot.weights import WeightWriter
from forge.executors.hubex import HubExecutor
from forge.hub import HubError

KERNELS = "data/forge/kernels/"


class Exported:
    """The result of forge.export: programs that `save` writes to one file.

    Attributes:
        entry_points: The signature of each entry point, by name.
    """

    def __init__(self, entries: Mapping[str, CompiledEntry]) -> None:
        self._entries = dict(entries)
        self.entry_points = {name: each.signature for name, each in self._entries.items()}
        self._members = _kernel_members(self._entries.values())
        weights = WeightWriter()  # now: the model's may change
        described = {name: self._add(name, each, weights) for name, each in self._entries.items()}
        self._members |= weights.members()
        device = next((each.device for each in self._entries.values() if each.device != "cpu"), "cpu")
        forms = {each.form for each in self._entries.values()}
        self._index = {"requires": requirements(device, forms), "entries": described}

    def _add(self, name: str, entry: CompiledEntry, weights: WeightWriter) -> dict[str, Any]:
        """Add the members of an entry point, and return its description."""
        folder = f"data/aotinductor/{name}" if entry.form == AOTINDUCTOR else f"data/forge/{name}"
        self._members |= {f"{folder}/{file}": content for file, content in entry.files.items()}
        self._members[f"data/forge/{name}/program.py"] = entry.text.encode()
        return {
            "form": entry.form,
            "reason": entry.reason,
            "signature": entry.signature.as_json(),
            "weights": [
                [own, weights.add(_readable(own), tensor, changes=changes)] for own, tensor, changes in entry.weights
            ],
            "claims": entry.claims,
            "executors": [None if isinstance(each, HubExecutor) else each.name for each in entry.executors],
            "data": entry.data,
        }

    def __str__(self) -> str:
        return "\n".join(
            describe(name, each.form, each.reason, each.claims, each.signature) for name, each in self._entries.items()
        )

    def program(self, entry_point: str | None = None) -> str:
        """Return the program of an entry point as Python."""
        return self._entries[entry_point or next(iter(self._entries))].text

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the programs and their weights to a file, whole or not at all.

        Args:
            path: The file, which ends with ".pt2" as torch's packages do.

        Returns:
            The digest of the file, which forge.load compares where it is given.

        Raises:
            ExportError: If the path does not end with ".pt2", or its folder does not exist.
        """
        if Path(path).suffix != ".pt2":
            raise ExportError(f"forge.export: {path} must end with .pt2")
        if not Path(path).parent.is_dir():
            raise ExportError(f"forge.export: {path} is in a folder that does not exist")
        return archive.write(path, self._index, self._members)


def _kernel_members(entries: Iterable[CompiledEntry]) -> dict[str, bytes]:
    """Return the members that hold the kernels of repositories. Raises ExportError for one that has no files."""
    try:
        files = bundle_files(kernel for each in entries for kernel in each.kernels)
    except (ValueError, NotImplementedError, HubError) as error:
        raise ExportError(str(error)) from error
    return {f"{KERNELS}{name}": content for name, content in files.items()}


def _readable(name: str) -> str:
    return name.removeprefix("p_").removeprefix("b_").removeprefix("c_")


def describe(name: str, form: str, reason: str | None, claims: Mapping[str, int], signature: Signature) -> str:
    """Return an entry point in words: its form, the number of calls by executor, and what it takes."""
    calls = ", ".join(f"{executor} {count}" for executor, count in claims.items())
    kind = "AOTInductor package" if form == AOTINDUCTOR else f"functions of forge ({reason})"
    return f"{name}: {kind}; calls: {calls}\n{signature}"
