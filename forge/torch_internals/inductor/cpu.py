"""The vector instructions that Inductor finds to work."""

from torch._inductor import cpu_vec_isa as cpu_vec_isa
