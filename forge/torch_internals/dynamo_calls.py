"""Patches of Dynamo: calls of torch's functions, generators and loggers, and their errors."""

import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    AttrSource,
    CatchWarningsCtxManagerVariable,
    ConstantVariable,
    DebuggingVariable,
    GlobalSource,
    InliningInstructionTranslator,
    InstructionTranslatorBase,
    LoggingLoggerVariable,
    RandomVariable,
    SkipFunctionVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    break_graph,
    exc,
    functions,
    lists,
)
from forge.torch_internals.dynamo import dynamo_utils as utils
from forge.torch_internals.patch import Hook, patch
from forge.torch_internals.tensors import DeviceContext

capture_call: Hook[[Any, Callable, Any, dict[str, Any], Callable[[Callable, Any, dict], Any]], Any] = Hook(
    "capture a call of a function of torch"
)

_SETTERS = frozenset(
    {
        torch.set_autocast_dtype,
        torch.set_autocast_enabled,
        torch.set_default_dtype,
        torch.set_deterministic_debug_mode,
        torch.use_deterministic_algorithms,
    }
)


_OF_NUMBERS = frozenset({torch.as_tensor, torch.tensor})


def _device(tx: Any) -> torch.device | None:
    """Return the device of `torch.set_default_device`, or of `with torch.device(…)` around the program."""
    modes = [mode.value for mode in tx.symbolic_torch_function_state.mode_stack]
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


@patch(
    TorchInGraphFunctionVariable,
    "call_function",
    why="settings of the process change while capturing alone; checks are dropped; functions that look at values fail; "
    "torch 2.11 forgets the default device",
    issue="https://github.com/pytorch/pytorch/issues/112787",
    upstream="torch/_dynamo/variables/torch.py:3053@2.13.0, TorchInGraphFunctionVariable.call_function",
)
def _call_torch(self: TorchInGraphFunctionVariable, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if self.value in _SETTERS:
        break_graph(
            "a setting of the process changes", f"torch.{self.value.__name__}", "It holds for what follows the program."
        )
    return capture_call(tx, self.value, args, kwargs, partial(_call_function, self, tx))


def _call_function(
    self: TorchInGraphFunctionVariable, tx: Any, function: Callable, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Capture a call as Dynamo does, with the arguments that it does not know, or forgets."""
    if function is torch.addcdiv and "value" in kwargs and isinstance(args[0], TensorVariable):
        # Dynamo has no steps that replace the method
        return args[0].call_method(tx, "addcdiv", list(args[1:]), kwargs)
    if function is torch.as_tensor and len(args) == 1 and isinstance(args[0], lists.BaseListVariable):
        function = torch.tensor  # the same of a list, which Dynamo captures with tensors in it, too
    if function in _OF_NUMBERS and "device" not in kwargs and (device := _device(tx)) is not None:
        kwargs = {**kwargs, "device": ConstantVariable.create(device)}
    callee = self if function is self.value else TorchInGraphFunctionVariable(function)
    return _call_torch.original(callee, tx, args, kwargs)


@patch(
    utils,
    "run_node",
    why="a call that reads a tensor's value in C++ (`x[:, (i, j)]`) fails on fake tensors, and not in eager",
    issue="not reported: no issue is of a sequence of tensors as an index",
    upstream="torch/_dynamo/utils.py:4200@2.13.0, run_node",
)
def _run_node(tracer: Any, node: Any, *others: Any) -> Any:
    try:
        return _run_node.original(tracer, node, *others)
    except RuntimeError as failure:
        if _NO_DATA not in str(failure):
            raise
        break_graph(
            "a call reads the value of a tensor", str(node.target), "A sequence of tensors may be an index.", failure
        )


_NO_DATA = "its data is not allocated yet"  # torch's error of a fake tensor's memory


@patch(
    InstructionTranslatorBase,
    "exception_handler",
    why="the program may catch an error that torch raises of fake tensors alone",
    issue="https://github.com/pytorch/pytorch/pull/184990",
    upstream="torch/_dynamo/symbolic_convert.py:2904@2.14.1, InstructionTranslatorBase.exception_handler",
    since=(2, 15),
    not_probed="tests/capture/test_runs_in_eager.py has programs, for torch 2.15",
)
def _handle(self: InstructionTranslatorBase, raised: Exception) -> None:
    if isinstance(raised, vars(exc)["FakeTensorObservedException"]):
        raise exc.TorchRuntimeError(str(raised), raised.real_stack)
    _handle.original(self, raised)


@patch(
    InliningInstructionTranslator,
    "build_inline_tracer",
    why="the program may catch Dynamo's own error of arguments that a function does not take",
    issue="https://github.com/pytorch/pytorch/pull/190797",
    upstream="torch/_dynamo/symbolic_convert.py:6064@2.14.1, InliningInstructionTranslator.build_inline_tracer",
    since=(2, 15),
    not_probed="tests/capture/test_runs_in_eager.py has programs, for torch 2.15",
)
def _inline(parent: Any, function: Any, args: list, kwargs: dict, *others: Any, **options: Any) -> Any:
    try:
        return _inline.original(parent, function, args, kwargs, *others, **options)
    except exc.ObservedTypeError as raised:
        if not isinstance(raised.__context__, vars(functions)["BindArgsTypeError"]):
            raise
        break_graph(
            WRONG_ARGUMENTS,
            f"func='{function.get_name()}' {function.get_filename()}:{function.get_code().co_firstlineno};",
            str(raised.__context__),
            TypeError(str(raised.__context__)),
        )


WRONG_ARGUMENTS = "failed to bind arguments when attempting to inline"  # Dynamo's own words before torch 2.15


@patch(
    RandomVariable,
    "call_method",
    why="a random.Random of the caller's draws the numbers of the first call for ever",
    issue="https://github.com/pytorch/pytorch/issues/145445",
    upstream="torch/_dynamo/variables/misc.py:2450@2.13.0, RandomVariable.call_method",
)
def _draw(self: RandomVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    if self.source is not None:
        break_graph(
            "a random.Random of the caller's", f"random.Random.{name}", "Its state is another one at the next call."
        )
    return _draw.original(self, tx, name, args, kwargs)


@patch(
    LoggingLoggerVariable,
    "call_method",
    why="a call of a logger breaks the graph",
    issue="https://github.com/pytorch/pytorch/issues/132635",
    upstream="torch/_dynamo/variables/misc.py:2174@2.13.0, LoggingLoggerVariable.call_method",
)
def _log(self: LoggingLoggerVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    """Call a method of a logging.Logger. With constants as arguments, the calls run in order after the graph."""
    method = getattr(type(self.value), name, None)
    is_loggers = name in _LOGGING and method is not None and method is getattr(logging.Logger, name, None)
    constant = not kwargs and all(isinstance(each, ConstantVariable) for each in args)
    if self.source is None or not is_loggers or not constant:
        return _log.original(self, tx, name, args, kwargs)
    callee = DebuggingVariable(method, source=AttrSource(self.source, name))
    tx.output.root_tx.debug_locals.append((callee, list(args)))
    return ConstantVariable.create(None)


@patch(
    SkipFunctionVariable,
    "call_function",
    why="a call of warnings.warn breaks the graph",
    issue="https://github.com/pytorch/pytorch/issues/132635",
    upstream="torch/_dynamo/variables/functions.py:2263@2.13.0, SkipFunctionVariable.call_function",
)
def _call_skipped(self: SkipFunctionVariable, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that is not traced. Warnings are given after the graph, as those of eager's lines."""
    warning = _warning(tx, *args, **kwargs) if self.value is warnings.warn else None
    if warning is None:
        return _call_skipped.original(self, tx, args, kwargs)
    root = tx.output.root_tx
    callee = DebuggingVariable(warning, source=GlobalSource(root.output.install_global("__warning", warning)))
    root.debug_locals.append((callee, []))
    return ConstantVariable.create(None)


def _warning(
    tx: Any, message: Any, category: Any = None, stacklevel: Any = None, source: Any = None, **others: Any
) -> Callable[[], None] | None:
    """Return a function that gives a warning; None where it depends on values, or filters that the program sets."""
    arguments = [each for each in (message, category, stacklevel) if each is not None]
    if source is not None or others or not all(each.is_python_constant() for each in arguments):
        return None
    text, kind = message.as_python_constant(), UserWarning if category is None else category.as_python_constant()
    if type(text) is not str or not (isinstance(kind, type) and issubclass(kind, Warning)):
        return None
    frame = _frame_of(tx, 1 if stacklevel is None else stacklevel.as_python_constant())
    if frame is None:
        return None
    return partial(_warn, text, kind, frame.f_code.co_filename, frame.lineno, frame.f_globals.get("__name__"))


def _frame_of(tx: Any, level: int) -> Any:
    """Return the frame that a warning's stacklevel counts to; None where Dynamo does not know it, or a frame sets
    filters of its own."""
    frames = [tx]
    while frames[-1].parent is not None:
        frames.append(frames[-1].parent)
    sets_filters = any(
        isinstance(block.with_context, CatchWarningsCtxManagerVariable) for each in frames for block in each.block_stack
    )
    if sets_filters or not 1 <= level <= len(frames):
        return None
    frame = frames[level - 1]
    is_own = str(frame.f_globals.get("__name__")).startswith("forge.")  # what calls the program
    return None if is_own else frame


def _warn(message: str, category: type[Warning], filename: str, line: int, module: str | None) -> None:
    scope = vars(sys.modules[module]) if module in sys.modules else {}
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, filename, line, module, registry)


@patch(
    utils,
    "warn_once",
    why="Dynamo warns of a graph break, of which forge.explain tells",
    issue="https://github.com/pytorch/pytorch/issues/149586",
    upstream="torch/_dynamo/utils.py:5442@2.13.0, warn_once",
)
def _warn_once(message: str, *args: Any, **kwargs: Any) -> None:
    if not message.startswith("Dynamo does not know how to trace"):
        _warn_once.original(message, *args, **kwargs)


# they return nothing; the last two are those that the transformers library adds to the class
_LOGGING = frozenset("critical debug error info log warn warning info_once warning_once".split())
