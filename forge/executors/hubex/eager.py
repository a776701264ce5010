"""Operators of manifests in torch.library: torch.ops.acme.f runs in eager and under torch.compile, and is
differentiable.

The first kernel that takes the tensors runs, else the reference. It is selected once per metadata of the arguments:
one call is traced as a program, which forge claims, differentiates and compiles like any other.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from forge.compiler.claim import choose
from forge.compiler.standalone import claim
from forge.executors.calls import format_arguments
from forge.executors.hubex.derived import record_call, with_backward
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.functions import Function, find_function, has_fake, register
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.process import verifying
from forge.executors.hubex.verification.verification_cache import verifier
from forge.executors.registry import resolve_executors
from forge.ir import BoundSymbol, Tag, Trace, check
from forge.ir.locks import new_lock
from forge.ir.pytree import leaves, names
from forge.torch_internals.dispatch import (
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    destroy_library,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
)
from forge.torch_internals.pytree import tensor_leaves, torch_pytree
from forge.transforms.cse import argument_key
from forge.transforms.dce import live_calls

LIMIT = 1024  # cache entries per operator, by metadata of the arguments
BACKWARD = "forge"  # the namespace of the operators that compute gradients

Tensors = list[torch.Tensor]
Values = dict[str, Any]


class Eager:
    """The function that torch runs for one operator."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.executor = HubExecutor("eager", verifier)
        self.others = resolve_executors(["torch"])
        self._compiled: dict[tuple, Callable | None] = {}
        self._running = threading.local()

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Add kernels of the operator; a kernel replaces an earlier one of the same name."""
        by_name = {kernel.name: kernel for kernel in (*self.executor.kernels, *kernels)}
        self.executor = HubExecutor("eager", verifier)
        self.executor.add(by_name.values())
        self._compiled = {}

    def _cached_call(self, key: tuple, make: Callable[[], Callable | None]) -> Callable | None:
        """Return the cached result of `make` for arguments with this key, which has all metadata on which a program
        depends."""
        if verifying.active:  # this process verifies a kernel that calls the operator
            return make()
        compiled = self._compiled
        if key not in compiled:
            if len(compiled) >= LIMIT:
                compiled.clear()
            compiled[key] = make()
        return compiled[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on real tensors. Raises NotImplementedError with each kernel's reason if there is no
        implementation for them."""
        values = self.function.values(args, kwargs)
        if getattr(self._running, "kernel", False):
            check(
                self.function.reference is not None, lambda: f"a kernel of {self.function.name} calls it", RuntimeError
            )
            return self.function.plain(*args, **kwargs)
        run = self._cached_call(_key(values), lambda: self._choose_kernel(values))
        return self.function.plain(*args, **kwargs) if run is None else self._run(run, tensor_leaves(values))

    def _run(self, kernel: Callable, inputs: Tensors) -> Any:
        """Run a kernel. If it calls the operator itself, that call runs the reference."""
        self._running.kernel = True
        try:
            return self.function.fresh(kernel(*inputs), inputs)
        finally:
            self._running.kernel = False

    def backward(self, grads: Tensors, grad_input_mask: Sequence[bool], *args: Any, **kwargs: Any) -> Tensors:
        """Return the gradients of the tensors in `grad_input_mask`, from the gradients of the results."""
        values = self.function.values(args, kwargs)
        inputs = tensor_leaves(values)
        run = self._cached_call((*grad_input_mask, _key(values)), lambda: self._gradient(values, grad_input_mask))
        targets = [tensor for tensor, want in zip(inputs, grad_input_mask, strict=True) if want]
        assert run is not None, "a gradient is made or raises"
        with _autograd_enabled():  # for kernels that torch's autograd differentiates
            gradients = run(inputs, [grad.contiguous() for grad in grads])
        return [
            torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            if gradient is None
            else gradient.clone(memory_format=torch.contiguous_format)
            for tensor, gradient in zip(targets, gradients, strict=True)
        ]

    def _choose_kernel(self, values: Values) -> Callable | None:
        """Return the kernel for these arguments, or None for the reference."""
        function = self.function
        if function.reference is not None and not self.executor.kernels:
            return None
        try:
            trace = self._record(values)
        except Exception:  # the reference raises its own error
            if function.reference is None:
                raise
            return None
        reasons: list[tuple[str, str]] = []
        if choose(trace.bound_symbols[0], [self.executor], reasons) is not None:
            return claim(trace, [self.executor, *self.others])[0].python_callable()
        if function.reference is not None:
            return None
        raise NotImplementedError(
            f"no kernel runs {self._call_in_words(values)}, and it has no reference; {_reasons_in_words(reasons)}"
        )

    def _record(self, values: Values) -> Trace:
        return record_call(self.function.symbol, *self.function.call(values))[0]

    def _gradient(self, values: Values, grad_input_mask: Sequence[bool]) -> Callable[[Tensors, Tensors], Any]:
        trace = self._record(values)
        targets = [name for name, want in zip(trace.input_names, grad_input_mask, strict=True) if want]
        call = with_backward(trace, targets, [self.executor, *self.others])
        if call is None or any(map(self._is_itself, call.forward.bound_symbols)):
            raise NotImplementedError(self._no_gradient(trace, values))
        _, saved, numbers = call.forward.output
        calls = live_calls(call.forward.bound_symbols, names((saved, numbers)))
        forward = call.forward.derive("saved", calls, output=(*saved, *numbers)).python_callable()
        backward = call.backward.python_callable()

        def run(tensors: Tensors, grads: Tensors) -> Any:
            incoming = [grad for grad, active in zip(grads, call.active, strict=True) if active]
            return backward(*forward(*tensors), *incoming)

        return run

    def _is_itself(self, bound: BoundSymbol) -> bool:
        """Return whether a call is one of this operator, which would recurse."""
        return any(leaf is self.function.operator for leaf in (bound.symbol.op, *leaves(bound.args)))

    def _no_gradient(self, trace: Trace, values: Values) -> str:
        reasons: list[tuple[str, str]] = []
        bound = trace.bound_symbols[0]
        choice = choose(bound.replace(tags=bound.tags | {Tag.DIFFERENTIATED}), [self.executor], reasons)
        if choice is not None:
            reasons.append((choice[1].name or "", "it does not give the gradient of every argument that needs one"))
        return (
            f"nothing gives the gradient of {self._call_in_words(values)}, and it has no reference; "
            f"{_reasons_in_words(reasons)}"
        )

    def _call_in_words(self, values: Values) -> str:
        return f"{self.function.name}({format_arguments(values)})"


@contextmanager
def _autograd_enabled() -> Iterator[None]:
    """Enable autograd for calls in the context, subject to grad mode: torch runs an operator below its autograd key."""
    autograd = DispatchKeySet(DispatchKey.AutogradFunctionality)
    included = dispatch_tls_local_include_set()
    excluded = dispatch_tls_local_exclude_set() - autograd
    with ForceDispatchKeyGuard(included, excluded), torch.no_grad():
        yield


def _key(values: Values) -> tuple:
    """Return a key that is equal for arguments that are equivalent for a program."""
    return tuple([_metadata_of(value) for value in values.values()])


def _metadata_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list):
        return tuple(map(_metadata_of, value))
    return argument_key(value)


def _reasons_in_words(reasons: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons) or "it has no kernels"


# torch.library


_lock = new_lock()
_defined: dict[str, Eager] = {}
_libraries: list[torch.library.Library] = []


def define(functions: Iterable[Function], kernels: Iterable[Kernel]) -> None:
    """Define operators in torch.library and register their symbols, all or none; existing operators only get the
    kernels."""
    with _lock:
        new = [function for function in functions if _is_new(function)]
        libraries: list[torch.library.Library] = []
        eager: dict[str, Eager] = {}
        try:
            for function in new:
                _add(function, libraries, eager)
        except Exception:
            for library in reversed(libraries):
                destroy_library(library)
            raise
        _libraries.extend(libraries)
        _defined.update(eager)
        for function in new:
            register(function)
        own: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            if kernel.target.function is not None and kernel.origin.source is not None:
                own.setdefault(kernel.target.function.name, []).append(kernel)
        for name in own.keys() & _defined.keys():
            _defined[name].add(own[name])


def _is_new(function: Function) -> bool:
    """Return whether the name is free, or only the reference is new."""
    existing = find_function(function.name)
    return existing is None or (existing.foreign and existing.reference is None and function.mark is not None)


def _add(function: Function, libraries: list[torch.library.Library], eager: dict[str, Eager]) -> None:
    namespace = function.schema.name.partition("::")[0]
    if function.foreign:
        if not has_fake(function.name):
            libraries.append(torch.library.Library(namespace, "FRAGMENT"))
            torch.library.register_fake(function.name, function.run_fake, lib=libraries[-1])
        return
    libraries.append(torch.library.Library(namespace, "FRAGMENT"))
    library = libraries[-1]
    library.define(function.text, tags=(torch.Tag.pt2_compliant_tag,))
    eager[function.name] = runs = Eager(function)
    library.impl(function.name.partition("::")[2], runs, "CompositeExplicitAutograd")
    torch.library.register_fake(function.name, function.run_fake, lib=library)
    libraries.append(torch.library.Library(BACKWARD, "FRAGMENT"))
    gradient = _Gradient(function, _define_backward(runs, libraries[-1]))
    torch.library.register_autograd(function.name, gradient.backward, setup_context=gradient.set_up, lib=library)


def _define_backward(runs: Eager, library: torch.library.Library) -> str:
    """Define an operator for the gradient, so that torch.compile traces it as one call. Return its name."""
    function = runs.function
    name = "__".join((*function.name.replace("::", ".").split("."), "backward"))
    arguments = function.text.partition("(")[2].rpartition("->")[0].strip().removesuffix(")")
    library.define(f"{name}(Tensor[] grads, bool[] grad_input_mask, {arguments}) -> Tensor[]")
    library.impl(name, runs.backward, "CompositeExplicitAutograd")

    def fake(grads: Tensors, grad_input_mask: Sequence[bool], *args: Any, **kwargs: Any) -> Tensors:
        inputs = tensor_leaves(function.values(args, kwargs))
        return [
            torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for each, want in zip(inputs, grad_input_mask, strict=True)
            if want
        ]

    def refuse(context: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"the gradient of {function.name} cannot be differentiated again")

    qualified = f"{BACKWARD}::{name}"
    torch.library.register_fake(qualified, fake, lib=library)
    torch.library.register_autograd(qualified, refuse, lib=library)
    return qualified


class _Gradient:
    """The gradient of an operator for torch's autograd."""

    def __init__(self, function: Function, name: str) -> None:
        self.function = function
        self.name = name

    def set_up(self, ctx: Any, inputs: tuple, output: Any, keyword_only_inputs: dict[str, Any] | None = None) -> None:
        """Save the arguments."""
        leaves, ctx.spec = torch_pytree.tree_flatten(inputs)
        ctx.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        ctx.grad_input_mask = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.keywords = keyword_only_inputs or {}
        ctx.save_for_backward(*[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def backward(self, ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient of each input that needs one."""
        saved = iter(ctx.saved_tensors)
        leaves = [next(saved) if tensor else other for tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)]
        inputs = torch_pytree.tree_unflatten(leaves, ctx.spec)
        operator = getattr(getattr(torch.ops, BACKWARD), self.name.partition("::")[2])
        gradients = iter(operator(list(grads), ctx.grad_input_mask, *inputs, **ctx.keywords))
        mask = iter(ctx.grad_input_mask)
        values = [next(gradients) if tensor and next(mask) else None for tensor in ctx.is_tensor]
        result = torch_pytree.tree_unflatten(values, ctx.spec)
        return tuple(
            each if isinstance(value, torch.Tensor) or tensor_leaves(value) else None
            for each, value in zip(result, inputs, strict=True)
        )
