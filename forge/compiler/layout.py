"""Strides and aliasing of every value of a claimed trace, found by running its calls on fake tensors.

A trace promises shapes and dtypes; strides depend on what runs. A fusion executor compiles for the strides of a
region's inputs, so they must be known: a torch function's are found by running it under a FakeTensorMode, once for each
metadata of its arguments. Results of a call that cannot run on fake tensors (a Hub kernel or another function that is
not torch's or forge's, which may read memory by its address; an opaque call) are promised to be contiguous, and so is a
gradient from outside; `to_strides` keeps such a promise at run time.

One file, though long: running a call on layouts and its memo share their state.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import flop_registry

from forge.compiler.kernel_strides import is_static, with_kernel_strides
from forge.executors.executor import is_own
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.bounded import BoundedDict
from forge.ir.locks import new_lock
from forge.ir.proxies import SYMBOLIC_TYPES, Dim
from forge.ir.pytree import leaves, names, tensors, tree_map
from forge.ir.strides import contiguous, has_expanded_dim, same, to_strides
from forge.ir.structure import key_of, settings
from forge.ir.symbol import substitute
from forge.ir.unresolved import UnresolvedSymInt, without_specialization
from forge.prims.library import quiet, symbolic_dispatch
from forge.torch_internals.dispatch import TorchDispatchMode, disable_current_modes, keep_operators
from forge.torch_internals.fake_tensors import FakeTensorMode, call_on_fake_tensors
from forge.torch_internals.functions import torch_neg_view
from forge.torch_internals.tensors import storage_id
from forge.torch_internals.versions import TORCH
from forge.transforms.dce import live_calls

_UNPREDICTABLE = frozenset({Tag.OPAQUE, Tag.EFFECT, Tag.SYNCHRONIZING})


class Layout(NamedTuple):
    """A tensor's metadata. conjugated, negated: torch's lazy bits (x.conj(), x.conj().imag)."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Return the layout of a tensor."""
        shape, strides = (tuple(map(_static_size, each)) for each in (tensor.shape, tensor.stride()))
        return cls(shape, strides, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())

    @property
    def is_plain(self) -> bool:
        """True if the memory holds the values themselves."""
        return not self.conjugated and not self.negated

    def with_shape(self, shape: Sequence[Dim]) -> "Layout":
        """Return the same layout with its sizes written as in `shape`, of equal sizes: a guard may have told that what
        torch's function computes is one."""
        pairs = [(a, b) for a, b in zip(self.shape, shape, strict=True) if isinstance(b, int) and a is not b]
        values = {a.node.expr: b for a, b in pairs if isinstance(a, SYMBOLIC_TYPES)}
        if not values:
            return self
        strides = tuple(_rewritten(each, values) for each in self.strides)
        return self._replace(shape=tuple(shape), strides=strides)

    @classmethod
    def from_meta(cls, proxy: TensorProxy) -> "Layout":
        """Return the layout of a value whose strides are not known: the strides of its meta function, else contiguous
        ones."""
        shape, strides = tuple(proxy.shape), proxy.strides
        if strides is None or has_expanded_dim(strides):
            strides = contiguous(shape)
        return cls(shape, tuple(strides), proxy.dtype, proxy.device)


def is_predictable(call: BoundSymbol) -> bool:
    """Return whether a claimed call runs on fake tensors as on others."""
    return _UNPREDICTABLE.isdisjoint(call.all_tags) and is_own(call.symbol.op)


UNKNOWN = object()  # a value that is not a tensor and is known only at run time


def _static_size(length: Dim) -> Dim:
    """Return a symbolic size as an int if it can only be one."""
    size = length.node.maybe_as_int() if isinstance(length, SYMBOLIC_TYPES) else None
    return length if size is None else size


def _rewritten(length: Dim, values: dict[Any, int]) -> Dim:
    """Return a length in which expressions of symbols are replaced by the integers that they equal."""
    if not isinstance(length, SYMBOLIC_TYPES):
        return length
    node = length.node
    return _static_size(node.shape_env.create_symintnode(node.expr.subs(values), hint=node.hint))


class FakeRun(NamedTuple):
    """The result of running one call on layouts.

    outputs: for each leaf of the output a Layout, or the value itself if it is not a tensor. shares: the index of the
    tensor argument that each tensor aliases, None for memory of its own; offsets: its storage offset within that
    argument, in elements. operators: the aten operators that ran. is_exact: whether the call ran (else its results are
    assumed contiguous). uncertain: for each output, whether its strides may differ at run time, because the kernel is
    selected then, or because torch's kernels and fake implementations differ for these layouts. flops: the floating
    point operations of its matrix products, convolutions and attention. is_turned: whether an index of symbolic sizes
    decides the memory order of the result, which is known only at run time.
    """

    outputs: tuple[Any, ...]
    shares: tuple[int | None, ...]
    offsets: tuple[Dim, ...]
    operators: tuple[Any, ...]
    is_exact: bool
    uncertain: tuple[bool, ...]
    flops: int = 0
    is_turned: bool = False

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the tensors among the outputs."""
        return [each for each in self.outputs if isinstance(each, Layout)]


aten = torch.ops.aten
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
_LENGTHS_AS_INTEGERS = frozenset({aten.size.default, aten.stride.default})  # which would be guarded
_CHOSEN_LATER = ATTENTION | {
    aten._flash_attention_backward,  # torch.nn.attention may select another kernel
    aten._flash_attention_forward,
    aten.channel_shuffle,
    aten.convolution,
    aten.convolution_backward,
    aten.max_unpool2d,
    aten.native_channel_shuffle,
}
if TORCH < (2, 13):  # fake results of transforms have other strides than MKL's
    _CHOSEN_LATER |= {aten._fft_c2c, aten._fft_c2r, aten._fft_r2c}
_IN_ROW_MAJOR = frozenset(  # if torch says so, whatever their arguments
    {aten.addmm, aten.baddbmm, aten.bmm, aten.clone, aten.copy_, aten.empty_strided, aten.mm, aten._unsafe_view}
)


class _Operators(TorchDispatchMode):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.calls: list[Any] = []
        self.flops = 0
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append(func)
        if func in _LENGTHS_AS_INTEGERS and not self.counts:
            raise UnresolvedSymInt(f"{func} makes integers of symbolic sizes")  # as torch 2.11's matmul does
        with symbolic_dispatch(not self.counts):
            result = call_on_fake_tensors(func, args, kwargs or {})
        result = with_kernel_strides(func, args, result)
        if self.counts:
            self.flops += flops_of(func, args, kwargs or {}, result)
        return result


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating point operations of an aten operator, 0 for one that torch does not count.

    Before torch 2.13, torch's count of attention raises for fewer heads of key and value than of query
    (torch/utils/flop_counter.py:290@2.11.0, sdpa_flop_count), so the heads are expanded.
    """
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0
    if TORCH < (2, 13) and func.overloadpacket in ATTENTION:
        first = 1 if "backward" in func.overloadpacket.__name__ else 0  # the query, after the output's gradient
        query, key, value = args[first : first + 3]
        if query.shape[1] != key.shape[1]:
            grouped = [x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value)]
            args = (*args[: first + 1], *grouped, *args[first + 3 :])
    flops: int = count(*args, **kwargs, out_val=result)
    return flops


def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


_shared = _fake_mode()
_fake_runs: BoundedDict = BoundedDict(20_000)
_lock = new_lock()


class Layouts:
    """The layouts of a program's tensors, by name, and the other values of the program (numbers, kernels' contexts).

    `uncertain` names tensors whose strides are only a promise, `fixed` other values that are known at compile time
    (the attention kernel). `fake` is the fake mode of their fake tensors. `flops` counts the operations of all calls,
    if no size is symbolic. `views` maps each alias to its base and its storage offset in elements; a message's result
    aliases nothing before it is awaited.
    """

    def __init__(self, inputs: Iterable[Proxy] = (), *, shared: bool = True) -> None:
        """shared: use the process's fake mode while no size is symbolic. Only one thread at a time may enter a mode, so
        callers that enter it outside of `run` need their own."""
        self.values: dict[str, Any] = {}
        self.uncertain: set[str] = set()
        self.fixed: set[str] = set()
        self._unknown: set[str] = set()  # of the calls of `run_all`
        self._static = self.fake = _shared if shared else _fake_mode()
        self.flops = 0
        self.views: dict[str, tuple[str, Dim]] = {}
        self._memo: dict[Any, FakeRun] = _fake_runs
        for proxy in inputs:
            self.add(proxy)

    @classmethod
    def of(cls, claimed: Trace) -> "Layouts":
        """Return the layouts of all values of a claimed trace."""
        return cls(claimed.inputs).run_all(claimed)

    def run_all(self, claimed: Trace) -> "Layouts":
        """Record the layouts of all values of a claimed trace, whose inputs are known, and return self."""
        self.add_constants(claimed.constants)
        for call in claimed.bound_symbols:
            if not self.run(call).is_exact or self._follows_unknown(call):
                self._unknown.update(leaf.name for leaf in leaves(call.output) if isinstance(leaf, TensorProxy))
        return self

    def _follows_unknown(self, call: BoundSymbol) -> bool:
        unknown = [name for name in call.inputs if name in self._unknown and isinstance(self.values[name], Layout)]
        return bool(unknown) and self.follows(call, unknown)

    def strides(self) -> dict[str, tuple[Dim, ...]]:
        """Return the strides of the tensors, by name, without results of calls that could not run: torch's may differ
        from the promised ones (an LSTM of symbolic sizes)."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, Layout)}
        return {name: value.strides for name, value in tensors.items() if name not in self._unknown}

    def with_strides(self, bound: BoundSymbol) -> BoundSymbol:
        """Return a call whose arguments state their strides."""
        operands = {each.name: (each, self.values.get(each.name)) for each in tensors((bound.args, bound.kwargs))}
        replacements = {
            name: TensorProxy(name, proxy.shape, proxy.dtype, proxy.device, strides=layout.strides)
            for name, (proxy, layout) in operands.items()
            if isinstance(layout, Layout)
        }
        return substitute(bound, replacements)

    def copy(self) -> "Layouts":
        """Return a copy that may be extended independently: a backward's, of a forward's."""
        new = Layouts()
        new.values, new.uncertain, new.fixed = dict(self.values), set(self.uncertain), set(self.fixed)
        new._unknown = set(self._unknown)
        new._static, new.fake, new._memo = self._static, self.fake, self._memo
        return new

    def replace(self, proxy: TensorProxy, by: str) -> None:
        """Give a value the layout of the value `by`, which replaces it: a promised layout if no call was run."""
        if by not in self.values:
            self.promise(proxy)
            return
        self.values[proxy.name] = self.values[by]
        self.uncertain.discard(proxy.name)
        if by in self.uncertain:
            self.uncertain.add(proxy.name)

    @property
    def is_symbolic(self) -> bool:
        """True if a size is symbolic."""
        return self.fake is not self._static

    def add(self, proxy: Proxy, like: TensorProxy | None = None) -> None:
        """Add an input; `like` names a value with the same strides."""
        if isinstance(proxy, NumberProxy):
            self.values[proxy.name] = proxy.value
            self._see([proxy.value])
        elif isinstance(proxy, TensorProxy):
            self._see(proxy.shape)
            layout = self.values.get(like.name) if like is not None else None
            if isinstance(layout, Layout) and not has_expanded_dim(layout.strides):
                self.values[proxy.name] = layout
                self.uncertain.add(proxy.name)
            elif proxy.strides is None:
                self.promise(proxy)
            else:
                self.values[proxy.name] = Layout(tuple(proxy.shape), tuple(proxy.strides), proxy.dtype, proxy.device)

    def add_constants(self, constants: dict[str, torch.Tensor]) -> None:
        for name, value in constants.items():
            self.values[name] = Layout.of(value)

    def promise(self, proxy: TensorProxy) -> None:
        """Mark a value as contiguous, which a copy ensures at run time."""
        self.values[proxy.name] = Layout.from_meta(proxy)
        self.uncertain.add(proxy.name)

    def run(self, call: BoundSymbol) -> FakeRun:
        """Return the layouts of a claimed call's results, and record them."""
        if not self.is_symbolic:
            self._see(leaves((call.args, call.kwargs)))  # an index, say
            self._see(size for proxy in tensors(call.output) for size in proxy.shape)
        acts = call.output is None  # such as advancing a generator, which would take effect now
        ran = self._run_with_memo(call) if is_predictable(call) and not acts else self._run_by_meta(call)
        self.flops += ran.flops
        operands = list(dict.fromkeys(proxy.name for proxy in tensors((call.args, call.kwargs))))
        outputs = zip(leaves(call.output), ran.outputs, ran.shares, ran.offsets, ran.uncertain, strict=True)
        for leaf, value, share, offset, uncertain in outputs:
            if isinstance(leaf, Proxy):
                self.values[leaf.name] = value
                if share is not None and Tag.AWAITS not in call.symbol.tags:  # no alias before the wait
                    base, further = self.views.get(operands[share], (operands[share], 0))
                    self.views[leaf.name] = (base, further + offset)
                if uncertain or not ran.is_exact or (share is not None and operands[share] in self.uncertain):
                    self.uncertain.add(leaf.name)
        return ran

    def settle(self, call: BoundSymbol) -> None:
        """Mark a call's strides as promised if they follow promised strides of its arguments; for calls outside of
        regions, since a region gets inputs of the promised strides."""
        operands = list(dict.fromkeys(proxy.name for proxy in tensors((call.args, call.kwargs))))
        doubtful = [name for name in operands if name in self.uncertain and isinstance(self.values[name], Layout)]
        results = [leaf.name for leaf in leaves(call.output) if isinstance(leaf, TensorProxy)]
        if doubtful and not self.uncertain.issuperset(results) and self.follows(call, doubtful):
            self.uncertain.update(results)

    def follows(self, call: BoundSymbol, arguments: Collection[str]) -> bool:
        """Return whether a call's strides depend on those of these arguments."""
        if not is_predictable(call):
            return False
        ran, before = self._run_with_memo(call), {name: self.values[name] for name in arguments}
        for other in (_opposite_layout, _with_gaps, _with_channels_last):
            self.values.update((name, other(layout)) for name, layout in before.items())
            try:
                turned = self._run_with_memo(call)
            finally:
                self.values.update(before)
            if not turned.is_exact or key_of(ran.layouts) != key_of(turned.layouts):
                return True
        return False

    def _run_with_memo(self, call: BoundSymbol) -> FakeRun:
        key = (*settings(), call.symbol.op, *[key_of(each, self._key) for each in (call.args, call.kwargs)])
        try:
            ran = self._memo.get(key)
        except TypeError:  # an unhashable argument
            return without_specialization(self._run, call)
        if ran is None:
            ran = self._memo[key] = without_specialization(self._run, call)
        return ran

    def stand_in(self, leaf: Any) -> Any:
        """Return a fake tensor for a proxy, and any other value as it is; to be called under `fake`."""
        value = self.values[leaf.name] if isinstance(leaf, Proxy) else leaf
        if not isinstance(value, Layout):
            return value
        result = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
        result = torch_neg_view(result) if value.negated else result
        return torch.conj(result) if value.conjugated else result

    def _key(self, proxy: Proxy) -> Any:
        value = self.values[proxy.name]
        if not self.is_symbolic and isinstance(value, Layout):
            return value
        return key_of(value)

    def _see(self, lengths: Iterable[Any]) -> None:
        """Switch to the program's ShapeEnv at the first symbolic size, backed or not: another program's ShapeEnv may
        have other facts about a symbol of the same name."""
        for size in lengths:
            if isinstance(size, SYMBOLIC_TYPES) and not self.is_symbolic:
                self.fake = FakeTensorMode(shape_env=size.node.shape_env, allow_non_fake_inputs=True)
                self._memo = {}

    def _run(self, call: BoundSymbol) -> FakeRun:
        stand_ins: dict[str, Any] = {}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Proxy):
                return leaf
            return (
                stand_ins[leaf.name] if leaf.name in stand_ins else stand_ins.setdefault(leaf.name, self.stand_in(leaf))
            )

        try:
            op = call.symbol.op
            assert op is not None
            with (
                _lock,
                quiet(),
                disable_current_modes(),
                torch.no_grad(),
                self.fake,
                symbolic_dispatch(self.is_symbolic),
                keep_operators(),
                self._values_unknown(),
            ):
                args, kwargs = tree_map(stand_in, (tuple(call.args), call.kwargs))
                with _Operators(counts=not self.is_symbolic) as operators:
                    result = op(*args, **kwargs)
                if call.symbol.out:
                    places = call.symbol.out
                    result = tuple(args[place] if isinstance(place, int) else kwargs[place] for place in places)
                return _ran(call, result, stand_ins, operators)
        except Exception:  # it needs values, or does not support fake tensors
            return self._run_by_meta(call)

    def _values_unknown(self) -> AbstractContextManager[None]:
        """Ignore fresh unbacked symbols (an index without dims) in what is traced next."""
        assert self.fake.shape_env is not None
        return self.fake.shape_env.ignore_fresh_unbacked_symbols()

    def _run_by_meta(self, call: BoundSymbol) -> FakeRun:
        outputs = [Layout.from_meta(leaf) if isinstance(leaf, TensorProxy) else UNKNOWN for leaf in leaves(call.output)]
        return FakeRun(tuple(outputs), (None,) * len(outputs), (0,) * len(outputs), (), False, (False,) * len(outputs))


def _opposite_layout(layout: Layout) -> Layout:
    """Return another layout of a tensor, with its dims in the opposite order, or in row-major order if they were so
    already."""
    opposite = tuple(reversed(contiguous(tuple(reversed(layout.shape)))))
    alike = key_of(opposite) == key_of(layout.strides)
    return layout._replace(strides=contiguous(layout.shape) if alike else opposite)


def _with_gaps(layout: Layout) -> Layout:
    """Return the opposite layout with gaps between the elements, so that dims of size 1, too, have distinctive
    strides. Some functions give row-major order then, and follow dense layouts."""
    return layout._replace(strides=tuple(2 * step for step in _opposite_layout(layout).strides))


def _with_channels_last(layout: Layout) -> Layout:
    """Return the channels-last layout of an image or a signal; another tensor's layout is unchanged."""
    if len(layout.shape) not in (3, 4, 5):
        return layout
    images, channels, *sides = layout.shape
    outer, *inner, step = contiguous((images, *sides, channels))
    return layout._replace(strides=(outer, step, *inner))


def _ran(call: BoundSymbol, result: Any, stand_ins: dict[str, Any], operators: _Operators) -> FakeRun:
    bases = [value for value in stand_ins.values() if isinstance(value, torch.Tensor)]
    memory = {storage_id(value): place for place, value in enumerate(bases)}
    outputs: list[Any] = []
    shares: list[int | None] = []
    offsets: list[Dim] = []
    for leaf, value in pair_leaves(call.output, result):
        if isinstance(value, torch.Tensor):
            place = memory.get(storage_id(value))
            layout = Layout.of(value)
            outputs.append(layout)
            shares.append(place)
            offsets.append(0 if place is None else value.storage_offset() - bases[place].storage_offset())
            if isinstance(leaf, TensorProxy) and (value.dtype != leaf.dtype or value.ndim != leaf.ndim):
                raise TypeError(f"{call.symbol.id} gives {value.dtype}, {value.ndim} dims for {leaf}")
            if isinstance(leaf, TensorProxy):
                outputs[-1] = layout.with_shape(leaf.shape)
        else:
            outputs.append(value)
            shares.append(None)
            offsets.append(0)
    is_turned = _is_turned(operators.calls, bases)
    later = is_turned or any(each.overloadpacket in _CHOSEN_LATER for each in operators.calls)
    kernels = [each for each in operators.calls if each.namespace != "prim"]
    copies = bool(kernels) and not any(each.is_view for each in kernels)
    sure = all(each.is_view or each.overloadpacket in _IN_ROW_MAJOR for each in kernels)
    arguments = [] if sure else list(map(Layout.of, bases))

    def is_uncertain(output: Any, share: int | None) -> bool:
        if later or not isinstance(output, Layout):
            return later
        return _has_channels_last(output) or ((share is None or copies) and _may_differ(output, arguments))

    uncertain = tuple(map(is_uncertain, outputs, shares))
    return FakeRun(
        tuple(outputs),
        tuple(shares),
        tuple(offsets),
        tuple(operators.calls),
        True,
        uncertain,
        operators.flops,
        is_turned,
    )


def _is_turned(operators: list[Any], bases: list[torch.Tensor]) -> bool:
    """Return whether an index of symbolic sizes that is not row-major decides the memory order of the result; the
    fake implementation assumes row-major (`with_kernel_strides` handles static sizes)."""
    if aten.index.Tensor not in operators:
        return False
    indices = [Layout.of(each) for each in bases if each.dtype in (torch.int32, torch.int64)]
    return not all(map(_is_row_major, indices)) and not all(map(is_static, bases))


def _may_differ(layout: Layout, arguments: list[Layout]) -> bool:
    """Return whether torch's kernel and its fake implementation may lay out a tensor differently: it, or an argument
    of its shape, is not row-major, or an argument is a channels-last image.

    Kernels and fake implementations preserve different layouts: the kernels of batch norm, dropout, pooling and random
    numbers return row-major results for a transposed argument, whose order their fake implementations keep; with
    floor_divide it is the other way round.
    """
    alike = [each for each in arguments if same(each.shape, layout.shape)]
    return not all(map(_is_row_major, (layout, *alike))) or any(map(_has_channels_last, arguments))


def _is_row_major(layout: Layout) -> bool:
    """Return whether strides are row-major, ignoring dims of size 1."""
    steps = zip(layout.shape, layout.strides, contiguous(layout.shape), strict=True)
    pairs = [(step, expected) for size, step, expected in steps if not isinstance(size, int) or size != 1]
    return all(same((step,), (expected,)) for step, expected in pairs)


def _has_channels_last(layout: Layout) -> bool:
    """Return whether it is a channels-last image. If a kernel of torch's returns one, the strides of its fake
    implementation are not trusted."""
    if len(layout.shape) not in (4, 5) or not all(isinstance(each, int) for each in (*layout.shape, *layout.strides)):
        return False
    (_, channels, *_), (_, step, *inner) = layout.shape, layout.strides
    return step == 1 and channels > 1 and all(each >= channels for each in inner)


def pair_leaves(output: Any, result: Any) -> list[tuple[Any, Any]]:
    """Return the leaves of a call's output with their values in its result: one proxy may stand for a tuple."""
    if isinstance(output, (tuple, list)):
        return [pair for one, other in zip(output, result, strict=True) for pair in pair_leaves(one, other)]
    return [(output, result)]


RESTRIDED = Symbol(
    "restrided",
    "forge.restrided",
    meta=lambda x, strides, metadata=None: x,
    tags=frozenset({Tag.MAY_BE_VIEW}),
    op=to_strides,
)


def with_strides(trace: Trace, targets: Collection[str], layouts: Layouts | None) -> Trace:
    """Return a claimed trace whose outputs `targets` have the strides that were recorded for them with the program.

    `layouts` is updated: a backward that reads these names sees the same strides."""
    inputs = set(trace.input_names)
    noted = list({x.name: x for x in tensors(trace.output) if x.name in targets and x.strides is not None}.values())
    noted = [x for x in noted if inputs.issuperset(names(x.strides))]
    if not noted:
        return trace
    layouts = _layouts_of(trace, [x.name for x in noted], layouts)
    calls, copies = [], {}
    for proxy in noted:
        there = layouts.values.get(proxy.name)
        if not isinstance(there, Layout) or not there.is_plain:  # torch conjugates it when it is read
            continue
        if same(there.strides, proxy.strides) and proxy.name not in layouts.uncertain:
            continue
        copies[proxy.name] = new = trace.tensor(proxy.shape, proxy.dtype, proxy.device, name=f"{proxy.name}_restrided")
        calls.append(BoundSymbol(RESTRIDED, (proxy, proxy.strides), {}, new))
        layouts.run(calls[-1])
        layouts.replace(proxy, new.name)
    output = tree_map(lambda leaf: copies.get(leaf.name, leaf) if isinstance(leaf, Proxy) else leaf, trace.output)
    return trace.derive(trace.stage, [*trace.bound_symbols, *calls], output=output) if calls else trace


def _layouts_of(trace: Trace, targets: list[str], layouts: Layouts | None) -> Layouts:
    """Return the layouts of a claimed trace's values: `layouts` if it has them all, else computed again."""
    if layouts is not None and layouts.values.keys() >= set(targets):
        return layouts
    layouts = Layouts(trace.inputs)
    layouts.add_constants(trace.constants)
    for call in live_calls(trace.bound_symbols, targets):
        layouts.run(call)
        layouts.settle(call)
    return layouts
