"""Patches of Dynamo: methods of classes, which it takes for constants without a guard."""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    AttrSource,
    DictGetItemSource,
    GetItemSource,
    GuardBuilder,
    Source,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
    UnspecializedNNModuleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
    install_guard,
    script_object,
)
from forge.torch_internals.patch import Hook, patch

capture_module: Hook[[UnspecializedNNModuleVariable, Any, list, dict, Callable[[], Any]], Any] = Hook(
    "capture a call of a module"
)


@patch(
    UserMethodVariable,
    "call_function",
    why="the methods of a class are constants without a guard",
    issue="https://github.com/pytorch/pytorch/issues/197860",
    upstream="torch/_dynamo/variables/functions.py:1656@2.13.0, UserMethodVariable.call_function",
)
def _call_function(self: UserMethodVariable, tx: Any, *args: Any, **options: Any) -> Any:
    """Guard the method, and call it. Where the program made its object, Dynamo does not look for the closure."""
    method: Any = self  # since torch 2.15, it holds a function
    owner = method.im_self if _IS_COMPOSED else self.obj
    callee = method.im_func if _IS_COMPOSED else self
    function = callee.fn if isinstance(callee, UserFunctionVariable) else None
    if not isinstance(function, FunctionType) or function.__module__ == torch.nn.Module.__module__:
        return _call_function.original(self, tx, *args, **options)
    source = _guard_method(owner, partial(_name_in, function=function), tx)
    before = {name: getattr(callee, name) for name in _SOURCES}
    if callee.source is None:
        vars(callee).update(dict.fromkeys(_SOURCES, source))
    try:
        return _call_function.original(self, tx, *args, **options)
    finally:
        vars(callee).update(before)


@patch(
    UnspecializedNNModuleVariable,
    "call_function",
    why="the forward of a module's class is a constant without a guard",
    issue="https://github.com/pytorch/pytorch/issues/197860",
    upstream="torch/_dynamo/variables/nn_module.py:1098@2.13.0, UnspecializedNNModuleVariable.call_function",
)
def _call_module(self: UnspecializedNNModuleVariable, tx: Any, args: list, kwargs: dict) -> Any:
    _guard_method(self, _forward_in, tx)
    return capture_module(self, tx, args, kwargs, partial(_call_module.original, self, tx, args, kwargs))


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
