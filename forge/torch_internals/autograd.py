"""Autograd: saved-tensor hooks, grad modes, forward mode, functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.autograd.grad_mode import _enter_inference_mode as enter_inference_mode
from torch.autograd.grad_mode import _exit_inference_mode as exit_inference_mode

from forge.torch_internals.patch import Hook, Patch, Replaced, Scope

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


def in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def forward_level() -> int:
    """Return the innermost level of forward mode that torch.autograd.forward_ad has open, -1 outside of any."""
    return forward_ad._current_level


def raw_saved_tensors(ctx: Any) -> tuple[SavedTensor, ...]:
    """Return what autograd saved for a backward, not yet unpacked."""
    return ctx._raw_saved_tensors


def cudnn_rnn_reserve(node: Any) -> torch.Tensor | None:
    """Return the reserve that cuDNN's recurrent layers saved in a node of a graph; None for another node."""
    return node._saved_result3 if type(node).__name__ == "CudnnRnnBackward0" else None


record_apply: Hook[[type[torch.autograd.Function], tuple], Any] = Hook("record a torch.autograd.Function")
is_recorded: Hook[[tuple], bool] = Hook("say whether the arguments of a torch.autograd.Function are proxies")


def _apply_or_record(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a Function, or record it if an argument is a proxy. It replaces Function.apply, so that it also serves
    `apply = Mine.apply`, which the user may have taken before."""
    if is_recorded(args):
        return record_apply(function, args)
    return apply_patch.original.__get__(None, function)(*args, **kwargs)


def _begin_apply(self: Any) -> None:
    """Note the ctx of an apply in C. It makes a ctx of this class first, and then calls, with gradients off, the
    Function's forward, and its setup_context where it has one."""
    function: type[torch.autograd.Function] = type(self)._forward_cls
    has_context = function.setup_context is not torch.autograd.Function.setup_context
    differentiates = torch.is_grad_enabled()

    def record(*arguments: Any) -> Any:
        forward.__exit__()
        args = arguments if has_context else arguments[1:]
        if not is_recorded(args):
            return function.forward(*arguments)
        with torch.set_grad_enabled(differentiates):
            output = record_apply(function, args)
        if has_context:
            context.__enter__()
        return output

    forward = Replaced(function, "forward", staticmethod(record))
    context = Replaced(function, "setup_context", staticmethod(lambda *arguments: context.__exit__()))
    forward.__enter__()


_IN_C = vars(torch.autograd.Function).get("apply") is vars(FunctionBase)["apply"]  # since torch 2.15
apply_patch = Patch(
    BackwardCFunction if _IN_C else SingleLevelFunction,
    "__init__" if _IN_C else "apply",
    _begin_apply if _IN_C else classmethod(_apply_or_record),
    scope=Scope.TRACE,
    why="an autograd.Function runs on proxies, which are no tensors: it is to be recorded with its own backward",
    issue="not reported: it is no bug; a Function takes tensors",
    upstream="torch/autograd/function.py:610@2.13.0, Function.apply",
    not_probed="forge.trace could not record any autograd.Function without it: proxies are no tensors",
)
