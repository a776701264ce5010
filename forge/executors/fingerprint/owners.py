"""Whose code something is: a version says all of what is installed, a hash of what a registered owner loaded."""

import builtins
import hashlib
import importlib.metadata
import math
import operator
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, GetSetDescriptorType, MethodWrapperType, ModuleType
from typing import Any, Protocol

import torch

from forge.ir.printing import qualified_name
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket, packet_name

TORCHS = frozenset(  # namespaces of torch's own operators
    "aten prim prims torch c10d _c10d_functional quantized quantized_decomposed mkl mkldnn mkldnn_prepacked onednn "
    "inductor symm_mem higher_order".split()
)
_FORGE = Path(__file__).parents[2]
_LIBRARIES = ("torch", "operator", "math", "builtins")


class Owner(Protocol):
    """A package that imports modules of its own making, as forge.hub does those of kernel repositories."""

    def owner_of(self, module: str) -> str | None:
        """Return "repository" and a hash of all of a module's code; None for others' modules."""

    def imports_of(self, module: str) -> Iterable[str]:
        """Return the modules from elsewhere that its module's code imports, of which `owner_of` says nothing."""


_owners: list[Owner] = []


def register_owner(owner: Owner) -> None:
    """Register an owner of modules."""
    _owners.append(owner)


def registered_owner(module: str | None) -> Owner | None:
    """Return the registered owner that imported a module, or None."""
    return next((each for each in _owners if module is not None and each.owner_of(module) is not None), None)


def owner_of_module(name: str | None) -> str | None:
    """Return the owner of a module's code: "torch 2.13.0", "python 3.11.7", a repository's hash. None for the user's
    own."""
    if name is None or name == "__main__":
        return None
    owner = registered_owner(name)
    if owner is not None:
        return owner.owner_of(name)
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
    """Return the owner of a file's code, as `owner_of_module` does."""
    if file.startswith("<"):
        return f"python {sys.version}" if file.startswith("<frozen ") else None
    path = os.path.abspath(file)
    if _is_in(path, str(_FORGE)):
        return f"forge {forge_hash()}"
    if _is_in(path, os.path.dirname(torch.__file__)):
        return f"torch {torch.__version__}"
    for folder in (*_site_folders(), *filter(_has_distributions, map(os.path.abspath, sys.path))):
        if _is_in(path, folder):
            top = os.path.relpath(path, folder).split(os.sep)[0].partition(".")[0]
            release = _release(top)
            return release and f"{top} {release}"
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__))
    return f"python {sys.version}" if any(_is_in(path, each) for each in standard) else None


def is_installed(module: ModuleType) -> bool:
    """Return whether a module's version identifies all of it."""
    return owner_of_module(module.__name__) is not None


def name_in_torch(function: Any) -> str | None:
    """Return the name of a function or class of torch or Python, which their versions identify. None for others."""
    if isinstance(function, OpOverload):
        return qualified_name(function) if function.namespace in TORCHS else None
    if isinstance(function, OpOverloadPacket):
        return qualified_name(function) if packet_name(function).partition("::")[0] in TORCHS else None
    name = qualified_name(function)
    if name is not None and name.partition(".")[0] in _LIBRARIES:
        return name
    own_name = getattr(function, "__name__", "")
    for module in (builtins, operator, math):
        if getattr(module, own_name, None) is function:
            return f"{module.__name__}.{own_name}"
    if isinstance(function, type) and function.__module__.partition(".")[0] == "torch":
        return f"{function.__module__}.{function.__qualname__}"
    if isinstance(function, MethodWrapperType) and isinstance(function.__self__, GetSetDescriptorType):
        owner = name_in_torch(function.__self__.__objclass__)  # of an attribute: torch.Tensor.T.__get__
        return owner and f"{owner}.{function.__self__.__name__}.{function.__name__}"
    if isinstance(function, BuiltinFunctionType) and (function.__module__ or "").startswith("torch."):
        return f"{function.__module__}.{function.__name__}"
    return None


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}{os.sep}")


@cache
def _site_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return tuple(dict.fromkeys([*folders, site.getusersitepackages()]))


@cache
def _has_distributions(folder: str) -> bool:
    """Return whether an installer put distributions into a folder (`pip install --target`, a layer of a container)."""
    return next(Path(folder).glob("*.dist-info/RECORD"), None) is not None


@cache
def _release(top: str) -> str | None:
    """Return the version of the distribution that a top-level module belongs to."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top, ())
    return importlib.metadata.version(names[0]) if names else None


@cache
def forge_hash() -> str:
    """Return forge's version, and a hash of its code."""
    files = sorted(_FORGE.rglob("*.py"))
    parts = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
    return f"{sys.modules['forge'].__version__} {parts.hexdigest()}"


def verifier_versions() -> tuple[str, ...]:
    """Return the versions that decide a verification, beside the kernel itself."""
    return forge_hash(), sys.version, torch.__version__, str(torch.version.git_version)
