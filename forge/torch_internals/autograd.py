"""Autograd: saved-tensor hooks, grad modes, forward mode, functions."""

from collections.abc import Callable

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode
from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode

FunctionBase = torch._C._FunctionBase
SavedTensor = torch._C._autograd.SavedTensor
get_current_graph_task_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
get_data_attr: Callable = vars(torch._C._autograd)["_get_data_attr"]  # its stub lacks it
pop_saved_tensors_default_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_default_hooks = torch._C._autograd._push_saved_tensors_default_hooks
saved_tensors_hooks_disable = torch._C._autograd._saved_tensors_hooks_disable
saved_tensors_hooks_enable = torch._C._autograd._saved_tensors_hooks_enable
saved_tensors_hooks_get_disabled_error_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
enter_dual_level = torch._C._enter_dual_level
exit_dual_level = torch._C._exit_dual_level
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
set_fwd_grad_enabled = torch._C._set_fwd_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled
