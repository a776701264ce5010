"""Dynamo: its bytecode translator, variables, guards and settings."""

import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import disable as disable
from torch._dynamo import eval_frame as eval_frame
from torch._dynamo import exc as exc
from torch._dynamo import graph_break as graph_break
from torch._dynamo import guards as dynamo_guards
from torch._dynamo import mark_static as mark_static
from torch._dynamo import optimize as optimize
from torch._dynamo import register_backend as register_backend
from torch._dynamo import symbolic_convert as symbolic_convert
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.registry import lookup_backend as lookup_backend
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.eval_frame import OptimizeContext as OptimizeContext
from torch._dynamo.eval_frame import innermost_backend as innermost_backend
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import ObservedAttributeError as ObservedAttributeError
from torch._dynamo.exc import RecompileError as RecompileError
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
from torch._dynamo.exc import Unsupported as DynamoUnsupported
from torch._dynamo.exc import raise_observed_exception as raise_observed_exception
from torch._dynamo.exc import unimplemented as unimplemented
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.guards import GuardBuilder as GuardBuilder
from torch._dynamo.guards import install_guard as install_guard
from torch._dynamo.repro.after_dynamo import WrapBackendDebug as WrapBackendDebug
from torch._dynamo.source import AttrSource as AttrSource
from torch._dynamo.source import DictGetItemSource as DictGetItemSource
from torch._dynamo.source import GetItemSource as GetItemSource
from torch._dynamo.source import GlobalSource as GlobalSource
from torch._dynamo.source import Source as Source
from torch._dynamo.source import TypeDictSource as TypeDictSource
from torch._dynamo.source import TypeMROSource as TypeMROSource
from torch._dynamo.source import TypeSource as TypeSource
from torch._dynamo.source import UnspecializedParamBufferSource as UnspecializedParamBufferSource
from torch._dynamo.source import is_from_unspecialized_nn_module_source as is_from_unspecialized_nn_module_source
from torch._dynamo.symbolic_convert import InliningInstructionTranslator as InliningInstructionTranslator
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
from torch._dynamo.symbolic_convert import InstructionTranslatorBase as InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn as ConvertFrameReturn
from torch._dynamo.types import FrameAction as FrameAction
from torch._dynamo.types import FrameExecStrategy as FrameExecStrategy
from torch._dynamo.utils import counters as counters
from torch._dynamo.utils import get_compilation_metrics as get_compilation_metrics
from torch._dynamo.utils import graph_break_reasons as graph_break_reasons
from torch._dynamo.utils import numpy_to_tensor_wrapper as numpy_to_tensor_wrapper
from torch._dynamo.variables import AutogradFunctionVariable as AutogradFunctionVariable
from torch._dynamo.variables import BuiltinVariable as BuiltinVariable
from torch._dynamo.variables import ConstantVariable as ConstantVariable
from torch._dynamo.variables import PythonModuleVariable as PythonModuleVariable
from torch._dynamo.variables import SymNodeVariable as SymNodeVariable
from torch._dynamo.variables import TensorVariable as TensorVariable
from torch._dynamo.variables import TorchInGraphFunctionVariable as TorchInGraphFunctionVariable
from torch._dynamo.variables import UnspecializedNNModuleVariable as UnspecializedNNModuleVariable
from torch._dynamo.variables import UserDefinedClassVariable as UserDefinedClassVariable
from torch._dynamo.variables import UserDefinedDictVariable as UserDefinedDictVariable
from torch._dynamo.variables import UserDefinedObjectVariable as UserDefinedObjectVariable
from torch._dynamo.variables import UserFunctionVariable as UserFunctionVariable
from torch._dynamo.variables import UserMethodVariable as UserMethodVariable
from torch._dynamo.variables import builtin as builtin
from torch._dynamo.variables import dicts as dicts
from torch._dynamo.variables import functions as functions
from torch._dynamo.variables import lists as lists
from torch._dynamo.variables import script_object as script_object
from torch._dynamo.variables.base import VariableTracker as VariableTracker
from torch._dynamo.variables.builder import VariableBuilder as VariableBuilder
from torch._dynamo.variables.builder import wrap_fx_proxy as wrap_fx_proxy
from torch._dynamo.variables.ctx_manager import CatchWarningsCtxManagerVariable as CatchWarningsCtxManagerVariable
from torch._dynamo.variables.functions import SkipFunctionVariable as SkipFunctionVariable
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable as AutogradFunctionApplyVariable
from torch._dynamo.variables.lists import ListVariable as ListVariable
from torch._dynamo.variables.lists import SizeVariable as SizeVariable
from torch._dynamo.variables.lists import TupleVariable as TupleVariable
from torch._dynamo.variables.misc import DebuggingVariable as DebuggingVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable as LoggingLoggerVariable
from torch._dynamo.variables.misc import RandomVariable as RandomVariable
from torch._dynamo.variables.misc import StringFormatVariable as StringFormatVariable
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing as is_fx_symbolic_tracing
from torch.fx.experimental import _config

shapes_config: Any = _config  # torch makes it a ConfigModule, with `patch`, as it is imported
reset_code = torch._C._dynamo.eval_frame.reset_code
set_code_exec_strategy = torch._C._dynamo.eval_frame.set_code_exec_strategy
set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

try:  # torch 2.12 and later; an earlier one gives the graph an input that has to run in eager
    from torch._higher_order_ops.register_hook import register_hook_op
except ImportError:
    register_hook_op = None  # type: ignore[assignment]  # the name of an operator that is not there


def break_graph(reason: str, context: str, explanation: str, cause: Exception | None = None) -> NoReturn:
    """Break the graph that Dynamo captures; the reason is that of the graph break in forge.explain."""
    more: dict[str, Any] = {} if cause is None else {"from_exc": cause}
    unimplemented(gb_type=reason, context=context, explanation=explanation, hints=[], **more)


class BackendChain:
    """A callback of Dynamo's around another one, through which Dynamo finds the backend of a cache entry.

    Args:
        inner: the callback or backend inside.
    """

    def __init__(self, inner: Callable) -> None:
        self._torchdynamo_orig_backend = self.call_inner = inner


def inner_backend(callback: Any) -> Any:
    """Return what is inside of a callback of Dynamo's, None where nothing is."""
    return getattr(callback, "_torchdynamo_orig_backend", None)


def entries_of_others(code: CodeType, backend: Any) -> int:
    """Return the number of cache entries of `code` that backends other than `backend` compiled."""
    return sum(entry.backend is not backend for entry in eval_frame._debug_get_cache_entry_list(code))


class _ReleasedGuards(DeletedGuardManagerWrapper):
    """The guards of a program that nobody calls any more. Dynamo counts it among those of its frame's code whose guards
    are about the same objects, of which there is a limit: these are about another one."""

    def __init__(self) -> None:
        super().__init__("its jitted function is gone")
        self.id_matched_objs = {"": lambda: self}  # type: ignore[dict-item]


_PROGRAM = "__compiled_fn"  # the global that is the program which a backend returned


def release_programs(codes: Sequence[tuple[weakref.ref[CodeType], weakref.ref[CodeType]]], backend: Any) -> None:
    """Let go of what a backend compiled, of which nobody will call it any more.

    Dynamo frees a program with the code that it made of a frame. The cache of the frame's own code has that, which in a
    function or a class of the user's lives on; tracebacks have it, too: those in the metrics of later frames and in
    the flight recorder of collectives.

    Args:
        codes: Of each frame its own code and the code that Dynamo made of it.
        backend: A weak reference to the backend.
    """
    for own, compiled in codes:
        code = own()
        for entry in () if code is None else eval_frame._debug_get_cache_entry_list(code):
            guards = entry.guard_manager
            if entry.backend is backend() and guards.extra_state is not None:
                guards.extra_state.invalidate(entry, _ReleasedGuards())
        compiled_code = compiled()
        for hook in () if compiled_code is None else dynamo_utils.CleanupManager.instance.get(compiled_code, ()):
            if hook.name.startswith(_PROGRAM):  # others may be of several codes
                hook.scope[hook.name] = None


def original_module(compiled: Any) -> Any:
    """Return the module that torch.compile was given, None for what it did not make of a module."""
    return getattr(compiled, "_orig_mod", None)


def original_function(compiled: Any) -> Any:
    """Return the function that torch.compile was given, None for what it did not make of a function."""
    return getattr(compiled, "_torchdynamo_orig_callable", None)


def compiled_call(module: torch.nn.Module) -> Callable | None:
    """Return the function that `module.compile()` has the module call, None for a module without one."""
    return getattr(module, "_compiled_call_impl", None)


def current_stance() -> Any:
    """Return the stance (torch.compiler.set_stance) that this process is in."""
    return eval_frame._stance
