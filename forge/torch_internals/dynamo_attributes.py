"""Guards on attributes that an object does not have, and on the keys of its `__dict__`. Dynamo installs none for most
ways to look for them: a program would take the branch of its first call for ever."""

import inspect
from collections.abc import Callable, Sized
from functools import partial
from types import WrapperDescriptorType
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    AttrSource,
    BuiltinVariable,
    ConstantVariable,
    GuardBuilder,
    ObservedAttributeError,
    PythonModuleVariable,
    TensorVariable,
    UserDefinedDictVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    break_graph,
    builtin,
    dicts,
    install_guard,
    is_from_unspecialized_nn_module_source,
    symbolic_convert,
)
from forge.torch_internals.patch import Scope, patch


def _get(obj: Any, name: str | None, original: Callable, default: Any = None) -> Any:
    """Return `obj.name` or `getattr(obj, name, default)`, which `original` gives, guarded. A name that is no constant
    is None: Dynamo refuses it."""
    _refuse_empty_dict(obj, name)
    try:
        variable = original()
    except ObservedAttributeError:
        _guard_absence(obj, name)
        raise
    if default is not None and variable is default:
        _guard_absence(obj, name)
    elif name == "__dict__":
        _guard_keys(obj)
    return variable


def _look(obj: Any, name: str | None, original: Callable) -> Any:
    """Return `hasattr(obj, name)`, which `original` gives, guarded."""
    _refuse_empty_dict(obj, name)
    variable = original()
    if variable is not None and variable.is_constant_match(False):
        _guard_absence(obj, name)
    return variable


def _constant(name: Any) -> str | None:
    """Return the name that a variable of Dynamo's stands for."""
    return name.as_python_constant() if name.is_python_constant() else None


def _refuse_empty_dict(obj: Any, name: str | None) -> None:
    """Break the graph for an empty object of a dict's subclass: torch guards its items, and then looks no further."""
    if not isinstance(obj, UserDefinedDictVariable) or obj.source is None:
        return
    if isinstance(obj.value, Sized) and len(obj.value):
        return
    if name is not None and not hasattr(type(obj.value), name):
        break_graph(
            "an attribute of an empty dict", f"{type(obj.value).__name__}.{name}", "torch checks no guard on it."
        )


def _guard_keys(obj: Any) -> None:
    """Guard which attributes the `__dict__` of an object, a function or a Python module has."""
    if obj.source is not None and isinstance(obj, _WITH_DICTS):
        install_guard(AttrSource(obj.source, "__dict__").make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _guard_absence(obj: Any, name: str | None) -> None:
    """Guard that an object has no attribute of this name. Where its class computes attributes, that code is captured
    and has guards of its own; it is not run to check one: the keys of the object's `__dict__` are guarded."""
    if obj.source is None or isinstance(obj, ConstantVariable) or name is None:
        return
    if isinstance(obj, UserDefinedObjectVariable) and _is_computed(obj.value, name):
        if hasattr(obj.value, "__dict__"):
            _guard_keys(obj)
    elif isinstance(obj, TensorVariable) and is_from_unspecialized_nn_module_source(obj.source) and not _SINCE_213:
        break_graph(
            "an attribute that a tensor of a module does not have",
            f"torch.Tensor.{name}",
            "Before torch 2.13, no guard on it is checked.",
        )
    elif _SINCE_212:
        install_guard(obj.source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
    else:
        install_guard(AttrSource(obj.source, name).make_guard(GuardBuilder.HASATTR))


def _is_computed(value: Any, name: str) -> bool:
    """Return whether a class has code that looks this attribute up."""
    kind = type(value)
    computes = getattr(kind, "__getattr__", None) not in (None, torch.nn.Module.__getattr__)
    replaces = not isinstance(kind.__getattribute__, WrapperDescriptorType)
    return computes or replaces or isinstance(inspect.getattr_static(kind, name, None), property)


_ISSUE = "https://github.com/pytorch/pytorch/issues/111522"  # closed, for attributes that are there
_WHY = "no guard tells that an attribute is absent: one that an object gets later is never seen"


@patch(
    BuiltinVariable,
    "call_vars",
    why="the keys of a __dict__ that is read are not guarded",
    issue="not reported: no issue is of the keys that vars() gives",
    upstream="torch/_dynamo/variables/builtin.py:1362@2.13.0, BuiltinVariable.call_vars",
    not_probed="tests/capture/test_attributes.py has programs, several together",
)
def _vars(self: BuiltinVariable, tx: Any, *args: Any, **kwargs: Any) -> Any:
    variable = _vars.original(self, tx, *args, **kwargs)
    if args:
        _guard_keys(args[0].realize())
    return variable


@patch(
    getattr(builtin, "GetAttrBuiltinVariable", BuiltinVariable),
    "_call_getattr",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/builtin.py:3088@2.13.0, GetAttrBuiltinVariable._call_getattr",
    since=(2, 13),
)
def _getattr(self: Any, tx: Any, args: list, kwargs: dict) -> Any:
    default = args[2] if len(args) > 2 else None
    return _get(args[0], _constant(args[1]), partial(_getattr.original, self, tx, args, kwargs), default)


@patch(
    getattr(builtin, "HasAttrBuiltinVariable", BuiltinVariable),
    "call_function",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/builtin.py:3283@2.13.0, HasAttrBuiltinVariable.call_function",
    since=(2, 13),
)
def _hasattr(self: Any, tx: Any, args: Any, kwargs: dict) -> Any:
    return _look(args[0].realize(), _constant(args[1]), partial(_hasattr.original, self, tx, args, kwargs))


@patch(
    BuiltinVariable,
    "call_getattr",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/builtin.py:2599@2.11.0, BuiltinVariable.call_getattr",
    before=(2, 13),
    not_probed="tests/capture/test_attributes.py has programs, many of which fail without both",
)
def _getattr_of_a_builtin(self: BuiltinVariable, tx: Any, obj: Any, name: Any, default: Any = None) -> Any:
    return _get(obj, _constant(name), partial(_getattr_of_a_builtin.original, self, tx, obj, name, default), default)


@patch(
    BuiltinVariable,
    "call_hasattr",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/builtin.py:2526@2.11.0, BuiltinVariable.call_hasattr",
    before=(2, 13),
    not_probed="tests/capture/test_attributes.py has programs, many of which fail without both",
)
def _hasattr_of_a_builtin(self: BuiltinVariable, tx: Any, obj: Any, name: Any) -> Any:
    return _look(obj, _constant(name), partial(_hasattr_of_a_builtin.original, self, tx, obj, name))


@patch(
    symbolic_convert,
    "generic_getattr",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/symbolic_convert.py:3350@2.14.1, generic_getattr",
    since=(2, 14),
    before=(2, 15),
)
def _load(tx: Any, obj: Any, name: str) -> Any:
    return _get(obj, name, partial(_load.original, tx, obj, name))


_ProxyDict: Any = getattr(dicts, "SideEffectsProxyDict", dict)  # of `__dict__`, in later versions than torch 2.11


class _CurrentProxyDict(_ProxyDict):
    @property
    def side_effects(self) -> Any:
        return self._first.output_graph_weakref().side_effects

    @side_effects.setter
    def side_effects(self, first: Any) -> None:
        self._first = first


@patch(
    getattr(dicts, "DunderDictVariable", UserDefinedDictVariable),
    "__init__",
    why="what an object is assigned after a call of a higher-order operator (flex_attention) is lost, where the object "
    "is older: a model that makes a cache of keys runs in eager as a whole",
    issue="https://github.com/pytorch/pytorch/pull/195954",
    upstream="torch/_dynamo/variables/dicts.py:1576@2.13.0, DunderDictVariable.__init__",
    since=(2, 12),
    before=(2, 15),
)
def _refer_to_current_side_effects(self: Any, vt: Any, tx: Any, **kwargs: Any) -> None:
    _refer_to_current_side_effects.original(self, vt, tx, **kwargs)
    if isinstance(self.items, _ProxyDict):
        self.items = _CurrentProxyDict(vt, tx)


_WITH_DICTS = (UserDefinedObjectVariable, UserFunctionVariable, PythonModuleVariable)
_SINCE_212 = "attr" in inspect.signature(GuardBuilder.HASATTR).parameters  # since torch 2.12
_SINCE_213 = hasattr(builtin, "GetAttrBuiltinVariable")  # since torch 2.13
