"""Functionalization while recording: aliasing of values, and the effects of in-place changes.

A program holds handles, the proxies that its calls returned. Calls below the front end are pure. A `Storage` is a piece
of memory with its current value; a `Ref` maps a handle to a storage through a chain of views. Writing through a
handle inverts its views and gives the storage a new value; reading a handle replays its views if the storage changed
since. Until the first write nothing is replayed.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from forge.ir import pytree
from forge.ir.checks import check
from forge.ir.proxies import Dim, TensorProxy, bytes_of, hint_of
from forge.ir.state import state
from forge.ir.symbol import Tag, union

_LEAF_VIEW = frozenset({Tag.LEAF_VIEW})


class Ambiguous(NotImplementedError):
    """An in-place change of memory that may or may not be visible through another handle."""


class ViewStep:
    """One view of a chain: `show(x)` computes it, `invert(x, new)` is x with the viewed elements replaced by `new`.

    `hides_history`: autograd does not see a write through it (x.data, x.detach()). `versioned`: the base's version
    counts such a write (not of x.data). `grad`: whether grad was enabled when the view was made. `gained`:
    a write gave the view that hides history its own history.
    """

    __slots__ = ("args", "gained", "grad", "hides_history", "index", "invert", "kwargs", "symbol", "versioned")

    def __init__(
        self,
        symbol: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
        invert: Callable[..., Any],
        hides_history: bool = False,
    ) -> None:
        self.symbol = symbol
        self.args = args
        self.kwargs = kwargs
        self.index = index
        self.invert = invert
        self.hides_history = hides_history
        self.versioned = True
        self.gained = False
        self.grad = torch.is_grad_enabled()

    @property
    def tensors(self) -> list[TensorProxy]:
        """The tensors that the view needs besides its base (view_as, a 0-d index)."""
        return pytree.tensors((self.args, self.kwargs))

    def show(self, base: TensorProxy) -> TensorProxy:
        """Return the view of `base`, recorded; one that was made with grad enabled has its history also if it is read
        under no_grad."""
        trace = state.trace
        with nullcontext() if trace is None or not self.grad else trace.set_tags(trace.tags - {Tag.NO_GRAD}):
            result = self.symbol(base, *self.args, **self.kwargs)
        view: TensorProxy = result if self.index is None else result[self.index]
        return view


class Storage:
    """Memory: its root handle, its current value, the number of writes."""

    __slots__ = ("ambiguous", "root", "silently", "value", "version", "versioned")

    def __init__(self, root: TensorProxy) -> None:
        self.root = root
        self.value = root
        self.version = 0
        self.silently = True  # autograd saw none of the writes so far
        self.versioned = False  # the root's version counts one of the writes so far
        self.ambiguous: str | None = None  # a call that may or may not have made a view of it


class Ref:
    """A handle's location in memory, and its value at a version of the storage."""

    __slots__ = ("chain", "storage", "value", "version")

    def __init__(self, storage: Storage, chain: tuple[ViewStep, ...], value: TensorProxy) -> None:
        self.storage = storage
        self.chain = chain
        self.value = value
        self.version = storage.version

    @classmethod
    def own(cls, handle: TensorProxy) -> "Ref":
        """Return the location of a handle with its own memory."""
        return cls(Storage(handle), (), handle)


def _mark_leaf(view: TensorProxy, step: ViewStep) -> None:
    """Tag the last call if it returned `view` under no_grad: results computed from it require grad if its base does."""
    call = state.trace.last_call if state.trace is not None else None
    if call is None or Tag.NO_GRAD not in call.tags or step.hides_history:
        return
    if any(output is view for output in pytree.tensors(call.output)):  # which may still be renamed
        call.tags = union(call.tags, _LEAF_VIEW)


def _repeats(step: ViewStep, base: TensorProxy, view: TensorProxy) -> bool:
    """Return whether the view repeats an element of `base`: expand, overlapping windows or strides."""
    if bytes_of(view) > bytes_of(base):
        return True
    op = getattr(step.symbol, "id", None)
    if op == "torch.Tensor.unfold":
        distance = step.args[2] if len(step.args) > 2 else step.kwargs["step"]
        return hint_of(distance) < hint_of(view.shape[-1])
    return op == "prims.as_strided" and overlaps(*(map(hint_of, each) for each in step.args[:2]))


def overlaps(shape: Iterable[Dim], strides: Iterable[Dim]) -> bool:
    """Return whether two elements may share a location: a dim's stride is within the extent of smaller strides."""
    reach: Dim = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


class Memory:
    """The memory of one program while it is recorded."""

    def __init__(self) -> None:
        self.refs: dict[str, Ref] = {}
        self.dirty: list[Storage] = []
        self.inference = torch.is_inference_mode_enabled()
        self.has_history = torch.is_grad_enabled()  # True if a gradient may flow through a value of the program
        self.elsewhere: set[str] = set()  # handles made in another inference mode than the program's
        self.nameless = 0  # the number of handles that are not values of the trace

    def ref(self, handle: TensorProxy) -> Ref:
        """Return the handle's location; an unknown handle has its own memory."""
        ref = self.refs.get(handle.name)
        if ref is None:
            ref = self.refs[handle.name] = Ref.own(handle)
        return ref

    def note_mode(self, tree: Any) -> None:
        """Record handles that were just made in another inference mode than the program began in."""
        if torch.is_inference_mode_enabled() != self.inference:
            self.elsewhere.update(proxy.name for proxy in pytree.tensors(tree))

    def rename(self, before: str, name: str) -> None:
        """Move the record of a handle to its new name."""
        if before in self.refs:
            self.refs[name] = self.refs.pop(before)
        if before in self.elsewhere:
            self.elsewhere.add(name)

    def current_value(self, handle: TensorProxy) -> TensorProxy | None:
        """Return the handle's current value, None if it must be recomputed from a base that was written to."""
        ref = self.refs.get(handle.name)
        return None if ref is None or ref.version != ref.storage.version else ref.value

    def read(self, handle: TensorProxy) -> TensorProxy:
        """Return the handle's current value."""
        ref = self.refs.get(handle.name)
        if ref is None:
            return handle
        storage = ref.storage
        if ref.version != storage.version:
            check(
                not self.has_gained_history(handle),
                lambda: (
                    f"{handle} shows a detached tensor that a call in place gave a history, and a later one changed"
                ),
                Ambiguous,
            )
            value = storage.value
            for step in ref.chain:
                value = step.show(value)
            ref.value, ref.version = value, storage.version
        return ref.value

    def gain(self, handle: TensorProxy) -> None:
        """Mark the handle as requiring grad: a detached view does once it is written to."""
        for step in self.ref(handle).chain:
            step.gained = step.gained or step.hides_history

    def has_gained_history(self, handle: TensorProxy) -> bool:
        """Return whether a handle's history comes from a write to a detached tensor."""
        return any(step.gained for step in self.ref(handle).chain)

    def read_all(self, tree: Any) -> Any:
        """Return a pytree with every handle replaced by its current value."""
        if not self.dirty and not self.nameless:
            return tree
        return pytree.tree_map(lambda leaf: self.read(leaf) if isinstance(leaf, TensorProxy) else leaf, tree)

    def alias(self, view: TensorProxy, base: TensorProxy, step: ViewStep) -> None:
        """Record that the new handle `view` is one more view of `base`."""
        ref = self.ref(base)
        self.refs[view.name] = Ref(ref.storage, (*ref.chain, step), view)
        _mark_leaf(view, step)

    def another(self, handle: TensorProxy, step: ViewStep) -> TensorProxy:
        """Return a second handle of the same value: another tensor in the same memory. If grad is disabled it has a
        separate value, through which no gradient flows."""
        self.nameless += 1
        second = TensorProxy(
            f"{handle.name}.{self.nameless}", handle.shape, handle.dtype, handle.device, strides=handle.strides
        )
        ref, value = self.ref(handle), self.read(handle)
        if self.has_history and not torch.is_grad_enabled():
            value = step.show(value)
            _mark_leaf(value, step)
        self.refs[second.name] = Ref(ref.storage, (*ref.chain, step), value)
        return second

    def become(self, handle: TensorProxy, value: TensorProxy, step: ViewStep, call: str) -> None:
        """Give a handle that is not a view another history from now on: `value`, the view `step` of its old value.

        If other handles alias its memory, a later write to it is an error."""
        self.nameless += 1
        storage = self.ref(handle).storage
        if any(ref.storage is storage for name, ref in self.refs.items() if name != handle.name):
            storage.ambiguous = call
            self.refs[handle.name] = Ref(storage, (step,), value)
            return
        fresh = self.refs[handle.name] = Ref.own(handle)
        fresh.storage.value = fresh.value = value

    def share(self, handle: TensorProxy, base: TensorProxy, call: str) -> None:
        """Record that `handle` may share `base`'s memory; a later write to either is an error."""
        storage = self.ref(base).storage
        storage.ambiguous = call
        self.ref(handle).storage.ambiguous = call

    def write(
        self,
        handle: TensorProxy,
        new: TensorProxy,
        *,
        silently: bool = False,
        keep_history: Callable[[TensorProxy, TensorProxy], TensorProxy] | None = None,
    ) -> None:
        """Give the handle a new value of its shape and dtype, which every alias of its memory sees.

        `silently`: the write ran under torch.no_grad, like a write through a view that hides history does for the views
        below it. `keep_history(old, new)` is `new`, whose gradients still flow to the old value.
        """
        ref = self.ref(handle)
        storage = ref.storage
        check(
            storage.ambiguous is None,
            lambda: (
                f"an in-place change of {handle}: whether {storage.ambiguous} returned a view of it or a copy "
                "depends on strides that forge.trace does not know; clone it first, or use forge.jit"
            ),
            Ambiguous,
        )
        if keep_history is not None:
            new = keep_history(self.read(handle), new)
        bases = [storage.value]
        for step in ref.chain:
            last = step is ref.chain[-1]
            view = handle if last else step.show(bases[-1])
            check(
                not _repeats(step, bases[-1], view),
                lambda part="" if last else "a part of ", view=view: (
                    f"an in-place change of {part}{view}, which shows its memory more than once"
                ),
                Ambiguous,
            )
            bases.append(view)
        value = new
        for step, base in zip(reversed(ref.chain), reversed(bases[:-1]), strict=True):
            value = step.invert(base, value)
        if keep_history is not None and ref.chain:
            value = keep_history(storage.value, value)
        storage.value = value
        storage.version += 1
        silently = silently or any(step.hides_history for step in ref.chain)
        storage.silently = storage.silently and silently
        storage.versioned = storage.versioned or all(step.versioned for step in ref.chain)
        ref.value, ref.version = new, storage.version
        if storage not in self.dirty:
            self.dirty.append(storage)
