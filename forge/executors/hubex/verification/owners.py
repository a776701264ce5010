"""Whose code something is: a version says all of what is installed, a hash of what a Hub repository holds."""

import hashlib
import importlib.metadata
import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from forge.hub import content_of

_FORGE = Path(sys.modules["forge"].__file__).parent


def owner_of_module(name: str | None) -> str | None:
    """Who has the code of a module: "torch 2.13.0", "python 3.11.7", a repository's hash. None for the user's own."""
    if name is None or name == "__main__":
        return None
    content = content_of(name)
    if content is not None:
        return f"repository {content}"
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return owner_of_file(file)
    top = name.partition(".")[0]
    if top == "torch":
        return f"torch {torch.__version__}"
    is_python = top in sys.builtin_module_names or top in sys.stdlib_module_names
    return f"python {sys.version}" if is_python else None


@cache
def owner_of_file(file: str) -> str | None:
    """As of a module, by where its code lies."""
    if file.startswith("<"):
        return f"python {sys.version}" if file.startswith("<frozen ") else None
    path = os.path.abspath(file)
    if _is_in(path, str(_FORGE)):
        return f"forge {forge_hash()}"
    if _is_in(path, os.path.dirname(torch.__file__)):
        return f"torch {torch.__version__}"
    for folder in _installed():
        if _is_in(path, folder):
            top = os.path.relpath(path, folder).split(os.sep)[0].partition(".")[0]
            release = _release(top)
            return release and f"{top} {release}"
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__))
    return f"python {sys.version}" if any(_is_in(path, each) for each in standard) else None


def is_installed(module: ModuleType) -> bool:
    """Whether a module's version says all of it."""
    return owner_of_module(module.__name__) is not None


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}{os.sep}")


@cache
def _installed() -> tuple[str, ...]:
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return tuple(dict.fromkeys([*found, site.getusersitepackages()]))


@cache
def _release(top: str) -> str | None:
    """The version of the distribution that a top-level module belongs to."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top, ())
    return importlib.metadata.version(names[0]) if names else None


@cache
def forge_hash() -> str:
    """Which forge decides: its version, and a hash of its code."""
    files = sorted(_FORGE.rglob("*.py"))
    parts = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
    return f"{sys.modules['forge'].__version__} {parts.hexdigest()}"


def here() -> tuple[str, ...]:
    """What verifies, beside the kernel itself."""
    return forge_hash(), sys.version, torch.__version__, str(torch.version.git_version)
