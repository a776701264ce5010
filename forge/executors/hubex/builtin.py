"""The builtin kernels in `forge/_builtin_kernels`: repositories in the Hub's layout, handled like any other source.

They are compared with their references on a GPU before a release; verified.json has a hash of each kernel that passed
(digests.py). A kernel with another hash is verified at its first use, like any kernel, and the others stay trusted.
`make release-kernels`, on a machine with a GPU, verifies them and writes that file.
"""

import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from forge.executors.hubex.digests import digests, title
from forge.executors.hubex.gather import gather
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.verification_cache import Verifier, verify_all
from forge.hub.errors import HubError
from forge.ir.printing import table

FOLDERS = (Path(__file__).parents[2] / "_builtin_kernels" / "forge-triton",)
VERIFIED = "verified.json"
_log = logging.getLogger("forge.hub")


def builtin_kernels(trust: Callable[[Iterable[Kernel]], None]) -> list[Kernel]:
    """Return the kernels of this machine's devices; pass the kernels that were verified before release to `trust`."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return []
    result = []
    for folder in FOLDERS:
        try:
            kernels = [replace(kernel, builtin=True) for kernel in gather([folder])]
        except (HubError, ImportError) as error:  # Triton may be installed and fail to import
            _log.warning("forge's own kernels in %s are not used: %s", folder.name, error)
            continue
        expected, now = released_digests(folder), digests(folder)
        right = {name for name, digest in now.items() if expected.get(name) == digest}
        trust([kernel for kernel in kernels if title(kernel.operation, kernel.entry.name) in right])
        result += kernels
    return result


def released_digests(folder: Path) -> dict[str, str]:
    """Return the hashes of the verified kernels, by operation and name; an empty dict without a verified.json."""
    path = folder / VERIFIED
    return json.loads(path.read_text())["kernels"] if path.is_file() else {}


def release(folder: Path) -> bool:
    """Verify a repository's kernels on this machine's GPU, print the results, and write verified.json if all pass.
    Return False if one fails or there is no GPU. A test fails when this has to run again."""
    kernels = gather([folder])
    rows = [row for kernel in kernels for row in verify_all(kernel, Verifier())]
    print(*table([("kernel", "op", "dtype", "device", "samples", "verdict"), *rows]), sep="\n")
    if not torch.cuda.is_available() or any(row[-1] != "ok" for row in rows):
        return False
    with_versions = {"torch": torch.__version__, "triton": importlib.metadata.version("triton")}
    data = {"kernels": digests(folder), "device": torch.cuda.get_device_name(), **with_versions}
    (folder / VERIFIED).write_text(json.dumps(data, indent=2) + "\n")
    return True
