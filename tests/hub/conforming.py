"""A repository that meets every requirement of the Hub, for tests that violate one; nothing in it can run."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME, ID = "scale-rows", "_scale_rows_3f2a9c1"
CPU = ("torch210-cxx11-cpu-x86_64-linux", "torch211-cxx11-cpu-x86_64-linux")
INIT = "from . import layers\nfrom .ops import scale\n\n__all__ = ['layers', 'scale']\n"
OPS = f"import torch\n\nfrom . import {ID}\n\nops = torch.ops.{ID}\n"
SCALE = "import math\n\nfrom ._ops import ops\n\n\ndef scale(x):\n    return ops.scale(x, math.pi)\n"
LAYERS = """import torch
from torch import nn

from .ops import scale


class Scale(nn.Module):
    has_backward = False
    can_torch_compile: bool = True
    weight: torch.Tensor

    def forward(self, x):
        return scale(x) * self.weight
"""


def elf(
    needed: Sequence[str] = ("libtorch_cpu.so", "libc.so.6"),
    undefined: Sequence[str] = ("PyModule_Create2",),
    versions: Sequence[tuple[str, str]] = (("libc.so.6", "GLIBC_2.14"), ("libstdc++.so.6", "CXXABI_1.3")),
    machine: int = 62,
) -> bytes:
    """Return a 64-bit shared library that has only its dynamic section."""
    strings = b"\0"

    def at(text: str) -> int:
        nonlocal strings
        strings += text.encode() + b"\0"
        return len(strings) - len(text) - 1

    dynamic = b"".join(struct.pack("<QQ", 1, at(name)) for name in needed) + bytes(16)
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", at(name), 16, 0, 0, 0, 0) for name in undefined)
    needs = b""
    for index, (file, version) in enumerate(versions):
        following = 32 if index + 1 < len(versions) else 0
        needs += struct.pack("<HHIII", 1, 1, at(file), 16, following) + struct.pack("<IHHII", 0, 0, 2, at(version), 0)
    bodies = [(0, b"", 0, 0), (3, strings, 0, 0), (11, symbols, 1, 0), (6, dynamic, 1, 0)]
    bodies.append((0x6FFFFFFE, needs, 1, len(versions)))
    table, data, start = b"", b"", 64 + 64 * len(bodies)
    for kind, body, link, info in bodies:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, start + len(data), len(body), link, info, 8, 0)
        data += body
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, 64, 0, 64, 0, 0, 64, len(bodies), 0)
    return head + table + data


def described(**values: Any) -> dict[str, Any]:
    """Return the contents of metadata.json with these values; None removes a key."""
    known = {
        "name": NAME,
        "id": ID,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": {"type": "cpu"},
        **{key.replace("_", "-"): value for key, value in values.items()},
    }
    return {key: value for key, value in known.items() if value is not None}


def write_conforming(folder: Path) -> Path:
    """Write the repository and return the folder of its last variant, in which tests remove something."""
    files = {"__init__.py": INIT, "_ops.py": OPS, "ops.py": SCALE, "layers.py": LAYERS, f"{ID}.abi3.so": elf()}
    for variant in CPU:
        for path, content in {**files, "metadata.json": json.dumps(described(), indent=2)}.items():
            target = folder / "build" / variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())
    return target.parent
