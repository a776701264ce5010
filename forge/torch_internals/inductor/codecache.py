"""Inductor's code caches; importing them does not import its compiler."""

from ctypes import CDLL
from types import ModuleType

from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import CppPythonBindingsCodeCache as CppPythonBindingsCodeCache
from torch._inductor.codecache import LambdaFuture as LambdaFuture
from torch._inductor.codecache import PyCodeCache as PyCodeCache
from torch.utils._ordered_set import OrderedSet as OrderedSet


def load_library(path: str, key: str) -> CDLL | ModuleType:
    """Return the module of a shared object, as Inductor's cache loads it."""
    return CppPythonBindingsCodeCache._load_library(path, key)
