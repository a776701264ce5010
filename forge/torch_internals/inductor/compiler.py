"""Inductor's compiler: lowerings, decompositions, compile_fx."""

from torch._inductor import lowering as lowering
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.compile_fx import get_cpp_wrapper_config as get_cpp_wrapper_config
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.output_code import CompiledFxGraph as CompiledFxGraph
