"""The signatures of operators, from torch's schemas (parsed by torch) and from Python functions."""

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch

from forge.hub.manifest.errors import InvalidText
from forge.hub.manifest.model import REQUIRED, Parameter, Signature
from forge.ir import TensorProxy
from forge.torch_internals.dispatch import parse_schema as torch_parse_schema

MAX_SCHEMA = 4000

_TENSOR_TYPES = (torch.Tensor, TensorProxy)
_NAMESPACES = ("aten", "prim", "prims", "torch", "c10d", "quantized")
_INTEGER_TYPES = ("int", "Optional[int]")


class InvalidSchema(InvalidText):
    """The error for a text that is not a schema of an operator that forge can define."""


def from_schema(schema: Any) -> Signature:
    """Return the signature of a torch._C.FunctionSchema."""
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return Signature(name, tuple(map(_from_argument, schema.arguments)), len(schema.returns))


def _from_argument(argument: Any) -> Parameter:
    type_name = str(argument.type)
    optional = type_name.startswith("Optional[")
    inner = type_name.removeprefix("Optional[").removesuffix("]") if optional else type_name
    kind = "tensor" if inner == "Tensor" else "tensors" if "Tensor" in inner else "other"
    return Parameter(
        argument.name,
        kind,
        optional=optional,
        default=argument.default_value if argument.has_default_value() else REQUIRED,
        keyword_only=argument.kwarg_only,
        out=_is_written(argument) and argument.kwarg_only,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def parse_schema(text: str, *, namespace: str | None = None) -> Signature:
    """Return the signature that a `func` declares; `namespace` is for a name that has none.

    Raises InvalidSchema with torch's message, which marks the place with a caret, or for errors that torch lets
    through: a wrong out-variant, two arguments with the same name, a default of the wrong type.
    """
    return from_schema(parsed_schema(text, namespace=namespace))


def parsed_schema(text: str, *, namespace: str | None = None) -> Any:
    """Parse like parse_schema, and return the torch._C.FunctionSchema."""
    if len(text) > MAX_SCHEMA or not text.isascii() or not text.isprintable():
        raise InvalidSchema(f"invalid schema: it must be at most {MAX_SCHEMA} printable ASCII characters on one line")
    if namespace is not None:
        text = text.replace("Tensor(?)", "Tensor?")  # as ExecuTorch's documentation writes an optional tensor
    try:
        schema = torch_parse_schema(text)
    except RuntimeError as error:
        raise InvalidSchema(f"invalid schema: {str(error).strip()}") from None
    if "::" not in schema.name and namespace is not None:
        schema = torch_parse_schema(f"{namespace}::{text.strip()}")
    for problem in _schema_problems(schema, torch_namespaces=namespace is not None):
        raise InvalidSchema(f"invalid schema: {problem}")
    return schema


def _schema_problems(schema: Any, *, torch_namespaces: bool) -> Iterator[str]:
    """Yield the problems of a schema that torch's parser accepts but that no operator can have."""
    namespace, separator, _ = schema.name.partition("::")
    if not separator:
        yield f"the name {schema.name!r} has no namespace; write acme::{schema.name}"
    elif namespace in _NAMESPACES and not torch_namespaces:
        yield f"the namespace {namespace!r} is torch's own; use one of your own"
    names = [argument.name for argument in schema.arguments]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"two arguments are called {name!r}"
    for argument in schema.arguments:
        default = argument.default_value if argument.has_default_value() else None
        if isinstance(default, float) and str(argument.type) in _INTEGER_TYPES:
            yield f"the default {default} of {argument.name!r} is no integer"
        if _is_written(argument) and not argument.kwarg_only and not torch_namespaces:
            yield f"{argument.name!r} is changed in place; only keyword-only out arguments may be written to"
    yield from _out_problems(schema)


def _out_problems(schema: Any) -> Iterator[str]:
    outs = [argument for argument in schema.arguments if _is_written(argument)]
    if not outs:
        if schema.overload_name == "out" or schema.overload_name.endswith("_out"):
            yield f"the overload {schema.overload_name!r} has no out argument: write *, Tensor(a!) out"
        if not schema.returns:
            yield "it returns nothing and writes to nothing"
        return
    free = [frozenset(argument.alias_info.before_set) for argument in outs]
    for position, result in enumerate(schema.returns):
        aliases = frozenset(result.alias_info.before_set) if result.alias_info is not None else frozenset()
        if aliases not in free:
            letter = next(iter(sorted(free[0])), "a") if free else "a"
            yield f"result {position} is not an out argument; an out-variant returns Tensor({letter}!)"
            return
        free.remove(aliases)


def from_function(function: Callable, name: str) -> Signature:
    """Return the signature of a Python function, from its annotations; an argument without one accepts anything.

    Raises ValueError or TypeError if the function's parameters are not known.
    """
    signature = python_signature(function)
    parameters = [_from_parameter(parameter) for parameter in signature.parameters.values()]
    return Signature(name, tuple(p for p in parameters if p is not None), _returns(signature.return_annotation))


def python_signature(function: Callable) -> inspect.Signature:
    """Return inspect.signature, with annotations evaluated where possible."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, AttributeError, TypeError):
        return inspect.signature(function)


def _from_parameter(parameter: inspect.Parameter) -> Parameter | None:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    kind, optional = _kind(parameter.annotation)
    rest = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    default = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
    return Parameter(
        parameter.name,
        "tensors" if rest and kind == "tensor" else kind,
        optional=optional or default is None,
        default=default,
        keyword_only=parameter.kind is inspect.Parameter.KEYWORD_ONLY,
        rest=rest,
    )


def _kind(annotation: Any) -> tuple[str, bool]:
    if annotation in (inspect.Parameter.empty, Any) or isinstance(annotation, str):
        return "any", False
    if annotation in _TENSOR_TYPES:
        return "tensor", False
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = {_kind(member)[0] for member in members if member is not type(None)}
        optional = type(None) in members
        return (kinds.pop() if len(kinds) == 1 else "any"), optional
    if any(member in _TENSOR_TYPES for member in members):
        return "tensors", False
    return "other", False


def _returns(annotation: Any) -> int | None:
    if annotation in _TENSOR_TYPES:
        return 1
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and Ellipsis not in members:
        return len(members)
    return None
