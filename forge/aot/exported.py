"""Exported: entry points that were compiled, to be written to one file."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge.aot import archive
from forge.aot.entry import AOTINDUCTOR, CompiledEntry
from forge.aot.errors import ExportError
from forge.aot.kernels import bundle_files
from forge.aot.requirements import requirements
from forge.aot.signature import Signature
from forge.aot.weights import WeightWriter
from forge.executors.hubex import HubExecutor
from forge.hub import HubError

KERNELS = "data/forge/kernels/"
WEIGHTS = "data/weights/weights.safetensors"


class Exported:
    """The result of forge.export: programs that `save` writes to one file.

    Attributes:
        entry_points: The signature of each entry point, by name.
    """

    def __init__(self, entries: Mapping[str, CompiledEntry]) -> None:
        self._entries = dict(entries)
        self._kernels = _kernel_members(self._entries.values())
        self.entry_points = {name: each.signature for name, each in self._entries.items()}

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
            ExportError: If the path does not end with ".pt2".
        """
        if Path(path).suffix != ".pt2":
            raise ExportError(f"forge.export: {path} must end with .pt2")
        weights = WeightWriter()
        members: dict[str, bytes] = {}
        entries: dict[str, Any] = {}
        for name, each in self._entries.items():
            folder = f"data/aotinductor/{name}" if each.form == AOTINDUCTOR else f"data/forge/{name}"
            members |= {f"{folder}/{file}": content for file, content in each.files.items()}
            members[f"data/forge/{name}/program.py"] = each.text.encode()
            known = [
                [own, weights.add(_readable(own), tensor, changes=changes)] for own, tensor, changes in each.weights
            ]
            entries[name] = {
                "form": each.form,
                "reason": each.reason,
                "device": each.device,
                "signature": each.signature.as_json(),
                "weights": known,
                "claims": each.claims,
                "executors": [None if isinstance(it, HubExecutor) else it.name for it in each.executors],
                "data": each.data,
            }
        members |= self._kernels
        held = weights.dump()
        members |= {} if held is None else {WEIGHTS: held}
        device = next((each.device for each in self._entries.values() if each.device != "cpu"), "cpu")
        forms = {each.form for each in self._entries.values()}
        index = {"requires": requirements(device, forms), "entries": entries}
        return archive.write(path, index, members)


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
