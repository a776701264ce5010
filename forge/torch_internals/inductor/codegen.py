"""Inductor's code generators."""

from torch._inductor import sizevars as sizevars
from torch._inductor.codegen import cpp as cpp
from torch._inductor.codegen.cpp import CppKernel as CppKernel
from torch._inductor.codegen.cpp import CppVecOverrides as CppVecOverrides
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode as OuterLoopFusedSchedulerNode
from torch._inductor.codegen.cpp_utils import LocalBufferContext as LocalBufferContext
from torch._inductor.codegen.triton import TritonKernel as TritonKernel
from torch._inductor.codegen.triton import TritonScheduling as TritonScheduling
from torch._inductor.virtualized import V as V
