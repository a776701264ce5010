"""Gradient rules: one function that runs the forward and interleaves the backward.

    @register_grad(exp2)
    def _exp2_grad(x):
        out = exp2(x)
        put_grad(x, get_grad(out) * out * math.log(2))
        return out

`get_grad(out)` reads the incoming gradient, `put_grad(arg, g)` adds one. A rule runs while a joint trace is
recorded (forge/transforms/grad.py); calls that its result does not need belong to the backward.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from forge.ir.checks import check
from forge.ir.proxies import TensorProxy
from forge.ir.symbol import Symbol
from forge.ir.trace import current_trace

F = TypeVar("F", bound=Callable[..., Any])
_rules: dict[str, Callable[..., Any]] = {}


def register_grad(symbol: Symbol) -> Callable[[F], F]:
    """Register the decorated function as the gradient rule of `symbol`. Raises ValueError on a second rule."""

    def register(rule: F) -> F:
        check(symbol.id not in _rules, lambda: f"register_grad: {symbol.id} already has a gradient rule")
        _rules[symbol.id] = rule
        return rule

    return register


def grad_rule(symbol: Symbol) -> Callable[..., Any] | None:
    """Return the symbol's own rule, or None."""
    return symbol.rule or _rules.get(symbol.id)


class RuleCall:
    """The gradients that one run of a rule read and made. `gets` pairs an output with the proxy of its gradient;
    `puts` are an argument, its gradient, and the outputs without whose gradients it is None. `before` is the number of
    calls recorded before the first read. `ends`: the rule set the gradient of an argument to None."""

    __slots__ = ("active", "before", "ends", "gets", "puts", "targets")

    def __init__(self, active: Callable[[TensorProxy], bool]) -> None:
        self.active = active
        self.before: int | None = None
        self.ends = False
        self.gets: list[tuple[TensorProxy, TensorProxy]] = []
        self.targets: list[TensorProxy] = []
        self.puts: list[tuple[TensorProxy, TensorProxy, tuple[TensorProxy, ...]]] = []


class _CurrentCall(threading.local):
    call: RuleCall | None = None


_current = _CurrentCall()


def run_rule(rule: Callable[..., Any], call: RuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a rule; its gets and puts are appended to `call`."""
    before = _current.call
    _current.call = call
    try:
        return rule(*args, **kwargs)
    finally:
        _current.call = before


def get_grad(output: TensorProxy) -> TensorProxy:
    """Return the incoming gradient of an output of the rule; shape, dtype and device are the output's."""
    call = _rule_call("get_grad")
    for existing, gradient in call.gets:
        if existing is output:
            return gradient
    trace = current_trace()
    if call.before is None:
        call.before = trace.calls_in_scope
    gradient = trace.tensor(output.shape, output.dtype, output.device, name="g_" + output.name)
    call.gets.append((output, gradient))
    return gradient


def put_grad(argument: Any, gradient: TensorProxy | None, *, of: tuple[TensorProxy, ...] = ()) -> None:
    """Add to the gradient of an argument of the rule.

    of: outputs without whose gradients this one is None, because gradients of zeros would not yield zeros (0 / 0).

    As in torch's autograd engine, a gradient of a shape that the argument expands to is summed to the argument's; one
    of any other shape is an error; one of another dtype is converted. Gradients of arguments that are not tensors, or
    need none, are dropped.
    """
    if _is_target("put_grad", argument) and gradient is not None:
        _rule_call("put_grad").puts.append((argument, gradient, of))


def end_grad(argument: Any) -> None:
    """Set an argument's gradient to None although the outputs whose gradients the rule read have a history, as for
    torch's x.norm(0)."""
    if _is_target("end_grad", argument):
        _rule_call("end_grad").ends = True


def _is_target(name: str, argument: Any) -> TypeGuard[TensorProxy]:
    """Return whether an argument needs a gradient, which the rule gives it."""
    call = _rule_call(name)
    if isinstance(argument, TensorProxy):
        call.targets.append(argument)
    return isinstance(argument, TensorProxy) and call.active(argument)


def needs_grad(argument: Any) -> TypeGuard[TensorProxy]:
    """Return whether a rule's argument is a tensor that needs a gradient; a rule may skip work for others."""
    return isinstance(argument, TensorProxy) and _rule_call("needs_grad").active(argument)


def _rule_call(name: str) -> RuleCall:
    if _current.call is None:
        raise RuntimeError(f"{name} was called outside of a gradient rule")
    return _current.call
