"""The source location of a call of a program: its module, and the user's line."""

import linecache
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = tuple(f"{Path(file).parents[up]}/" for file, up in ((torch.__file__, 0), (__file__, 1)))

# Dynamo's name of the object through which a module is found: the jitted module, an object of a jitted method, a cell
# of a jitted function, a global.
_ROOT = re.compile(
    r"^(?:L\['(?:module|self|fn)'\]|L\['target'\](?:\.__self__|\.__closure__\[\d+\]\.cell_contents)?"
    r"|G\['__import_[^']*'\]|L(?=\['\w+'\])|G(?=\['\w+'\]))"
)
_ON_STACK = re.compile(r"___stack\d")  # a value left by a graph break, which has no other name
_MEMBER = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['([^']+)'\]")


class Source(NamedTuple):
    """A call's location in the user's program, parsed only when it is printed.

    stack: Dynamo's stack trace text, or "file:line". owner: Dynamo's name for the innermost module whose forward makes
    the call, such as "L['module'].layers.0"; None outside of any.
    """

    stack: str | None = None
    owner: str | None = None

    @classmethod
    def of(cls, node: Node) -> "Source":
        """Return the source of a node that Dynamo made."""
        modules = node.meta.get("nn_module_stack")
        return cls(node.meta.get("stack_trace"), next(reversed(modules.values()))[0] if modules else None)

    @classmethod
    def of_frames(cls, frames: Iterable[tuple[str, int]]) -> "Source":
        """Return the source of frames, files and lines, innermost last."""
        return cls("\n".join(f'File "{path}", line {line}' for path, line in frames))

    @property
    def module(self) -> str | None:
        """The path of that module, such as "layers.0.q_proj"; "" for the jitted module itself, None outside of any."""
        if self.owner is None:
            return None
        path = _MEMBER.sub(r".\1", _ROOT.sub("", self.owner)).strip(".")
        return None if _ON_STACK.match(path) else path

    @property
    def place(self) -> tuple[str, int] | None:
        """The innermost file and line that are neither forge's nor torch's."""
        frames = _FRAME.findall(self.stack or "")
        if not frames:
            path, _, line = (self.stack or "").rpartition(":")
            return (path, int(line)) if line.isdigit() else None
        own = [(path, int(line)) for path, line in frames if not path.startswith(_LIBRARIES)]
        return own[-1] if own else None

    def __str__(self) -> str:
        """Return `layers.0.q_proj  model.py:12  h = x @ w`, as far as it is known."""
        return "  ".join(filter(None, (self.module, self.line)))

    @property
    def line(self) -> str | None:
        """`model.py:12  h = x @ w`; None if the program's own code does not contain the call."""
        place = self.place
        if place is None:
            return None
        path, line = place
        return f"{Path(path).name}:{line}  {linecache.getline(path, line).strip()}".rstrip()


def text_of(source: Any) -> str:
    """Return Dynamo's expression for the source's object: L['module']._modules['0']."""
    name: str = source.name() if callable(source.name) else source.name  # older torch has a method
    return name


_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # Python's registry of shown warnings


def warn(message: str, source: Source | None = None, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: at `source`, or at the program's call of forge."""
    path, line = (source.place if source is not None else None) or _caller()
    warnings.warn_explicit(f"forge: {message}", category, path, line, registry=_warned)


def _caller() -> tuple[str, int]:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
