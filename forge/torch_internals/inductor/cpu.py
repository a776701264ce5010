"""The vector instructions that Inductor finds to work."""

from torch._inductor.cpu_vec_isa import VecISA as VecISA
from torch._inductor.cpu_vec_isa import pick_vec_isa as pick_vec_isa
