"""Loaded: the entry points of a file, which can be called."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from forge.aot.archive import Archive
from forge.aot.call import caller
from forge.aot.entry_point import AOTINDUCTOR
from forge.aot.errors import ExportError
from forge.aot.exported import describe
from forge.aot.functions import load_function
from forge.aot.package import open_runner
from forge.aot.requirements import find_unmet
from forge.aot.signature import Signature
from forge.aot.weights import MEMBER, WeightReader


class Loaded:
    """The programs of a file. A call runs the only entry point.

    Attributes:
        entry_points: The callables, by name.
        signatures: The signature of each entry point, by name.
        device: The device that the programs run on.
        digest: The digest of the file.
    """

    def __init__(
        self,
        entry_points: Mapping[str, Callable[..., Any]],
        signatures: Mapping[str, Signature],
        texts: Mapping[str, tuple[str, str]],
        device: torch.device,
        digest: str,
    ) -> None:
        self.entry_points = dict(entry_points)
        self.signatures = dict(signatures)
        self.device = device
        self.digest = digest
        self._texts = dict(texts)
        main = next(iter(self.entry_points), None) if len(self.entry_points) == 1 else None
        self._call = None if main is None else self.entry_points[main]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the only entry point. Raises ExportError where there are several."""
        if self._call is None:
            raise ExportError(
                f"forge.load: the file has several entry points: call one of {', '.join(self.entry_points)}"
            )
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        entry_point = self.__dict__.get("entry_points", {}).get(name)
        if entry_point is None:
            raise AttributeError(f"the file has no entry point {name!r}")
        return entry_point

    def __str__(self) -> str:
        return "\n".join(description for description, _ in self._texts.values())

    def program(self, entry_point: str | None = None) -> str:
        """Return the program of an entry point as Python."""
        return self._texts[entry_point or next(iter(self._texts))][1]


def load(
    path: str | os.PathLike[str], device: str | torch.device | None = None, *, digest: str | None = None
) -> Loaded:
    """Load a file that forge.export wrote, without the model's source and without Dynamo.

    A file is code: loading one is as safe as running a program of whoever wrote it. Every member is compared with its
    hash in the file's index before it is used.

    Args:
        path: The file.
        device: Where to run; None takes the device that the file is for.
        digest: The digest that `Exported.save` returned. A file with another one is refused.

    Returns:
        A callable with the file's entry points.

    Raises:
        ExportError: For a file that is damaged, was not written by forge.export, or does not fit this process.
    """
    with Archive(path, digest) as archive:
        requirements = archive.index["requires"]
        target = torch.device(device if device is not None else requirements["device"])
        unmet = find_unmet(requirements, target)
        if unmet is not None:
            raise archive.error(unmet)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        weights = WeightReader(archive.read_memory(MEMBER)) if MEMBER in archive.members else None
        signatures, calls, texts = {}, {}, {}
        for name, entry in archive.index["entries"].items():
            signatures[name] = Signature.from_json(entry["signature"])
            description = describe(name, entry["form"], entry["reason"], entry["claims"], signatures[name])
            texts[name] = description, archive.read(f"data/forge/{name}/program.py").decode()
            tensors = (
                {own: weights.get(record, _device_of(record, target)) for own, record in entry["weights"]}
                if weights
                else {}
            )
            load_entry = _load_package if entry["form"] == AOTINDUCTOR else load_function
            calls[name] = load_entry(archive, name, entry, signatures[name], tensors, target)
        return Loaded(calls, signatures, texts, target, archive.digest)


def _device_of(record: Mapping[str, Any], target: torch.device) -> torch.device:
    return target if record["device"] == target.type else torch.device(record["device"])


def _load_package(
    archive: Archive,
    name: str,
    entry: Mapping[str, Any],
    signature: Signature,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Callable[..., Any]:
    """Return the function that calls an AOTInductor package."""
    prefix = f"data/aotinductor/{name}/"
    files = [member for member in archive.members if member.startswith(prefix) and not member.endswith(".cpp")]
    with tempfile.TemporaryDirectory(prefix="forge-load") as folder:  # what is loaded stays when the files go
        for member in files:
            Path(folder, member.removeprefix(prefix)).write_bytes(archive.read(member))
        (library,) = [each for each in os.listdir(folder) if each.endswith(".so")]
        runner = open_runner(os.path.join(folder, library), device, tensors)
    number = [f"i{place}" for place, each in enumerate(signature.inputs) if each in signature.tensors]
    scope = {"run": runner.run, "constants": tensors}
    return caller(signature, device, f"run([{', '.join(number)}])", scope)
