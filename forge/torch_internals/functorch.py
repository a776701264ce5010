"""Levels of torch.func."""

import torch
from torch._functorch import config as functorch_config
from torch._functorch import predispatch as predispatch
from torch._functorch.predispatch import lazy_load_decompositions as lazy_load_decompositions

functorch = torch._C._functorch
get_dynamic_layer_stack_depth = torch._C._functorch.get_dynamic_layer_stack_depth
get_unwrapped = torch._C._functorch.get_unwrapped
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
maybe_current_level = torch._C._functorch.maybe_current_level
pop_dynamic_layer_stack = torch._C._functorch.pop_dynamic_layer_stack
