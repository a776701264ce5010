"""Inductor's compile processes."""

from torch._inductor.async_compile import AsyncCompile as AsyncCompile
from torch._inductor.async_compile import get_compile_threads as get_compile_threads
