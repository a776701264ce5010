"""Names that a command line takes, for its help and for completion, which import nothing; a test compares them with the
registries that they are from."""

from typing import Literal, get_args

EXECUTORS = ("inductor-whole", "inductor", "cuda", "torch", "torch-prims", "nvfuser", "hub")
SYSTEMS = ("eager", "torch.compile", "forge")  # that forge bench compares
Plan = Literal["ddp", "fsdp", "shard"]  # of forge bench --nproc
Kind = Literal["cpp", "triton"]  # of source trees
KINDS = get_args(Kind)
LOCK_FILE = "forge-kernels.lock"
DTYPES = (
    "bfloat16",
    "float64",
    "float32",
    "float16",
    "float4_e2m1fn_x2",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
