"""Conditions on numbers that are known only at run time: the program's own (torch._check and its kin, `assert`), and
those under which Dynamo captured it.

A graph calls a `Check` for each of the program's own, which raises eager's error. For an assumption of Dynamo's
(torch.zeros(n) assumes that n is not negative), it calls `_assert_scalar`. If such an assumption does not hold, the
graph runs in eager, where the call in question raises.
"""

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from forge import prims
from forge.ir.proxies import NUMBER_TYPES
from forge.torch_internals import dynamo_checks
from forge.torch_internals.dynamo import (
    BuiltinVariable,
    ConstantVariable,
    SizeVariable,
    StringFormatVariable,
    SymNodeVariable,
    raise_observed_exception,
    wrap_fx_proxy,
)
from forge.torch_internals.dynamo import LazyGraphModule as _LazyGraphModule
from forge.torch_internals.dynamo_checks import format_value
from forge.torch_internals.fake_tensors import is_fake
from forge.torch_internals.functions import (
    torch_assert,
    torch_check,
    torch_check_index,
    torch_check_is_size,
    torch_check_not_implemented,
    torch_check_tensor_all,
    torch_check_tensor_all_with,
    torch_check_type,
    torch_check_value,
    torch_check_with,
)

ASSUMES = torch.ops.aten._assert_scalar.default

# the exception of each function; None if it is an argument
CHECKS: dict[Callable, type[Exception] | None] = {
    torch_assert: AssertionError,
    torch_check: RuntimeError,
    torch_check_index: IndexError,
    torch_check_is_size: RuntimeError,
    torch_check_not_implemented: NotImplementedError,
    torch_check_tensor_all: RuntimeError,
    torch_check_tensor_all_with: None,
    torch_check_type: TypeError,
    torch_check_value: ValueError,
    torch_check_with: None,
}
_OF_TENSORS = frozenset({torch_check_tensor_all, torch_check_tensor_all_with})


class Check:
    """A check as graphs call it: raises `error` unless the condition, a bool or a tensor of bools, holds.

    message: text, a function of the call's further arguments, or None for torch's own.
    """

    def __init__(self, error: type[Exception], message: str | Callable[..., str] | None) -> None:
        self.error = error
        self.message = message
        self.__name__ = "check"

    def __call__(self, condition: Any, *values: Any) -> None:
        if isinstance(condition, torch.SymBool):
            torch_check(condition)  # for later calls
        elif not is_fake(condition) and not condition:
            prims.fail(self.error, self.message, *values)


# checks, as Dynamo captures them


def capture_check(tx: Any, function: Callable, args: list, kwargs: dict, call: Callable) -> Any:
    """Replace a call of one of CHECKS by one of a Check. `call` is Dynamo's own, for arguments that torch
    rejects."""
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return call(args, kwargs)
    error = CHECKS[function] or arguments["error_type"].as_python_constant()
    message = arguments.get("message")
    if function is torch_check_is_size:
        _add_size_check(tx, error, message, arguments["i"], arguments.get("max"))
        return call([arguments["i"]], {})  # Dynamo learns that it is a size
    condition = arguments["condition" if function is torch_assert else "cond"]
    if not _takes(function, condition):
        return call(args, kwargs)
    if function in _OF_TENSORS:
        condition = condition.call_method(tx, "all", [], {})
    add_check(tx, error, condition, message)
    return ConstantVariable.create(None)


def _takes(function: Callable, condition: Any) -> bool:
    if condition.is_tensor():
        return (function in _OF_TENSORS and condition.dtype is torch.bool) or function is torch_assert
    value = condition.as_python_constant() if condition.is_python_constant() else getattr(condition, "sym_num", None)
    return isinstance(value, (bool, torch.SymBool)) and function not in _OF_TENSORS


def _add_size_check(tx: Any, error: type[Exception], message: Any, size: Any, longest: Any) -> None:
    for compare, bound in ((operator.ge, ConstantVariable.create(0)), (operator.le, longest)):
        if bound is not None:
            add_check(tx, error, BuiltinVariable(compare).call_function(tx, [size, bound], {}), message)


@dynamo_checks.add_check.provide
def add_check(tx: Any, error: type[Exception], condition: Any, message: Any) -> None:
    holds = _is_known(tx, condition)
    if holds is True:
        return
    message = _captured_message(tx, message)
    if holds is not None:
        raise_observed_exception(error, tx, args=[] if message is None else [message])
    text = None
    if message is not None:
        text = message.as_python_constant() if message.is_python_constant() else _Message(message)
    arguments = (condition.as_proxy(), *getattr(text, "proxies", ()))
    wrap_fx_proxy(tx, tx.output.create_proxy("call_function", Check(error, text), arguments, {}))


def _is_known(tx: Any, condition: Any) -> bool | None:
    """Return whether a condition holds, if that is known now, or guarded; else None."""
    if condition.is_python_constant():
        return condition.as_python_constant()
    if not isinstance(condition, SymNodeVariable):
        return None
    if not free_unbacked_symbols(condition.sym_num):
        return bool(condition.evaluate_expr(tx.output))
    return False if statically_known_true(torch.sym_not(condition.sym_num)) else None


def _captured_message(tx: Any, message: Any) -> Any:
    """Return the text of a message: a constant, a format, or None for torch's own."""
    if message is None or (message.is_python_constant() and message.as_python_constant() is None):
        return None
    with format_value:
        text = message if issubclass(message.python_type(), str) else message.call_function(tx, [], {})
    if text.is_python_constant():
        return ConstantVariable.create(str(text.as_python_constant()))
    return text if isinstance(text, StringFormatVariable) else StringFormatVariable("{}", [text], {})


class _Message:
    """A format string, some of whose values are known only at run time: a function of these."""

    def __init__(self, variable: StringFormatVariable) -> None:
        self.format = variable.format_string
        self.names = list(variable.sym_kwargs)
        self.proxies: list[Any] = []
        self.parts: list[Callable[[Iterator], Any]] = []
        for part in (*variable.sym_args, *variable.sym_kwargs.values()):
            self._add(part)

    def _add(self, part: Any) -> None:
        if part.is_python_constant():
            self.parts.append(partial(_constant, part.as_python_constant()))
        elif isinstance(part, SizeVariable):
            self.parts.append(lambda values: torch.Size(next(values)))
            self.proxies.append(tuple(each.as_proxy() for each in part.items))
        else:
            self.parts.append(next)
            self.proxies.append(part.as_proxy())

    def __call__(self, *values: Any) -> str:
        rest = iter(values)
        parts = [part(rest) for part in self.parts]
        count = len(parts) - len(self.names)
        return self.format.format(*parts[:count], **dict(zip(self.names, parts[count:], strict=True)))


def _constant(value: Any, values: Iterator) -> Any:
    return value


# checks in a program


def assumptions_last(graph: GraphModule) -> None:
    """Move Dynamo's assumptions to the end of a graph and of its nested graphs: in eager, the call that needs one, or a
    check, raises first. A program checks them as soon as the numbers are known (`checks_of`)."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(inner := operator.attrgetter(node.target)(graph), GraphModule):
            assumptions_last(inner)
    output, *others = reversed(graph.graph.nodes)
    tail = {output}
    place = output
    for node in others:
        if node.target is ASSUMES or (computes_number(node) and node.users and tail.issuperset(node.users)):
            place.prepend(node)
            place = node
            tail.add(node)
    if place is not output:
        graph.recompile()
        _LazyGraphModule.force_recompile(graph)  # else torch prints the graph if it raises


def computes_number(node: Node) -> bool:
    """Return whether a node computes on numbers alone and returns no tensor, unlike `torch.rand(n)`."""
    if isinstance(node.meta.get("example_value"), torch.Tensor):
        return False
    of = [each.meta.get("example_value") for each in node.all_input_nodes]
    return node.op == "call_function" and bool(of) and all(isinstance(each, NUMBER_TYPES) for each in of)


def checks_of(graph: Graph) -> list[Node]:
    """Return the program's own checks, then Dynamo's assumptions: if both fail, eager raises the program's
    error."""
    own = [node for node in graph.nodes if isinstance(node.target, Check)]
    return own + list(graph.find_nodes(op="call_function", target=ASSUMES))
