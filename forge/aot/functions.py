"""Entry points in forge's own form: generated functions, with the regions and objects that they name."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forge.aot.archive import Archive
from forge.aot.call import caller
from forge.aot.exported import KERNELS
from forge.aot.kernels import load_bundle
from forge.aot.signature import Signature
from forge.cache.objects import Reader
from forge.cache.store import Entry
from forge.executors.executor import Executor, FusionExecutor
from forge.executors.registry import resolve_executors
from forge.hub import HubError
from forge.ir.checks import in_one_line
from forge.ir.printing import compile_function


def load_function(
    archive: Archive,
    name: str,
    entry: Mapping[str, Any],
    signature: Signature,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Callable[..., Any]:
    """Return the function that calls a generated function. Raises ExportError where it names what is not here."""
    data = entry["data"]
    prefix = f"data/forge/{name}/"
    blobs = [archive.read(f"{prefix}blob_{number}") for number in range(data["blobs"])]
    executors = _executors(archive, entry["executors"])
    with tempfile.TemporaryDirectory(prefix="forge-load") as folder:  # what is loaded stays when the files go
        for library in {each for paths in data["regions"].values() for each in paths.values()}:
            Path(folder, library).write_bytes(archive.read(prefix + library))
        places = {
            blobs[int(number)]: {path: os.path.join(folder, library) for path, library in paths.items()}
            for number, paths in data["regions"].items()
        }

        def region(executor: FusionExecutor, data: bytes) -> Any:
            return executor.load(executor.with_files(data, places[data]))

        reader = Reader(Entry({}, blobs), executors, region, {})
        try:
            function = compile_function(data["name"], reader.code(**data["code"]))
        except (ImportError, AttributeError, KeyError) as error:
            missing = f"calls what this process does not have ({in_one_line(error)})"
            raise archive.error(f"{missing}; import the library that defines it") from error
    users = {each: f"i{place}" for place, each in enumerate(data["user_inputs"])}
    scope: dict[str, Any] = {"function": function}
    arguments = []
    for each in data["inputs"]:
        if each in tensors:
            scope[f"weight_{each}"] = tensors[each]
            arguments.append(f"weight_{each}")
        elif each in users or each in signature.sizes:
            arguments.append(users.get(each, each))
        else:
            arguments.append("None")  # a weight that the program does not read
    return caller(signature, device, f"function({', '.join(arguments)})", scope)


def _executors(archive: Archive, names: Sequence[str | None]) -> list[Executor]:
    """Return the executors of these names; None stands for the kernels that are in the file."""
    files = {name.removeprefix(KERNELS): archive.read(name) for name in archive.members if name.startswith(KERNELS)}
    try:
        others = iter(resolve_executors([name for name in names if name is not None]))
        kernels = load_bundle(files)
    except (ValueError, HubError) as error:
        raise archive.error(f"cannot be used: {error}") from error
    return [kernels if name is None else next(others) for name in names]
