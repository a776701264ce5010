"""Which kernels of attention are enabled, and which one torch would choose."""

import torch

get_cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled
get_flash_sdp_enabled = torch._C._get_flash_sdp_enabled
get_math_sdp_enabled = torch._C._get_math_sdp_enabled
get_mem_efficient_sdp_enabled = torch._C._get_mem_efficient_sdp_enabled
get_sdp_priority_order = torch._C._get_sdp_priority_order
