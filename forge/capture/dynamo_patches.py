"""Patches of Dynamo for what it misses, or gets wrong, while it captures one of forge's frames."""

import inspect
import linecache
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from forge.capture.autograd_functions import wrong_gradients
from forge.capture.checks import CHECKS, capture_check
from forge.capture.fake_substitutes import STAND_INS
from forge.capture.layers import captured_call, mark_layers
from forge.executors.modules import ModuleExecutor
from forge.torch_internals import dynamo_attributes, dynamo_globals  # noqa: F401  # whose patches are in the table
from forge.torch_internals.dynamo import (
    AttrSource,
    AutogradFunctionApplyVariable,
    AutogradFunctionVariable,
    ConstantVariable,
    DebuggingVariable,
    DictGetItemSource,
    GetItemSource,
    GuardBuilder,
    InliningInstructionTranslator,
    InstructionTranslatorBase,
    LoggingLoggerVariable,
    RandomVariable,
    Source,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
    UnspecializedNNModuleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
    break_graph,
    exc,
    functions,
    graph_break,
    install_guard,
    lists,
    script_object,
)
from forge.torch_internals.dynamo import dynamo_utils as utils
from forge.torch_internals.functorch import maybe_current_level
from forge.torch_internals.patch import Patch, Scope, patch, patches_of
from forge.torch_internals.tensors import DeviceContext

# torch.autograd.Function


@patch(
    FunctionCtx,
    "set_materialize_grads",
    why="a backward would get zeros where set_materialize_grads(False) asks for None",
    upstream="torch/_dynamo/variables/misc.py, AutogradFunctionContextVariable",
)
def _set_materialize_grads(self: FunctionCtx, value: bool) -> None:
    self.materialize_grads = value
    if not value:
        graph_break("the gradients of a torch.autograd.Function that may be None")


@patch(
    FunctionCtx,
    "mark_dirty",
    why="Dynamo does not see that a Function changes its input in place",
    upstream="torch/_dynamo/variables/misc.py, AutogradFunctionContextVariable",
    before=(2, 13),
)
def _mark_dirty(self: FunctionCtx, *tensors: Any) -> None:
    _mark_dirty.original(self, *tensors)
    graph_break("an input that a torch.autograd.Function changes in place")


@patch(
    AutogradFunctionVariable,
    "call_apply",
    why="a Function's own backward is forgotten in torch.func, and in another Function without its source",
)
def _call_apply(self: AutogradFunctionVariable, tx: Any, args: list, kwargs: dict) -> Any:
    if maybe_current_level() is not None:
        break_graph(
            "torch.autograd.Function in a transform of torch.func",
            f"{self.fn_cls.__name__}.apply",
            "Its own backward would be forgotten.",
        )
    if _applying and not linecache.getlines(self.fn_cls.forward.__code__.co_filename):
        break_graph(
            "torch.autograd.Function, without its source, in another one",
            f"{self.fn_cls.__name__}.apply",
            "In a backward, its own would be forgotten; where it is called is told by its source.",
        )
    _applying.append(self.fn_cls)
    try:
        return _call_apply.original(self, tx, args, kwargs)
    finally:
        _applying.pop()


@patch(
    AutogradFunctionApplyVariable,
    "rewire_bwd_graph_outputs",
    why="a backward that gives wrong gradients is not refused, as torch does",
    upstream="torch/_dynamo/variables/higher_order_ops.py, AutogradFunctionApplyVariable",
)
def _rewire(self: AutogradFunctionApplyVariable, *args: Any) -> Any:
    """Match the gradients of a backward with the inputs of its forward. Dynamo drops those without an input, and
    compares no shapes; a wrong backward runs in eager, where torch reports it."""
    *_, found, _, _, given = args
    inputs = [_example(each) for each in given]
    needs = [isinstance(each, torch.Tensor) and each.requires_grad for each in inputs]
    gradients = tuple(map(_example, found.items)) if isinstance(found, lists.TupleVariable) else _example(found)
    problem = wrong_gradients(_applying[-1].__name__, inputs, needs, gradients)
    if problem is not None:
        break_graph(WRONG_BACKWARD, f"{_applying[-1].__name__}.apply", problem, RuntimeError(problem))
    return _rewire.original(self, *args)


def _example(variable: Any) -> Any:
    """Return the value that Dynamo has for a variable: a fake tensor, None, or anything else."""
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    return variable.as_python_constant() if variable.is_python_constant() else variable


WRONG_BACKWARD = "wrong gradients of a torch.autograd.Function"
_applying: list[type] = []  # the Functions whose bodies Dynamo captures now: one frame at a time


# tensors: what autograd knows of them, shapes that change in place


_GETATTR = "var_getattr" if "var_getattr" in vars(TensorVariable) else "tp_getattro_impl"  # since torch 2.14
_UNGUARDED = frozenset({"_base", "_version", "grad_fn", "is_leaf"})
_OF_VIEWS = frozenset("as_strided_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split())


@patch(TensorVariable, "call_method", why="a tensor whose shape changes in place (`y.t_()`) keeps its old shape")
def _call_method(self: TensorVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    """Call a method. A tensor that the program made becomes a view of itself; for others, which outside code may see,
    the graph breaks."""
    if name not in _OF_VIEWS:
        return _call_method.original(self, tx, name, args, kwargs)
    if not _is_own(self, tx):
        break_graph(
            "a tensor's shape changes in place", f"torch.Tensor.{name}", "Others than the program may see the tensor."
        )
    view = _call_method.original(self, tx, name.removesuffix("_"), args, kwargs)
    self.proxy = view.proxy
    self.synchronize_attributes(tx)
    return self


@patch(TensorVariable, _GETATTR, why="what autograd knows of an input (is_leaf, grad_fn) is a constant without a guard")
def _getattr(self: TensorVariable, tx: Any, name: str) -> Any:
    if name in _UNGUARDED and (self.source is not None or name == "_version"):
        break_graph(
            "what autograd knows of a tensor", f"torch.Tensor.{name}", "It may be another one at the next call."
        )
    return _getattr.original(self, tx, name)


def _is_own(tensor: TensorVariable, tx: Any) -> bool:
    """Return whether the program made the tensor, one variable stands for it, and autograd sees what happens to it."""
    fake = tensor.proxy.node.meta["example_value"]
    nodes = [node for node in tx.output.graph.nodes if node.meta.get("example_value") is fake]
    seen = torch.is_grad_enabled() or not fake.requires_grad
    return tensor.source is None and nodes == [tensor.proxy.node] and seen


# settings of the process


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
)
def _call_torch(self: TorchInGraphFunctionVariable, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if self.value in _SETTERS:
        break_graph(
            "a setting of the process changes", f"torch.{self.value.__name__}", "It holds for what follows the program."
        )
    if self.value in STAND_INS:
        self = TorchInGraphFunctionVariable(STAND_INS[self.value])
    if self.value in CHECKS:
        return capture_check(tx, self.value, args, kwargs, call=partial(_call_torch.original, self, tx))
    if self.value is torch.addcdiv and "value" in kwargs and isinstance(args[0], TensorVariable):
        return args[0].call_method(tx, "addcdiv", list(args[1:]), kwargs)  # Dynamo has no steps instead of the method
    if self.value in _OF_NUMBERS and "device" not in kwargs and (device := _device(tx)) is not None:
        kwargs = {**kwargs, "device": ConstantVariable.create(device)}
    return _call_torch.original(self, tx, args, kwargs)


# numbers that are symbols


@patch(
    utils,
    "iter_contains",
    why="a number that is a symbol (a length) is unequal to every constant: `3 in x.shape` is False",
)
def _contains(items: Iterable[Any], search: Any, *others: Any, **options: Any) -> Any:
    items = list(items)
    if search.is_python_constant():
        value = search.as_python_constant()
        if any(_is_equal_symbol(each.realize(), value) for each in items):
            return ConstantVariable.create(True)
    return _contains.original(items, search, *others, **options)


Patch(lists, "iter_contains", _contains.replacement, why="the same, by the name that the module of lists has for it")


def _is_equal_symbol(item: Any, value: Any) -> bool:
    """Return whether a symbolic number, or a sequence with some, equals a constant; guard the answer."""
    if hasattr(item, "sym_num"):
        return bool(item.sym_num == value)
    if not isinstance(item, lists.BaseListVariable) or not isinstance(value, (tuple, list)):
        return False
    if issubclass(item.python_type(), tuple) != isinstance(value, tuple) or len(item.items) != len(value):
        return False
    return all(
        part.as_python_constant() == each if part.is_python_constant() else _is_equal_symbol(part, each)
        for part, each in zip(item.items, value, strict=True)
    )


# methods of classes


@patch(UserMethodVariable, "call_function", why="the methods of a class are constants without a guard")
def _call_function(self: UserMethodVariable, tx: Any, *args: Any, **options: Any) -> Any:
    """Guard the method, and call it. Where the program made its object, Dynamo does not look for the closure."""
    method: Any = self  # since torch 2.15, it holds a function
    owner = method.im_self if _IS_COMPOSED else self.obj
    called = method.im_func if _IS_COMPOSED else self
    function = called.fn if isinstance(called, UserFunctionVariable) else None
    if not isinstance(function, FunctionType) or function.__module__ == torch.nn.Module.__module__:
        return _call_function.original(self, tx, *args, **options)
    found = _guard_method(owner, partial(_name_in, function=function), tx)
    before = {name: getattr(called, name) for name in _SOURCES}
    if called.source is None:
        vars(called).update(dict.fromkeys(_SOURCES, found))
    try:
        return _call_function.original(self, tx, *args, **options)
    finally:
        vars(called).update(before)


@patch(
    UnspecializedNNModuleVariable, "call_function", why="the forward of a module's class is a constant without a guard"
)
def _call_module(self: UnspecializedNNModuleVariable, tx: Any, args: list, kwargs: dict) -> Any:
    _guard_method(self, _forward_in, tx)
    return captured_call(self, tx, args, kwargs, call=partial(_call_module.original, self, tx, args, kwargs))


def _guard_method(owner: Any, name_in: Callable[[type], str | None], tx: Any) -> Source | None:
    """Guard, once a graph, that the class of `owner` which has the method still has this one, and no class before it
    has another. Return where Dynamo finds the method's function."""
    kind, source = _class_of(owner)
    if source is None or (name := name_in(kind)) is None:
        return None
    guarded = vars(tx.output).setdefault("_forge_guarded_methods", set())  # (class, name) pairs
    for position, each in enumerate(kind.__mro__):
        is_there = name in each.__dict__
        members = TypeDictSource(GetItemSource(TypeMROSource(source), position))
        if (id(each), name) not in guarded:
            guarded.add((id(each), name))
            install_guard(_same_method(members, name, each.__dict__[name]) if is_there else _no_method(members, name))
        if is_there:
            return _function_source(members, name, each.__dict__[name])
    return None


def _name_in(kind: type, function: FunctionType) -> str | None:
    """Return the name of the method that is this function; the function's own name may be another."""
    members = (member for each in kind.__mro__ for member in each.__dict__.items())
    names = (name for name, member in members if _function_of(member) is function)
    return next((name for name in names if _function_of(inspect.getattr_static(kind, name)) is function), None)


def _forward_in(kind: type) -> str | None:
    return "forward" if isinstance(inspect.getattr_static(kind, "forward", None), FunctionType) else None


def _function_of(member: Any) -> Any:
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _class_of(owner: Any) -> tuple[type, Source | None]:
    """Return the class in which a method of `owner` is looked up, and where Dynamo finds it (None: the program made
    it)."""
    if type(owner).__module__ == script_object.__name__:  # Dynamo's stand-in for a process group, say, and its class
        return object, None
    if isinstance(owner, UserDefinedClassVariable):  # a class method's
        return owner.value, owner.source
    if isinstance(owner, UserDefinedObjectVariable):
        return type(owner.value), owner.cls_source or (owner.source and TypeSource(owner.source))
    return object, None


def _function_source(members: Source, name: str, member: Any) -> Source:
    source: Source = DictGetItemSource(members, name)
    return source if _function_of(member) is member else AttrSource(source, "__func__")


def _same_method(members: Source, name: str, member: Any) -> Any:
    """Guard the method's code. One with a closure or defaults, which make others of the same code, is guarded by
    identity."""
    source, function = _function_source(members, name, member), _function_of(member)
    varies = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    return source.make_guard(GuardBuilder.FUNCTION_MATCH if varies else GuardBuilder.CLOSURE_MATCH)


def _no_method(members: Source, name: str) -> Any:
    if hasattr(GuardBuilder, "DICT_NOT_CONTAINS"):
        return members.make_guard(partial(GuardBuilder.DICT_NOT_CONTAINS, key=name))
    return members.make_guard(partial(GuardBuilder.DICT_CONTAINS, key=name, invert=True))  # before torch 2.12


_IS_COMPOSED = "im_self" in inspect.signature(UserMethodVariable).parameters  # since torch 2.15
_SOURCES = ("source",) if _IS_COMPOSED else ("source", "source_fn")


# what the program may catch: since torch 2.15, what Dynamo says of a call that fails, in other words than eager's


@patch(
    InstructionTranslatorBase,
    "exception_handler",
    why="the program may catch an error that torch raises of fake tensors alone",
    since=(2, 15),
)
def _handle(self: InstructionTranslatorBase, raised: Exception) -> None:
    if isinstance(raised, vars(exc)["FakeTensorObservedException"]):
        raise exc.TorchRuntimeError(str(raised), raised.real_stack)
    _handle.original(self, raised)


@patch(
    InliningInstructionTranslator,
    "build_inline_tracer",
    why="the program may catch Dynamo's own error of arguments that a function does not take",
    since=(2, 15),
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


# generators of random numbers


@patch(
    RandomVariable, "call_method", why="a random.Random of the caller's draws the numbers of the first call for ever"
)
def _draw(self: RandomVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    if self.source is not None:
        break_graph(
            "a random.Random of the caller's", f"random.Random.{name}", "Its state is another one at the next call."
        )
    return _draw.original(self, tx, name, args, kwargs)


# what is logged


@patch(LoggingLoggerVariable, "call_method", why="a call of a logger breaks the graph")
def _log(self: LoggingLoggerVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    """Call a method of a logging.Logger. With constants as arguments, the calls run in order after the graph."""
    method = getattr(type(self.value), name, None)
    is_loggers = name in _LOGGING and method is not None and method is getattr(logging.Logger, name, None)
    constant = not kwargs and all(isinstance(each, ConstantVariable) for each in args)
    if self.source is None or not is_loggers or not constant:
        return _log.original(self, tx, name, args, kwargs)
    called = DebuggingVariable(method, source=AttrSource(self.source, name))
    tx.output.root_tx.debug_locals.append((called, list(args)))
    return ConstantVariable.create(None)


@patch(utils, "warn_once", why="Dynamo warns of a graph break, of which forge.explain tells")
def _warn_once(message: str, *args: Any, **kwargs: Any) -> None:
    if not message.startswith("Dynamo does not know how to trace"):
        _warn_once.original(message, *args, **kwargs)


# they return nothing; the last two are those that the transformers library adds to the class
_LOGGING = frozenset("critical debug error info log warn warning info_once warning_once".split())


@contextmanager
def capture_scope(layers: ModuleExecutor | None = None) -> Iterator[None]:
    """Enter the patches under which Dynamo captures one of forge's frames; `layers` may replace the forward of
    modules."""
    with ExitStack() as stack:
        stack.enter_context(mark_layers(layers))
        for each in patches_of(Scope.CAPTURE):
            stack.enter_context(each)
        yield
