"""forge.bundle: writes the kernels that a jitted function runs to a folder, for use elsewhere."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.aot.kernels import bundle_parts, kernels_of
from forge.capture.handles import handle_of
from forge.executors.hubex import Kernel
from forge.hub.bundle import write_bundle
from forge.ir import check


def bundle(jitted: Any, folder: str | os.PathLike[str]) -> Path:
    """Write the kernels that a jitted function runs, with their files, to a new folder, for use on this platform.

    The folder has the verified variants of repositories, the sources of compiled kernels, and manifests that list
    them alone. `forge.jit(model, kernels=[folder])` uses them on another machine without the Hub or the cache. Call
    the function, and its backward, before: only programs that exist are bundled.

    Args:
        jitted: A result of forge.jit.
        folder: A path that does not exist or an empty folder.

    Returns:
        The folder.

    Raises:
        ValueError: If no kernel runs, a kernel was declared in Python and has no files, or the folder is not empty.
        HubError: For a kernel that depends on other kernels.
    """
    used = list(_used_kernels(jitted))
    check(
        bool(used), lambda: "forge.bundle: no kernel runs; call the jitted function first (forge.explain says why not)"
    )
    write_bundle(Path(folder), bundle_parts(used, "forge.bundle"))
    return Path(folder)


def _used_kernels(jitted: Any) -> Iterator[Kernel]:
    for report in handle_of(jitted).reports:
        for stages in (report.traces, report.backward_traces):
            yield from kernels_of(stages[-1]) if stages else ()
