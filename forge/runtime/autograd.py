"""One torch.autograd.Function for a differentiated program."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from forge.ir import check
from forge.ir.bounded import BoundedDict
from forge.ir.interpreter import skip_dynamo
from forge.ir.locks import new_lock
from forge.ir.printing import note_location, qualified_name
from forge.ir.unresolved import specialize_sizes
from forge.torch_internals.autograd import SavedTensor, raw_saved_tensors
from forge.torch_internals.autograd import get_current_graph_task_keep_graph as graph_is_kept
from forge.torch_internals.functorch import is_legacy_batchedtensor as is_batched
from forge.torch_internals.tensors import base_of, is_view, storage_id, version_of
from forge.torchlang import autocast_mode
from forge.torchlang.opaque import OpaqueGraph, UnreachedInputs

_SIZES = 64  # programs specialized to one size each
_DREW = (
    "double backward (create_graph=True) through {}: it draws random numbers, which cannot be drawn again; "
    "run it in eager, or without its randomness"
)


class Sources(NamedTuple):
    """The locations where a differentiable backward finds the program's inputs, each with its autograd history.

    saved: indices among the saved tensors, by the input's position. remembered: positions of the other tensors that it
    may read; mutated: positions of those that the program mutates, which are copied. numbers: positions of inputs that
    are not tensors. detached: positions of inputs that require grad and to which no output's gradient flows: an edge to
    one would call its hooks with None, and fix the shape of its gradient.
    """

    saved: dict[int, int]
    remembered: list[int]
    mutated: list[int]
    numbers: list[int]
    detached: list[int]


class DifferentiableBackward(NamedTuple):
    """A backward as a program of the forward's inputs, differentiable like any other.

    function: takes all inputs (None for one that is not read), the random draws, and the gradients that exist.
    reads: the positions of the inputs that it reads. draws: the indices of the draws among the saved tensors and
    numbers. targets: the inputs whose gradients it returns.
    """

    function: Callable
    reads: list[int]
    draws: list[int]
    targets: list[int]


class Backward(NamedTuple):
    """A generated backward. read: indices of the saved tensors that it reads; others may be mutated. None: all."""

    function: Callable
    read: Collection[int] | None = None


class LazyBackward:
    """A backward that is compiled on first use, after Dynamo has taken its guards.

    compile(key): compiles it for every size, or for one if its sizes decide the result. numbers(): the symbolic
    numbers of the program's inputs. ready: backwards that are already compiled.
    """

    def __init__(
        self,
        compile: Callable[..., Any],
        numbers: Callable[[], Sequence[Any]],
        ready: Mapping[tuple, Any] = MappingProxyType({}),
    ) -> None:
        self.ready = dict(ready)
        self._compile = compile
        self._numbers = numbers
        self._for_sizes = BoundedDict(_SIZES)
        self._lock = new_lock()

    def get(self, key: tuple, sizes: Sequence[Any]) -> Any:
        """Return the function of `key`, for these values of the numbers."""
        with self._lock:  # threads may race
            function = self.ready.get(key) or self._for_sizes.get((key, *sizes))
            if function is None:
                with specialize_sizes(self._numbers(), sizes) as assumed:
                    function = self._compile(key)
                table, place = (self._for_sizes, (key, *sizes)) if assumed.used else (self.ready, key)
                table[place] = function
            return function


class DifferentiableCall:
    """A compiled forward that saves residuals, and the backwards that read them.

    forward(*inputs) returns (outputs, saved tensors, saved numbers). `backwards` has a Backward for each set of outputs
    that have a gradient, so that an unused output costs nothing and its gradient stays None. `batched` has those for
    gradients on which only torch's own code runs (`_needs_torch_backward`). `double_backwards` has a
    DifferentiableBackward for a set of outputs, those of their gradients that have a history, whether only torch's code
    runs on them, and the gradients of opaque calls that are None. It runs in place of the backward under
    create_graph=True.
    """

    def __init__(
        self,
        forward: Callable,
        non_differentiable: list[int],
        sources: Sources,
        backwards: LazyBackward,
        batched: LazyBackward,
        double_backwards: LazyBackward,
    ) -> None:
        self._backwards = backwards
        self._batched = batched
        self._double_backwards = double_backwards
        self._sources = sources
        self._unreached: dict[int, frozenset[int]] = {}  # of opaque calls, by the indices of their graphs
        self._function = _function_of(self, forward, non_differentiable, sources, backwards, batched)
        apply = self._function.apply
        self.apply = _detach_inputs(apply, sources.detached) if sources.detached else apply

    def backward_with_graphs(self, ctx: Any, present: tuple[bool, ...], incoming: list[torch.Tensor]) -> tuple:
        """Return the gradients of the inputs if opaque calls have some."""
        _, gradients = self._run_backward(ctx, present, incoming)
        _free_saved(ctx)
        return gradients

    def double_backward(self, ctx: Any, present: tuple[bool, ...], incoming: list[torch.Tensor]) -> tuple:
        """Return the gradients of the inputs, with a history."""
        flowing = tuple([gradient.requires_grad for gradient in incoming])
        for number in ctx.numbers:
            if isinstance(number, OpaqueGraph) and number.random:
                raise NotImplementedError(_DREW.format(qualified_name(number.function) or number.function))
        key: tuple = present, flowing, any(map(_needs_torch_backward, incoming))
        if any(map(_is_graph, ctx.numbers)):
            missing, _ = self._run_backward(ctx, present, [each.detach() for each in incoming])
            key = (*key, missing) if missing else key
        compiled, sources = self._double_backwards, self._sources
        again = compiled.ready.get(key) or compiled.get(key, ctx.lengths)
        read = {*again.draws, *(sources.saved[i] for i in again.reads if i in sources.saved)}
        saved = [*_unpack_saved_tensors(ctx, read), *ctx.numbers]
        inputs = _inputs(ctx, saved, sources, again.reads)
        _free_saved(ctx)
        results = again.function(*inputs, *[saved[i] for i in again.draws], *incoming)
        gradients = [None] * len(inputs)
        for position, gradient in zip(again.targets, results, strict=True):
            gradients[position] = gradient
        return tuple(gradients)

    def _run_backward(
        self, ctx: Any, present: tuple[bool, ...], incoming: list[torch.Tensor]
    ) -> tuple[frozenset, tuple]:
        """Return the gradients of the inputs, and the opaque calls' gradients that are None, as (index of the graph,
        input): these are known only at run time; the previous ones are tried first."""
        graphs = {place: graph for place, graph in enumerate(ctx.numbers) if _is_graph(graph)}
        compiled = self._batched if any(map(_needs_torch_backward, incoming)) else self._backwards
        for place, graph in graphs.items():
            graph.unreached = self._unreached.get(place, frozenset())
        while True:
            missing = frozenset((place, i) for place, graph in graphs.items() for i in graph.unreached)
            function, read = compiled.get((*present, missing) if missing else present, ctx.lengths)
            try:
                with torch.no_grad():
                    return missing, function([*_unpack_saved_tensors(ctx, read), *ctx.numbers, *incoming])
            except UnreachedInputs:
                self._unreached.update((place, graph.unreached) for place, graph in graphs.items())

    def apply_in_buckets(self, parts: Sequence[Sequence[int]]) -> Callable:
        """Return `apply` with one autograd node per bucket of gradients. The backwards are generators: autograd passes
        a bucket on, and calls its hooks, before the next one is computed.

        The nodes form a chain. The last one made is the forward's, which returns the first bucket and leaves the
        generator to the others; autograd does not see its inputs beside those of its bucket.
        """
        first, *later = parts
        function: Any = self._function

        class First(function):
            @staticmethod
            @skip_dynamo
            def forward(ctx: Any, shared: _Parts, token: torch.Tensor, inputs: tuple, *own: torch.Tensor) -> Any:
                ctx.shared = shared
                return super(First, First).forward(ctx, *inputs)

            @staticmethod
            @skip_dynamo
            def backward(ctx: Any, *gradients: Any) -> Any:
                result = super(First, First).backward(ctx, *gradients)
                whole = isinstance(result, tuple)  # not a generator, as under create_graph=True
                ctx.shared.gradients = iter([[result[i] for i in part] for part in parts]) if whole else result
                return None, None, None, *ctx.shared.take(len(first))

        def apply(*inputs: Any) -> Any:
            shared, token = _Parts(), None
            for part in reversed(later):
                token = _BucketEnd.apply(shared, token, *[inputs[i] for i in part])
            return First.apply(shared, token, inputs, *[inputs[i] for i in first])

        return apply


def _function_of(
    call: DifferentiableCall,
    forward_program: Callable,
    non_differentiable: Sequence[int],
    sources: Sources,
    backwards: LazyBackward,
    batched: LazyBackward,
) -> type[torch.autograd.Function]:
    """Return the autograd.Function of a call. It runs at every step, so it reads closure variables, not attributes."""
    ready = backwards.ready
    remembered, mutated, numbered = sources.remembered, sources.mutated, sources.numbers

    class ForgeFunction(torch.autograd.Function):
        @staticmethod
        @skip_dynamo
        def forward(ctx: Any, *inputs: Any) -> Any:
            if mutated:
                ctx.copies = _copy(inputs, mutated)
            outputs, tensors, numbers = forward_program(*inputs)
            if any(map(_IS_VIEW, outputs)):
                outputs, tensors = _with_own_views(inputs, outputs, tensors)
            ctx.save_for_backward(*_detach_aliases(tensors, outputs))
            ctx.numbers = numbers
            ctx.remembered = _remember(inputs, remembered) if remembered else ((), ())
            ctx.count = len(inputs)
            ctx.lengths = [inputs[i] for i in numbered] if numbered else ()
            ctx.set_materialize_grads(False)
            if non_differentiable:
                ctx.mark_non_differentiable(*[outputs[i] for i in non_differentiable])
            return outputs

        @staticmethod
        @skip_dynamo
        def backward(ctx: Any, *gradients: Any) -> Any:
            try:
                if autocast_mode.is_enabled():
                    with autocast_mode.disable():
                        return ForgeFunction.backward(ctx, *gradients)
                present = tuple([gradient is not None for gradient in gradients])
                incoming = [gradient for gradient in gradients if gradient is not None]
                if not incoming:
                    return (None,) * ctx.count
                if torch.is_grad_enabled():
                    return call.double_backward(ctx, present, incoming)
                if any(map(_is_graph, ctx.numbers)):
                    return call.backward_with_graphs(ctx, present, incoming)
                if any(map(_needs_torch_backward, incoming)):
                    function, read = batched.get(present, ctx.lengths)
                else:
                    function, read = ready.get(present) or backwards.get(present, ctx.lengths)
                boxed = [*_unpack_saved_tensors(ctx, read), *ctx.numbers, *incoming]
                _free_saved(ctx)
                del gradients, incoming
                with torch.no_grad():
                    return function(boxed)
            except Exception as failure:
                note_location(failure)
                raise

    return ForgeFunction


def _free_saved(ctx: Any) -> None:
    """Free the tensors that a call saved, unless a later backward reads them again."""
    ctx.maybe_clear_saved_tensors()
    if not graph_is_kept():
        ctx.remembered = ctx.copies = None


def _detach_inputs(apply: Callable, detached: Sequence[int]) -> Callable:
    def apply_detached(*inputs: Any) -> Any:
        args = list(inputs)
        for i in detached:
            if args[i] is not None:  # no double backward reads these
                args[i] = args[i].detach()
        return apply(*args)

    return apply_detached


class _Parts:
    """The remaining buckets of a running backward: an iterator over the gradients of each."""

    def __init__(self) -> None:
        self.gradients: Iterator[Sequence[torch.Tensor | None]] = iter(())

    def take(self, count: int) -> Sequence[torch.Tensor | None]:
        """Compute and return the gradients of the next bucket; None for each of `count` if there is none."""
        if torch.is_grad_enabled():  # already computed, with a history
            return next(self.gradients, (None,) * count)
        try:
            with autocast_mode.disable():
                return next(self.gradients, (None,) * count)
        except Exception as failure:
            note_location(failure)
            raise


class _BucketEnd(torch.autograd.Function):
    """The autograd node of a later bucket. Its output only orders the nodes."""

    @staticmethod
    @skip_dynamo
    def forward(ctx: Any, shared: _Parts, token: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.shared = shared
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)
        return inputs[0].new_empty(0)

    @staticmethod
    @skip_dynamo
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, None, *ctx.shared.take(ctx.count)


_IS_VIEW = is_view


def _with_own_views(
    inputs: Sequence[Any], outputs: Sequence[torch.Tensor], saved: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], Sequence[Any]]:
    """Return the outputs and the saved tensors, with outputs that are views as separate tensors: torch allows no
    writes to views that an autograd.Function returns, and eager has no view there (a tensor that was written through
    its transpose) or a writable one (the convolution of an image without a batch dim).

    Saved tensors of the same memory become views of the new tensor. They share its version counter, so the backward
    rejects later mutations, as eager's does. An output that aliases an input, another output or a saved tensor of
    another dtype stays a view.
    """
    shared = Counter(storage_id(each) for each in (*inputs, *outputs) if isinstance(each, torch.Tensor))
    dtypes = {(storage_id(each), each.dtype) for each in saved if isinstance(each, torch.Tensor)}
    own: dict[int, torch.Tensor] = {}

    def own_view(output: torch.Tensor) -> torch.Tensor:
        storage = storage_id(output)
        same_dtype = all(dtype == output.dtype for each, dtype in dtypes if each == storage)
        if not is_view(output) or shared[storage] > 1 or not same_dtype:
            return output
        own[storage] = output.data
        return own[storage]

    def view_of_own(x: Any) -> Any:
        base = own.get(storage_id(x)) if isinstance(x, torch.Tensor) else None
        return x if base is None else base.as_strided(x.size(), x.stride(), x.storage_offset())

    return tuple(map(own_view, outputs)), list(map(view_of_own, saved))


def _detach_aliases(saved: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return the tensors to save, with aliases of outputs detached.

    A view of an output refers to it, and the output's history to the node that saves the view: a reference cycle that
    is never freed. A detached view has the same memory and version counter, and no base. (For an output itself torch
    avoids the cycle; it cannot be unpacked separately from the others.)
    """
    owners = set(map(id, outputs))
    return [x.detach() if x is not None and (id(x) in owners or id(base_of(x)) in owners) else x for x in saved]


_UNPACKS_EACH = hasattr(SavedTensor, "unpack")


def _unpack_saved_tensors(ctx: Any, read: Collection[int] | None) -> Sequence[torch.Tensor | None]:
    """Return the saved tensors. If one was mutated, only those at the indices `read` need be right.

    Raises torch's error if one of those was mutated.
    """
    unchecked: frozenset[int] = frozenset() if _UNPACKS_EACH else getattr(ctx, "unchecked", frozenset())
    if unchecked and (read is None or not unchecked.isdisjoint(read)):
        raise RuntimeError(
            "one of the variables needed for gradient computation may have been modified by an inplace operation "
            "before an earlier backward, which did not need it"
        )
    try:
        return ctx.saved_tensors
    except RuntimeError:
        if read is None:
            raise
    raw = raw_saved_tensors(ctx)
    if _UNPACKS_EACH:
        return [each.unpack() if place in read else None for place, each in enumerate(raw)]
    # before torch 2.13 all are unpacked at once; torch does not compare versions of tensors with hooks
    ctx.unchecked = frozenset(range(len(raw))).difference(read)
    for place in ctx.unchecked - unchecked:
        raw[place].register_hooks(_as_it_is, _as_it_is)
    return ctx.saved_tensors


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _needs_torch_backward(gradient: torch.Tensor) -> bool:
    """Return whether only torch's code may run on a gradient: torch.autograd.grad(is_grads_batched=True) made it, or it
    is a subclass of Tensor."""
    return type(gradient) is not torch.Tensor or is_batched(gradient)


def _is_graph(number: Any) -> bool:
    return type(number) is OpaqueGraph


# inputs with their history, without reference cycles that the forward's saved tensors do not have


class _Alias(torch.autograd.Function):
    """An alias of a tensor with its current history: later changes of the tensor's history do not reach it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a missing gradient stays None
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None) -> torch.Tensor | None:
        return g


_IS_LEAF, _REQUIRES_GRAD = map(attrgetter, ("is_leaf", "requires_grad"))


def _remember(inputs: tuple, positions: list[int]) -> tuple[list[torch.Tensor], list[int]]:
    """Return the inputs at `positions`, and their current versions."""
    tensors = [inputs[i] for i in positions]
    if not (all(map(_IS_LEAF, tensors)) and all(map(_REQUIRES_GRAD, tensors))):  # parameters have no history
        tensors = [x if x.is_leaf and x.requires_grad else _alias(x) for x in tensors]
    try:
        return tensors, list(map(version_of, tensors))
    except RuntimeError:  # an inference tensor has none
        return tensors, [_version(x) for x in tensors]


def _copy(inputs: tuple, positions: list[int]) -> list[torch.Tensor]:
    """Return copies of the inputs at `positions`, with their current history."""
    with torch.enable_grad():
        return [inputs[i].clone() for i in positions]


def _alias(x: torch.Tensor) -> torch.Tensor:
    if is_batched(x):  # torch.autograd.grad(is_grads_batched=True): its tensors have no aliases
        return x
    if not x.requires_grad:
        return x.detach()
    with torch.enable_grad():
        return _Alias.apply(x)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else version_of(x)


def _inputs(ctx: Any, saved: Sequence[Any], sources: Sources, reads: list[int]) -> list[Any]:
    """Return the program's inputs that are read, None for the others. Raises RuntimeError if one was mutated or
    freed."""
    check(
        ctx.remembered is not None,
        lambda: (
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed); specify retain_graph=True if you need to backward through the graph a second time"
        ),
        RuntimeError,
    )
    inputs: dict[int, Any] = {position: saved[place] for position, place in sources.saved.items()}
    positions = set(reads)
    for position, x, version in zip(sources.remembered, *ctx.remembered, strict=True):
        check(
            position not in positions or _version(x) == version,
            lambda x=x, version=version: (
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{x.dtype}, {list(x.shape)}] is at version {version_of(x)}; expected version {version} instead; "
                "under create_graph=True, the backward of a compiled program reads all inputs of the program"
            ),
            RuntimeError,
        )
        inputs[position] = x
    for position, x in zip(sources.mutated, ctx.copies if sources.mutated else (), strict=True):
        inputs[position] = x
    for position, number in zip(sources.numbers, ctx.lengths if sources.numbers else (), strict=True):
        inputs[position] = number
    assert positions.issubset(inputs), (
        f"a differentiable backward reads inputs {positions - set(inputs)}, which are not kept"
    )
    return [inputs.get(position) for position in range(ctx.count)]
