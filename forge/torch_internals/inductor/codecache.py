"""Inductor's code caches; importing them does not import its compiler."""

from ctypes import CDLL
from types import ModuleType
from typing import Any

from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import CodeCacheFuture as CodeCacheFuture
from torch._inductor.codecache import CppPythonBindingsCodeCache as CppPythonBindingsCodeCache
from torch._inductor.codecache import LambdaFuture as LambdaFuture
from torch._inductor.codecache import PyCodeCache as PyCodeCache
from torch.utils._ordered_set import OrderedSet as OrderedSet


def defers_alignment(graph: Any) -> bool:
    """Return whether a compiled graph leaves the alignment of its inputs to its caller."""
    return getattr(graph, "_defers_input_alignment", False)


def wraps_regions(graph: Any) -> bool:
    """Return whether Inductor wraps a compiled graph's call in an operator."""
    return getattr(graph, "_wrap_compiled_regions", False)


def load_library(path: str, key: str) -> CDLL | ModuleType:
    """Return the module of a shared object, as Inductor's cache loads it."""
    return CppPythonBindingsCodeCache._load_library(path, key)
