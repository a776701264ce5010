"""Functions that graphs call by a private name: those behind torch.nn.functional, checks and assertions."""

from collections.abc import Callable
from typing import Any

import torch
from torch._refs import tensor as refs_tensor

_C: Any = torch._C  # its stubs lack some modules and functions
_VF: Any = torch._VF  # it looks its functions up

VariableFunctions = torch._C._VariableFunctions
tensor_base = _C.TensorBase
torch_fft_module = _C._fft
torch_linalg_module = _C._linalg
torch_nn_module = torch._C._nn
nn_adaptive_avg_pool2d = torch._C._nn.adaptive_avg_pool2d
nn_adaptive_avg_pool3d = torch._C._nn.adaptive_avg_pool3d
nn_elu = torch._C._nn.elu
nn_fractional_max_pool2d = torch._C._nn.fractional_max_pool2d
nn_fractional_max_pool3d = torch._C._nn.fractional_max_pool3d
nn_gelu = torch._C._nn.gelu
nn_gelu_: Callable = _C._nn.gelu_
nn_pad = torch._C._nn.pad
nn_rrelu_with_noise = _C._nn.rrelu_with_noise
torch_special_module = _C._special
vf_block_diag = _VF.block_diag
vf_broadcast_tensors = _VF.broadcast_tensors
vf_cartesian_prod = _VF.cartesian_prod
vf_meshgrid = _VF.meshgrid
torch_assert = torch._assert
torch_check = torch._check
torch_check_index = torch._check_index
torch_check_is_size = torch._check_is_size
torch_check_not_implemented = torch._check_not_implemented
torch_check_tensor_all = torch._check_tensor_all
torch_check_tensor_all_with = torch._check_tensor_all_with
torch_check_type = torch._check_type
torch_check_value = torch._check_value
torch_check_with: Callable[..., None] = torch._check_with  # takes None for a message, unlike its annotation
torch_chunk_cat = torch._chunk_cat
torch_dirichlet_grad = torch._dirichlet_grad
torch_foreach_copy_ = torch._foreach_copy_
torch_fused_sdp_choice = torch._fused_sdp_choice
torch_grouped_mm = torch._grouped_mm
torch_native_batch_norm_legit = torch._native_batch_norm_legit
torch_neg_view = torch._neg_view
torch_sample_dirichlet = torch._sample_dirichlet
torch_standard_gamma = torch._standard_gamma
torch_standard_gamma_grad = torch._standard_gamma_grad
torch_unsafe_masked_index = torch._unsafe_masked_index
torch_unsafe_masked_index_put_accumulate = torch._unsafe_masked_index_put_accumulate
torch_weight_norm = torch._weight_norm
