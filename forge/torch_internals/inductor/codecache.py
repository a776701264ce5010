"""Inductor's code caches; importing them does not import its compiler."""

from torch._inductor import utils as inductor_utils
from torch._inductor.codecache import CppPythonBindingsCodeCache as CppPythonBindingsCodeCache
from torch._inductor.codecache import LambdaFuture as LambdaFuture
from torch._inductor.codecache import PyCodeCache as PyCodeCache
from torch.utils._ordered_set import OrderedSet as OrderedSet
