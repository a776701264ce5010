"""Helpers of the tests of exported files: a small model, and files with members changed."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

INDEX, DIGEST = "data/forge/index.json", "data/forge/digest"
Members = dict[str, bytes]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).softmax(-1)


def members_of(path: Path) -> Members:
    """Return the members of a file, by their names below its root."""
    with zipfile.ZipFile(path) as file:
        return {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}


def write_members(path: Path, members: Members) -> Path:
    """Write a zip file of these members, valid or not."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(f"package/{name}", content)
    return path


def with_index(members: Members, change: Callable[[dict], None]) -> Members:
    """Return the members with a changed index and its right hash."""
    index = json.loads(members[INDEX])
    change(index)
    head = json.dumps(index).encode()
    return {**members, INDEX: head, DIGEST: hashlib.sha256(head).hexdigest().encode()}
