"""Calls of a Dynamo graph that stand for more than a call: modes that it enters, nested graphs, hooks."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from forge import prims
from forge.capture import higher_order
from forge.capture.autograd_functions import from_graphs, run_alone
from forge.capture.operator_graphs import record_graphs, run_graphs
from forge.compiler.program import Unsupported
from forge.ir import Symbol, Tag, TensorProxy, Trace, get_grad, put_grad
from forge.torch_internals.autograd import (
    enter_autocast,
    enter_inference_mode,
    exit_autocast,
    exit_inference_mode,
    set_grad_enabled,
)
from forge.torch_internals.functorch import lazy_load_decompositions, predispatch_enter_dual_level
from forge.torch_internals.tensors import log_api_usage_once
from forge.torchlang import autocast_mode
from forge.torchlang.partial_draws import begin_partial_draw, end_partial_draw


class Interpreter(Protocol):
    """The recording of a graph, as markers see it. scopes: open scopes of autocast and inference mode."""

    trace: Trace
    scopes: list[Any]

    def inline(self, graph: GraphModule, args: tuple) -> Any:
        """Inline a nested graph on values of this one."""

    def inline_operators(self, graph: GraphModule, args: tuple) -> Any:
        """Inline a nested graph whose calls are all known."""


def _ignore(interpreter: Interpreter, *args: Any, **kwargs: Any) -> None:
    return None


def _enter_autocast(interpreter: Interpreter, *args: Any) -> Any:
    return _enter(interpreter, torch.autocast(*args))


def _enter_inference_mode(interpreter: Interpreter, mode: bool) -> Any:
    return _enter(interpreter, torch.inference_mode(mode))


def _enter(interpreter: Interpreter, scope: Any) -> Any:
    """Enter a scope on this thread, in which the graph's calls inside are recorded; return it."""
    scope.__enter__()
    interpreter.scopes.append(scope)
    return scope


def _exit(interpreter: Interpreter, scope: Any) -> None:
    interpreter.scopes.remove(scope)
    scope.__exit__(None, None, None)


def _checkpoint(interpreter: Interpreter, body: GraphModule, *args: Any, **options: Any) -> Any:
    """Return the body inlined, its calls tagged: the backward recomputes their results."""
    trace = interpreter.trace
    with trace.set_tags(trace.tags | {Tag.RECOMPUTE}):
        return interpreter.inline(body, args)


def _inline(interpreter: Interpreter, body: GraphModule, *args: Any) -> Any:
    return interpreter.inline(body, args)


def _in_grad_mode(interpreter: Interpreter, mode: bool, body: GraphModule, *args: Any) -> Any:
    with torch.set_grad_enabled(mode):
        return interpreter.inline(body, args)


def _under_autocast(
    interpreter: Interpreter, device: str, dtype: Any, enabled: bool, cache: Any, body: GraphModule, *args: Any
) -> Any:
    with torch.autocast(device, dtype, enabled, cache):
        return interpreter.inline(body, args)


def _autograd_function(
    interpreter: Interpreter, forward: GraphModule, backward: GraphModule, *args: Any, **options: Any
) -> Any:
    return from_graphs(interpreter.inline, forward, backward, options).record(args)


def _operator_graphs(
    interpreter: Interpreter, forward: GraphModule, backward: GraphModule, constant: tuple, *args: Any
) -> tuple:
    with autocast_mode.disable():
        return record_graphs(interpreter.inline_operators, forward, backward, constant, args)


def _register_hook(interpreter: Interpreter, x: TensorProxy, hook: GraphModule, *sizes: Any) -> Any:
    """Return a hook on a value's gradient: a second handle, which all calls take, and whose gradient the hook
    changes."""
    memory = interpreter.trace.memory

    def body(x: TensorProxy, *sizes: Any) -> TensorProxy:
        return prims.alias(x)

    def rule(x: TensorProxy, *sizes: Any) -> TensorProxy:
        out = prims.alias(x)
        gradient = get_grad(out)
        run = run_alone(lambda g: interpreter.inline(hook, (g, *sizes)), (gradient,), lambda result: ())
        output = run.result[0] if isinstance(run.result, tuple) else run.result
        put_grad(x, _hook_result(gradient, output))
        return out

    output = Symbol("register_hook", "torch.Tensor.register_hook", body=body, rule=rule)(memory.read(x), *sizes)
    memory.share(output, x, "register_hook")
    return output


def _hook_result(gradient: TensorProxy, result: TensorProxy | None) -> TensorProxy:
    """Return a gradient after a hook: None leaves it unchanged. Raises Unsupported for one that autograd
    rejects."""
    if result is None:
        return gradient
    alike = (result.ndim, result.dtype, result.device) == (gradient.ndim, gradient.dtype, gradient.device)
    if not alike or any(prims.statically_true(a != b) for a, b in zip(result.shape, gradient.shape, strict=True)):
        raise Unsupported("a hook changes the shape, dtype or device of a gradient")
    return result


def _enter_dual_level(interpreter: Interpreter) -> None:
    raise Unsupported("the graph differentiates in forward mode")


MARKERS: dict[Any, Callable] = {
    torch.ops.higher_order.autograd_function_apply: _autograd_function,
    torch.ops.higher_order.tag_activation_checkpoint: _checkpoint,
    torch.ops.higher_order.wrap: _inline,
    torch.ops.higher_order.invoke_subgraph: lambda interpreter, body, name, *args: interpreter.inline(body, args),
    torch.ops.higher_order.hints_wrapper: lambda interpreter, body, args, kwargs, hints: interpreter.inline(body, args),
    torch.ops.higher_order.wrap_with_autocast: _under_autocast,
    torch.ops.higher_order.wrap_with_set_grad_enabled: _in_grad_mode,
    lazy_load_decompositions: _ignore,
    predispatch_enter_dual_level: _enter_dual_level,
    set_grad_enabled: lambda interpreter, mode: set_grad_enabled(mode),
    begin_partial_draw: lambda interpreter, device, offset: prims.begin_partial_draw(device, offset),
    end_partial_draw: lambda interpreter, device, offset: prims.end_partial_draw(device, offset),
    enter_inference_mode: _enter_inference_mode,
    exit_inference_mode: _exit,
    log_api_usage_once: _ignore,
    enter_autocast: _enter_autocast,
    exit_autocast: _exit,
    run_graphs: _operator_graphs,
}
if higher_order.REGISTER_HOOK is not None:
    MARKERS[higher_order.REGISTER_HOOK] = _register_hook
