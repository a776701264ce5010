"""A kernel function as an implementation of a symbol: its calls are recorded in the trace as they will run.

There is no wrapper function around the kernel: when a call is claimed, the adapter records the operations that it
needs (the allocation of an output that it writes to, a layout fix-up), then the kernel's call with its own arguments.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from forge.executors.executor import Decision, Implementation, decline
from forge.executors.hubex.adapters import adapt
from forge.executors.hubex.assumptions import AssumingKernel, Assumption, reference_of
from forge.executors.hubex.extension import ExtensionLoader
from forge.executors.hubex.operators import Target, make_checker
from forge.hub.lockfile import Lock
from forge.hub.manifest import (
    Argument,
    DimOrder,
    KernelArgument,
    KernelEntry,
    Layout,
    OrderAlias,
    Signature,
    empty_in_order,
    fix,
    fix_ups,
    own_arguments,
)
from forge.hub.policy import Policy
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy, check, current_trace, get_grad, needs_grad, put_grad
from forge.ir.pytree import tensors, tree_map
from forge.patterns import Pattern
from forge.patterns.reference import object_at
from forge.torchlang.opaque import record_with_graph, run_opaque_backward, run_opaque_forward

Verdict = Callable[["Kernel", tuple, dict], Decision]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Origin:
    """A kernel's source and the options of its resolution, from which another process can load it. source: None for a
    function registered in Python. content: a hash of its files."""

    source: str | None = None
    content: str = ""
    backend: str | None = None
    policy: Policy | None = field(default=None, compare=False)
    lock: Lock | str | Path | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class OwnForward:
    """A module's own forward, the reference of a layer, in the role of a pattern."""

    reference: Callable
    name: str
    tensors: list[str]


@dataclass(frozen=True)
class Kernel:
    """A kernel and the operation that it implements.

    entry: its manifest entry. signature: the operator's. target: the symbol. function: the kernel function. backward:
    its gradient kernel, if the entry names one; forward: the function that runs instead if a gradient is needed.
    pattern: the pattern that matches its calls, if the target is a pattern's symbol. assumes: a predicate of the values
    of a call; samples: a factory of such values. declared: the arguments of forge.kernel: (op, fn, options). builtin:
    whether it comes with forge and was not requested. particular: whether it is for the calls of one program only, and
    verified only on them. extension: for a kernel by class, the loader of its function and its placeholder until then.
    """

    entry: KernelEntry
    signature: Signature
    target: Target
    function: Callable = field(hash=False)
    backward: Callable | None = None
    forward: Callable | None = None
    pattern: Pattern | OwnForward | None = None
    origin: Origin = Origin()
    assumes: Callable | None = None
    samples: Callable | None = None
    declared: tuple[Any, Callable, dict[str, Any]] | None = field(default=None, compare=False)
    builtin: bool = field(default=False, compare=False)
    particular: bool = field(default=False, compare=False)
    extension: ExtensionLoader | None = field(default=None, compare=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        library = self.entry.library
        object.__setattr__(self, "name", f"{library}.{self.entry.name}" if library else self.entry.name)

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {self.target.symbol.id}>"

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Return what pickle makes a kernel from: its name in a module where a decorator put it, or its declaration.
        Raises TypeError for one of a repository."""
        if self.declared is None:
            raise TypeError(f"cannot pickle {self!r}: give forge.jit its repository in place of it")
        op, fn, options = self.declared
        if object_at(fn.__module__, fn.__qualname__) is self:
            return pkgutil.resolve_name, (f"{fn.__module__}:{fn.__qualname__}",)
        declare = import_module("forge.executors.hubex.declaration").kernel  # which imports this module
        return partial(declare, op, fn, **options), ()

    def unusable(self) -> str | None:
        """Return the extension's reason why this machine cannot use the kernel; None if it can."""
        return None if self.extension is None else self.extension.unusable()

    def load(self) -> str | None:
        """Load the function unless it is loaded. Return the reason of a failure, else None."""
        if self.extension is None or self.is_loaded:
            return None
        reason = self.extension.load()
        if reason is None:
            object.__setattr__(self, "function", self.extension.function)
            assert self.declared is not None, "an extension is declared in Python"
            op, _, options = self.declared
            object.__setattr__(self, "declared", (op, self.function, options))
        return reason

    @property
    def is_loaded(self) -> bool:
        return self.extension is None or self.function is not self.extension

    @property
    def operation(self) -> str:
        """Return the name of the operation, as `forge.kernel` takes it."""
        return f"pattern:{self.entry.op}" if self.entry.op_kind == "pattern" else self.entry.op

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of its first constrained argument; floating-point dtypes if none is declared."""
        return next((alias.dtypes for alias in self.entry.dtypes.values()), FLOATS)

    @property
    def devices(self) -> list[torch.device]:
        """Return the devices that the kernel supports and this machine has."""
        types = self.entry.device.types if self.entry.device is not None else ("cpu", "cuda")
        return [torch.device(kind) for kind in types if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without checks."""
        return self.function(*args, **kwargs)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Map a call of the symbol to the operator's arguments by name."""
        values = self.target.signature.bind(args, kwargs)
        return {theirs: values[ours] for ours, theirs in self.target.names.items() if ours in values}


def compares_values(kernel: Kernel) -> bool:
    """Return whether there is a reference for a kernel's values."""
    function = kernel.target.function
    if function is None or function.reference is not None:
        return True
    return function.foreign and not function.is_run_by(kernel.function)


def implementation(
    kernel: Kernel, verdict: Verdict | None = None, *, checked: bool = True, faster: bool = True
) -> Implementation:
    """Return a kernel as an implementation for the claim pass: its constraints as a checker, its call, its gradient.

    verdict: returns whether the kernel was verified for such arguments; called after the constraints. checked: whether
    the constraints are checked. faster: whether to decline calls for which the kernel was not measured to be faster.
    """
    constraints = make_checker(kernel.entry, kernel.signature, kernel.target, faster=faster)
    kind = kernel.entry.grad.kind

    def checker(*args: Any, **kwargs: Any) -> Decision:
        reason = kernel.unusable()
        if reason is not None:
            return decline(reason)
        decision = constraints(*args, **kwargs)
        if not decision:
            return decision
        reason = kernel.load()
        if reason is not None:
            return decline(reason)
        return decision if verdict is None else verdict(kernel, args, kwargs)

    caller = cache(lambda: _Caller(kernel))
    if kernel.is_loaded:
        caller()

    def method(name: str) -> Callable:
        return lambda *args, **kwargs: getattr(caller(), name)(*args, **kwargs)

    rules = {"kernel": "rule", "autograd": "autograd_rule"}
    return Implementation(
        kernel.target.symbol,
        None,
        checker if checked else None,
        execution_transform=method("forward"),
        grad_transform=method(rules[kind]) if kind in rules else None,
        grad={"none": "none", "composite": "recompute"}.get(kind, "decompose"),
        name=kernel.name,
        low_priority=kernel.builtin,
    )


class _Caller:
    """The recorder of a kernel's calls in the current trace."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.layouts = fix_ups(kernel.entry)
        grad = kernel.entry.grad
        self.always_saves = bool(grad.saves) and grad.forward is None
        out = kernel.entry.out
        saving_out = (*out, *grad.saves) if out else ()
        self.copied = frozenset(kernel.entry.mutates)
        function: Callable = adapt(kernel.function, kernel.entry.args, out, kernel.entry.result)
        if kernel.assumes is not None:
            reference = reference_of(kernel.target, kernel.pattern)
            function = AssumingKernel(function, Assumption(kernel.assumes), reference, kernel.bind, out)
        self.op = self._operator("", function, saving_out if self.always_saves else out)
        forward = kernel.forward and adapt(kernel.forward, kernel.entry.args, out)
        self.forward_op = self._operator("_forward", forward, saving_out) if grad.forward else self.op
        backward = kernel.backward and adapt(kernel.backward, grad.args, grad.out, grad.result)
        self.backward_op = self._operator("_backward", backward, grad.out)
        self.contiguous = _promises_contiguous(kernel)
        self.graph_ops = (
            self._operator("_forward", _run_with_graph_contiguous if self.contiguous else run_with_graph, ()),
            self._operator("_backward", run_opaque_backward, ()),
        )

    def _operator(self, suffix: str, function: Callable | None, out: tuple[str | int, ...]) -> Symbol:
        kernel = self.kernel
        place = f"hub.{kernel.name}{suffix.replace('_', '.')}"
        tags = frozenset({Tag.SYNCHRONIZING} if isinstance(function, AssumingKernel) else ())  # it reads tensor values
        name = f"{kernel.entry.name}{suffix}"
        return Symbol(name, place, meta=_no_meta, executor=kernel, op=function, out=out, tags=tags)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the kernel instead of a call of the symbol."""
        return self._run(self.op, args, kwargs, self.always_saves)[0]

    def rule(self, *args: Any, **kwargs: Any) -> Any:
        """Record the kernel for the forward and its gradient kernel for the backward. Return NotImplemented if a needed
        gradient is not among the backward's results."""
        grad = self.kernel.entry.grad
        values = self.kernel.bind(args, kwargs)
        others = [value for name, value in values.items() if name not in grad.returns]
        if any(map(needs_grad, tensors(others))):
            return NotImplemented
        output, saved = self._run(self.forward_op, args, kwargs, bool(grad.saves))
        incoming = self._results_and_gradients(tensors(output))
        in_layout = {name: self.in_layout(name, value) for name, value in values.items()}
        gradients = tuple(map(_gradient_like, (values[name] for name in grad.returns)))
        arguments = {
            name: _copies(value) if name in grad.mutates else value
            for name, value in {**in_layout, **incoming, **saved}.items()
        }
        call = self._backward_arguments(arguments, {name: arguments[name] for name in saved})
        _call(self.backward_op, call, gradients[0] if len(gradients) == 1 else gradients)
        for name, gradient in zip(grad.returns, gradients, strict=True):
            if gradient is not None:
                put_grad(values[name], gradient)
        return output

    def autograd_rule(self, *args: Any, **kwargs: Any) -> Any:
        """Record a kernel that torch's autograd differentiates; its autograd graph is kept for the backward."""
        values = self.kernel.bind(args, kwargs)
        with current_trace().collecting():
            output = self.kernel.target.symbol(*args, **kwargs)
        in_layout = {name: self.argument(name, value) for name, value in values.items()}
        pairs = zip(tensors(list(in_layout.values())), tensors(list(values.values())), strict=True)
        targets = {proxy.name: argument for proxy, argument in pairs if needs_grad(argument)}
        call_args, call_kwargs = self._arguments(in_layout)
        if self.kernel.assumes is not None:
            ours = {argument.name: name for name, argument in targets.items()}
            by_name = {each.name: each for each in tensors(list(in_layout.values()))}
            call = tree_map(lambda leaf: by_name.get(ours.get(getattr(leaf, "name", ""), ""), leaf), (args, kwargs))
            call_args = [call, *call_args]
        record_with_graph(self.graph_ops, (self.op.op, tuple(call_args), call_kwargs), output, targets)
        return output

    def _run(self, op: Symbol, args: tuple, kwargs: dict, saving: bool) -> tuple[Any, dict[str, TensorProxy]]:
        """Record a call. Return the result, and the saved tensors by name."""
        values = self.kernel.bind(args, kwargs)
        with current_trace().collecting():
            output = self.kernel.target.symbol(*args, **kwargs)
        saved = self._saved_tensors(values) if saving else {}
        arguments = self._arguments({name: self.argument(name, value) for name, value in values.items()})
        outputs = tree_map(_like, output) if self.contiguous else output
        results = (*tensors(outputs), *saved.values()) if saved else outputs
        _call(op, arguments, results, before=((args, kwargs),) if isinstance(op.op, AssumingKernel) else ())
        if self.contiguous:
            for result, proxy in zip(tensors(outputs), tensors(output), strict=True):
                current_trace().record(BoundSymbol(_CONTIGUOUS, (result,), {}, proxy))
        return output, saved

    def _arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the kernel's arguments."""
        args = self.kernel.entry.args
        return _own_arguments(self.kernel.signature, values) if args is None else _arguments(args, values)

    def _backward_arguments(self, values: Mapping[str, Any], saved: dict) -> tuple[list[Any], dict[str, Any]]:
        parameters = self.kernel.entry.grad.args
        if parameters is not None:
            return _arguments(parameters, values)
        args, kwargs = self._arguments(values)
        gradients = [value for name, value in values.items() if name.startswith("grad_output")]
        return [*gradients, *args], {**kwargs, **saved}

    def _results_and_gradients(self, results: list[TensorProxy]) -> dict[str, TensorProxy]:
        """Return the results and their gradients, by their names in a manifest."""
        values = {}
        for i, result in enumerate(results):
            suffix = f"_{i}" if len(results) > 1 else ""
            values[f"grad_output{suffix}"] = _fix(get_grad(result), Layout(order=DimOrder()))
            values[f"output{suffix}"] = result
        return values

    def _saved_tensors(self, values: Mapping[str, Any]) -> dict[str, TensorProxy]:
        """Return proxies for the forward's saved tensors, from their declared dtypes and shapes."""
        entry = self.kernel.entry
        shapes = [(pattern, x.shape) for name, pattern in entry.shape.items() for x in tensors(values.get(name))]
        dims: dict[str, Any] = {}
        for pattern, shape in shapes:
            pattern.mismatch(shape, dims)
        middle = next((pattern.middle(shape) for pattern, shape in shapes if pattern.rest is not None), ())
        dtypes = {alias.name: tensors(values.get(name)) for name, alias in entry.dtypes.items()}
        first = tensors(values)[0]
        saves = {}
        for name, saved in entry.grad.saves.items():
            dtype = saved.dtype.dtypes[0] if len(saved.dtype.dtypes) == 1 else dtypes[saved.dtype.name][0].dtype
            saves[name] = current_trace().tensor(saved.shape.of(dims, middle), dtype, first.device)
        return saves

    def argument(self, name: str, value: Any) -> Any:
        """Return an argument as the kernel takes it: in the declared layout, and copied if the kernel overwrites it."""
        value = self.in_layout(name, value)
        return _copies(value) if name in self.copied else value

    def in_layout(self, name: str, value: Any) -> Any:
        """Return a tensor argument in the layout that the kernel declares for it."""
        layout = self.layouts.get(name)
        if layout is None or not isinstance(value, TensorProxy):
            return value
        return _fix(value, layout)


def run_with_graph(function: Callable, args: tuple, kwargs: dict, positions: tuple[int, ...]) -> tuple:
    """Return (outputs, graph) of a kernel that torch's autograd differentiates. Raises RuntimeError for kernels without
    an autograd graph."""
    output, graph = run_opaque_forward(function, args, kwargs, positions)
    check(
        any(each.requires_grad for each in graph.outputs),
        lambda: "its result has no grad_fn: torch's autograd does not differentiate it, which grad: autograd promises",
        RuntimeError,
    )
    return output, graph


def _run_with_graph_contiguous(function: Callable, args: tuple, kwargs: dict, positions: tuple[int, ...]) -> tuple:
    """Run as `run_with_graph` does and make the results contiguous, which leaves their gradients unchanged."""
    output, graph = run_with_graph(function, args, kwargs, positions)
    return tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf, output), graph


GRAPH_FUNCTIONS = run_with_graph, _run_with_graph_contiguous, run_opaque_backward  # of graphs, not the kernel's own


def _promises_contiguous(kernel: Kernel) -> bool:
    """Return whether a program assumes contiguous results (forge/executors/hubex/functions.py) that the kernel does not
    guarantee: it allocates them itself, or writes them in a declared dim order."""
    function = kernel.target.function
    defined = function is not None and not function.foreign
    return defined and (not kernel.entry.out or bool(kernel.entry.orders))


def _no_meta(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel's calls are written by its adapter")


def _gradient_like(value: Any) -> TensorProxy | None:
    """Return a proxy for the gradient of an argument; None for arguments without one."""
    return _like(value) if isinstance(value, TensorProxy) and value.dtype.is_floating_point else None


def _like(x: TensorProxy) -> TensorProxy:
    return current_trace().tensor(x.shape, x.dtype, x.device)


def _arguments(parameters: Iterable[KernelArgument], values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the kernel's arguments, by position and by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in parameters:
        value = _value(each.value.name, values) if isinstance(each.value, Argument) else each.value.value
        if each.parameter is None:
            args.append(value)
        else:
            kwargs[each.parameter] = value
    return args, kwargs


def _value(name: str, values: Mapping[str, Any]) -> Any:
    check(name in values, lambda: f"a kernel asks for {name}; there are {', '.join(values)}")
    return values[name]


def _own_arguments(signature: Signature, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the operator's arguments, as in its signature."""
    positional, keywords = own_arguments(signature)
    args = [values[name] for name in positional if name in values]
    return args, {name: values[name] for name in keywords if name in values}


def _call(op: Symbol, arguments: tuple[list[Any], dict[str, Any]], output: Any, before: tuple = ()) -> None:
    """Record a call of a kernel that returns `output`, or that writes to memory allocated here. before: arguments that
    precede the kernel's."""
    args, kwargs = arguments
    trace = current_trace()
    if op.out:
        orders = op.executor.entry.orders
        memory = {
            place: _allocate(proxy, orders.get(place)) for place, proxy in zip(op.out, tensors(output), strict=True)
        }
        for place in sorted(place for place in memory if isinstance(place, int)):
            args.insert(place, memory[place])
        kwargs = kwargs | {place: proxy for place, proxy in memory.items() if isinstance(place, str)}
    trace.record(BoundSymbol(op, (*before, *args), kwargs, output))


def _allocate(like: TensorProxy, alias: OrderAlias | None) -> TensorProxy:
    """Record the allocation of a result that a kernel writes, in its declared dim order."""
    memory = _like(like)
    order = alias.orders[0] if alias is not None else DimOrder()
    if order.dims is not None and not order.is_contiguous and len(order.dims) == memory.ndim:
        args = tuple(memory.shape), order.dims, memory.dtype, memory.device
        current_trace().record(BoundSymbol(_ALLOCATE_IN, args, {}, memory))
        return memory
    options = {"dtype": memory.dtype, "device": memory.device}
    current_trace().record(BoundSymbol(ALLOCATE, (tuple(memory.shape),), options, memory))
    return memory


ALLOCATE = Symbol("allocate", "hub.allocate", meta=_no_meta, tags=frozenset({Tag.UNINITIALIZED}), op=torch.empty)
_ALLOCATE_IN = Symbol(
    "allocate_in", "hub.allocate_in", meta=_no_meta, tags=frozenset({Tag.UNINITIALIZED}), op=empty_in_order
)
_COPY = Symbol("copy", "hub.copy", meta=_no_meta, tags=frozenset({Tag.UNINITIALIZED}), op=torch.clone)
_CONTIGUOUS = Symbol("contiguous", "hub.contiguous", meta=_no_meta, op=torch.Tensor.contiguous)
_FIX = Symbol("fix", "hub.fix", meta=_no_meta, op=fix)


def _copies(value: Any) -> Any:
    """Record a copy of each tensor, which the kernel may overwrite."""
    return tree_map(lambda leaf: _copy(leaf) if isinstance(leaf, TensorProxy) else leaf, value)


def _copy(value: TensorProxy) -> TensorProxy:
    copy = _like(value)
    current_trace().record(BoundSymbol(_COPY, (value,), {}, copy))
    return copy


def _fix(value: TensorProxy, layout: Layout) -> TensorProxy:
    result = _like(value)
    symbol, args = (_CONTIGUOUS, ()) if layout == Layout(order=DimOrder()) else (_FIX, (layout,))
    current_trace().record(BoundSymbol(symbol, (value, *args), {}, result))
    return result
