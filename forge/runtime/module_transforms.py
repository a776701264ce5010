"""Transforms that replace a module's parameters: in the copy of the module that is jitted, and in its state_dict.

The copy shares the parameters and buffers that no transform replaces; the user's module stays unchanged. The state_dict
of the jitted module has the new form. load_state_dict accepts both forms: a hook of the copy, which deep copies and
pickles keep, has each transform convert the entries that it knows. original_state_dict converts back.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from forge.ir import Trace, check

StateDict = dict[str, Any]
_APPLIED = "_forge_module_transforms"


class ModuleTransform:
    """A transform of forge.jit that replaces parameters of the jitted module, for example by quantized ones.

    Override the methods that apply; by default nothing changes.
    """

    def transform_module(self, module: nn.Module) -> nn.Module:
        """Return a module with other parameters or submodules.

        Args:
            module: A copy of the user's module, which may be changed. It shares the user's parameters and buffers:
                replace them, but do not write to them.

        Returns:
            The module to jit: `module`, or another.
        """
        return module

    def transform_state_dict(self, state_dict: StateDict, module: nn.Module) -> StateDict:
        """Return a state_dict of the original module in the form of the transformed one.

        Args:
            state_dict: Names and tensors, of which some may be missing, or have the new form already.
            module: The transformed module.

        Returns:
            The entries that load into `module`.
        """
        return state_dict

    def reverse_transform_state_dict(self, state_dict: StateDict, module: nn.Module) -> StateDict:
        """Return a state_dict of the transformed module in the form of the original one.

        Args:
            state_dict: Names and tensors.
            module: The transformed module.

        Returns:
            The entries that load into the original module.
        """
        return state_dict

    def transform_trace(self, trace: Trace) -> Trace:
        """Return a program that calls the transformed module, changed as by a transform that is a function.

        Args:
            trace: The recorded program.

        Returns:
            The changed program.
        """
        return trace


def split_transforms(transforms: Sequence[Any]) -> tuple[list[Callable[[Trace], Trace]], list[ModuleTransform]]:
    """Return the functions from Trace to Trace of a list of transforms, and the ModuleTransforms, in order."""
    functions = []
    for each in transforms:
        if not isinstance(each, ModuleTransform):
            functions.append(each)
        elif type(each).transform_trace is not ModuleTransform.transform_trace:
            functions.append(each.transform_trace)
    return functions, [each for each in transforms if isinstance(each, ModuleTransform)]


def transform_module(module: nn.Module, transforms: Sequence[ModuleTransform]) -> nn.Module:
    """Return a transformed copy of a module, which remembers the transforms for its state_dict.

    Raises TypeError if a transform returns no module. An error of a transform, or of the copy, has a note.
    """
    tensors = (*module.parameters(), *module.buffers())
    try:
        new = copy.deepcopy(module, {id(each): each for each in tensors})
    except Exception as error:
        error.add_note("raised by copy.deepcopy of the module, in whose copy forge.jit's transforms replace parameters")
        raise
    applied = [*getattr(new, _APPLIED, ())]
    for each in transforms:
        name = type(each).__name__
        try:
            new = each.transform_module(new)
        except Exception as error:
            error.add_note(f"raised by forge.jit's transform {name}: transform_module")
            raise
        check(
            isinstance(new, nn.Module),
            lambda name=name, new=new: (
                f"forge.jit: transform {name}: transform_module returned {type(new).__name__}, but must return a module"
            ),
            TypeError,
        )
        applied.append(each)
    is_first = not hasattr(new, _APPLIED)
    setattr(new, _APPLIED, applied)
    if is_first:
        new.register_load_state_dict_pre_hook(_to_new_form)
    return new


def _to_new_form(module: nn.Module, state_dict: StateDict, prefix: str, *rest: Any) -> None:
    """Convert a module's entries to its form, in place: the hook of load_state_dict."""
    own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    for each in getattr(module, _APPLIED):
        own = each.transform_state_dict(own, module)
    state_dict.update({f"{prefix}{name}": value for name, value in own.items()})


def original_state_dict(module: nn.Module) -> StateDict:
    """Return the state_dict of a jitted module in the form that its module had before forge.jit's transforms.

    Args:
        module: A result of forge.jit.

    Returns:
        Names and tensors; quantized weights are dequantized.

    Raises:
        TypeError: If `module` is not a module.
    """
    check(
        isinstance(module, nn.Module),
        lambda: f"forge.original_state_dict: {module!r} is no module",
        TypeError,
    )
    state_dict = dict(module.state_dict())
    for each in reversed(getattr(module, _APPLIED, ())):
        state_dict = each.reverse_transform_state_dict(state_dict, module)
    return state_dict
