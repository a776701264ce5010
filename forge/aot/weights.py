"""Weights as safetensors: a header of names, dtypes and places in JSON, and the bytes.

Source: https://huggingface.co/docs/safetensors, whose format this is.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from forge.aot.errors import ExportError
from forge.ir.strides import extent

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
MEMBER = "data/weights/weights.safetensors"
_ALIGNMENT = 64  # bytes, of a tensor's memory


class WeightWriter:
    """The weights of a file, each once, whatever number of entry points reads it."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._data: dict[str, bytes] = {}
        self._header: dict[str, Any] = {}
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor, *, changes: bool = False) -> dict[str, Any]:
        """Return the description of a tensor that was added; equal tensors share one name. changes: whether a program
        writes to it, so that only programs of the same tensor share it.

        Raises ExportError for a tensor that is not strided, or of a subclass.
        """
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise ExportError(f"forge.export: weight {name} is a {type(tensor).__name__}, but must be a plain tensor")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        data = _bytes_of(tensor)
        properties = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
        }
        owner = f"{tensor.data_ptr()}" if changes else ""
        key = hashlib.sha256(f"{sorted(properties.items())} {owner}".encode() + data).digest()
        if key not in self._names:
            self._put(name if name not in self._data else f"{name}.{len(self._data)}", data, tensor, key)
        return {"name": self._names[key], "device": tensor.device.type, **properties}

    def _put(self, name: str, data: bytes, tensor: torch.Tensor, key: bytes) -> None:
        self._names[key] = name
        self._data[name] = data
        is_plain = tensor.dtype in _NAMES and tensor.is_contiguous()
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype] if is_plain else "U8",
            "shape": list(tensor.shape) if is_plain else [len(data)],
            "data_offsets": [self._size, self._size + len(data)],
        }
        self._size += len(data)

    def members(self) -> dict[str, bytes]:
        """Return the member of a file that holds the weights, where there are some."""
        if not self._data:
            return {}
        head = json.dumps(self._header).encode()
        head += b" " * (-(len(head) + 8) % _ALIGNMENT)
        return {MEMBER: b"".join([len(head).to_bytes(8, "little"), head, *self._data.values()])}


class WeightReader:
    """The weights of a file that was read, of which each is made once on its device."""

    def __init__(self, memory: torch.Tensor) -> None:
        length = int.from_bytes(memory[:8].numpy().tobytes(), "little")
        self._header = json.loads(memory[8 : 8 + length].numpy().tobytes())
        self._data = memory[8 + length :]
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    def get(self, described: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """Return the tensor that WeightWriter.add described. Raises KeyError for one that is not here."""
        key = (described["name"], device)
        if key not in self._tensors:
            start, end = self._header[described["name"]]["data_offsets"]
            part = self._data[start:end]
            part = part if part.data_ptr() % _ALIGNMENT == 0 else part.clone()
            flat = part.view(getattr(torch, described["dtype"])).to(device)
            self._tensors[key] = flat.as_strided(described["shape"], described["strides"])
        return self._tensors[key]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory from the first element to the last: programs are compiled for the strides of their weights."""
    flat = tensor.as_strided((extent(tensor),), (1,), tensor.storage_offset()).cpu()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
