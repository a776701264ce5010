"""A region as a graph of aten operators, traced on fake tensors, in the form that Inductor compiles."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import takewhile
from operator import add, mul
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from forge import prims
from forge.compiler.claim import ClaimedCall
from forge.compiler.layout import Layouts, pair_leaves
from forge.compiler.standalone import claim
from forge.executors.inductorex import interpolation
from forge.executors.registry import resolve_executors
from forge.executors.torchex.quantized import IN_LOOPS
from forge.executors.torchex.row_product import in_loops, row_product
from forge.ir import BoundSymbol, Proxy, TensorProxy, Trace, check
from forge.ir.locks import new_lock
from forge.ir.pytree import tensors, tree_map
from forge.prims.core import statically_true
from forge.prims.library import symbolic_dispatch
from forge.torch_internals.dispatch import OpOverload, disable_current_modes, keep_operators, schema_of
from forge.torch_internals.fake_tensors import fake_impls
from forge.torch_internals.inductor.compiler import select_decomp_table
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.sympy import PythonReferenceAnalysis, sympy_interp
from forge.torch_internals.tensors import storage_id

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
_LAUNCHES = "cuda"  # devices on which a kernel is a launch
HAS_ROW_PRODUCTS = "has row products"  # in a graph's metadata
_COPIES = frozenset({aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default})
_SHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim})
EXTERN = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution})  # torch's kernels in any case
FALLBACK = "should_fallback"  # the key that Inductor's lowerings read in a node's metadata
_lock = new_lock()
# indices of known sizes are expanded to a symbolic shape; outside the fake mode, torch rejects that:
# its fake implementation is inside, as that of aten.index is
fake_impls.op_implementations_dict.setdefault(
    aten._unsafe_index.Tensor, fake_impls.op_implementations_dict[aten.index.Tensor]
)


def claim_by_torch(calls: list[BoundSymbol]) -> list[BoundSymbol]:
    """Claim the calls for torch's functions."""
    trace = Trace("region")
    trace.adopt(calls)
    return claim(trace, resolve_executors(["torch"]))[0].bound_symbols


def decompositions() -> dict[Any, Callable]:
    """Return Inductor's decompositions and forge's own, by operator."""
    return {**select_decomp_table(), **_OWN}


@contextmanager
def exclusive() -> Iterator[None]:
    """Enter a context in which Inductor compiles: for one thread at a time, and under none of the caller's modes."""
    with _lock, disable_current_modes(), torch.no_grad():
        yield


def graph_of(region: Trace, layouts: Layouts, *, eager_numerics: bool) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the region as a graph of aten operators, and the fake inputs that it was traced with. rounds:
    its nodes record which values torch's functions would have rounded."""
    calls = [(call, True) for call in claim_by_torch(region.bound_symbols)]
    graph, example_inputs = _trace(calls, region, layouts, eager_numerics=eager_numerics)
    for node in graph.graph.nodes:
        check(not changes(node.target), lambda node=node: f"{node.target} changes its argument", RuntimeError)
    return graph, example_inputs


def graph_of_program(
    program: Trace, claimed: Sequence[ClaimedCall], layouts: Layouts, *, eager_numerics: bool
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return a whole program as a graph of aten operators, and its fake inputs.

    The calls that Inductor takes into regions become loops. The operators of the others are marked, so that Inductor
    calls torch's kernels for them, even if it has loops for them.
    """
    calls = [
        (call, each.fuser is not None)
        for each in claimed
        for call in (each.calls if each.fuser is None else claim_by_torch([each.bound]))
    ]
    graph, example_inputs = _trace(calls, program, layouts, eager_numerics=eager_numerics)
    writes = [node.args[0] for node in graph.graph.nodes if changes(node.target)]
    if any(node.op != "placeholder" for node in writes):  # functional wrappers lack the symbolic sizes of some calls
        functional = partial(functionalize, remove="mutations")
        return _trace(calls, program, layouts, eager_numerics=eager_numerics, wrap=functional)
    return graph, example_inputs


def _trace(
    calls: Sequence[tuple[BoundSymbol, bool]],
    program: Trace,
    layouts: Layouts,
    *,
    eager_numerics: bool,
    wrap: Callable[[Callable], Callable] = lambda run: run,
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the graph of torch's calls, each with whether its operators are decomposed for Inductor's loops. wrap: is
    applied to the traced function."""
    names = program.input_names
    in_loops = True

    def in_a_loop(decomposition: Callable) -> Callable:
        return lambda *args, **kwargs: decomposition(*args, **kwargs) if in_loops else NotImplemented

    def run(*inputs: Any) -> list[torch.Tensor]:
        nonlocal in_loops
        values = dict(zip(names, inputs, strict=True))
        symbols = {each.node.expr: each for each in inputs if isinstance(each, torch.SymInt)}
        mode = get_proxy_mode()
        assert mode is not None, "make_fx has one"
        nodes = mode.tracer.graph.nodes
        for call, in_loops in calls:
            args, kwargs = tree_map(partial(_value, values, symbols), (tuple(call.args), call.kwargs))
            op, last = call.symbol.op, next(iter(reversed(nodes)), None)
            assert op is not None
            result = op(*(_round_comparison(op, args) if in_loops else args), **kwargs)
            if not in_loops:
                _leave_to_torch(takewhile(partial(operator.is_not, last), reversed(nodes)))
            for leaf, value in pair_leaves(call.output, result):
                if isinstance(leaf, Proxy):
                    values[leaf.name] = value
                    _check_sizes(leaf, value)
        return [values[proxy.name] for proxy in tensors(program.output)]

    rounding = inductor_config.patch(emulate_precision_casts=eager_numerics)
    table = {
        target: each if getattr(target, "is_view", False) else in_a_loop(each)
        for target, each in decompositions().items()
    }
    with layouts.fake, symbolic_dispatch(layouts.is_symbolic), keep_operators(), rounding:
        example_inputs = [layouts.stand_in(proxy) for proxy in program.inputs]
        graph = make_fx(wrap(run), decomposition_table=table)(*example_inputs)
    if any(call.symbol.op in _ROW_LOOPS for call, _ in calls):
        _share_rows(graph.graph)
        graph.meta[HAS_ROW_PRODUCTS] = True
    for node in graph.graph.nodes:
        if node.target is aten.as_strided_.default and _only_relabels(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if node.target in _OF_TWO:
            _of_two(node)
            continue
        if node.meta.get(FALLBACK):
            continue
        _round_number(node)
        _fold(node)
    _check_dtypes(graph, program)
    return graph, [_canonical_size(each) for each in example_inputs]


def _leave_to_torch(nodes: Iterable[torch.fx.Node]) -> None:
    """Mark operators for which Inductor must call torch's kernels. It has no loops for products and convolutions, and
    must handle views itself."""
    for node in nodes:
        if not isinstance(node.target, OpOverload) or node.target.overloadpacket in EXTERN:
            continue
        memory = {_memory_of(each) for each in node.all_input_nodes}
        if _memory_of(node) is None or _memory_of(node) not in memory:
            node.meta[FALLBACK] = True


def _memory_of(node: torch.fx.Node) -> int | None:
    """Return the identity of a value's storage; None for anything but a single tensor."""
    value = node.meta["val"]
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node: torch types them as a union of all that a graph may hold."""
    return node.args


def results_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes that a graph returns, in one list."""
    return list(arguments(graph.graph.output_node())[0])


def _check_sizes(proxy: Proxy, value: Any) -> None:
    """Raise NotImplementedError if a size is symbolic in the graph where a guard makes it 1 in the trace: loops that
    broadcast that dim would read beyond it."""
    if not isinstance(proxy, TensorProxy) or not isinstance(value, torch.Tensor):
        return
    for size, length in zip(proxy.shape, value.shape, strict=True):
        is_symbolic = isinstance(length, torch.SymInt) and length.node.maybe_as_int() is None
        if is_symbolic and isinstance(size, int) and size == 1:
            raise NotImplementedError(f"{proxy} has a size of {length} in the graph of aten operators")


def _check_dtypes(graph: torch.fx.GraphModule, region: Trace) -> None:
    """Raise NotImplementedError if a decomposition's result has another dtype than torch's kernel's (block_diag of one
    empty tensor of another dtype)."""
    for proxy, node in zip(region.output, results_of(graph), strict=True):
        if isinstance(proxy, TensorProxy):
            dtype = node.meta["val"].dtype
            check(
                dtype == proxy.dtype,
                lambda proxy=proxy, dtype=dtype: f"{proxy.name} would be {dtype}, where torch gives {proxy.dtype}",
                NotImplementedError,
            )


def _canonical_size(value: Any) -> Any:
    """Return a size by its current symbol. Inductor defines the original symbol of a size, which a guard may have
    replaced since: two inputs of equal size have two symbols, of which one is used."""
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


# functions that make_fx calls with all of a number's terms, and the binary operator that Inductor knows
_OF_TWO: dict[Any, Callable] = {add: add, mul: mul}
_OF_TWO |= {
    several: two
    for name, two in (("_nary_sym_max", torch.sym_max), ("_nary_sym_min", torch.sym_min))
    if (several := getattr(proxy_tensor, name, None)) is not None  # since torch 2.13
}


def _of_two(node: torch.fx.Node) -> None:
    """Split a sum, product, maximum or minimum of several sizes into binary ones."""
    *others, last = node.args
    graph, of_two = node.graph, _OF_TWO[node.target]
    with graph.inserting_before(node):
        result = reduce(lambda x, y: graph.call_function(of_two, (x, y)), others)
    node.target, node.args = of_two, (result, last)


# where numbers become elements of the result, by index among the arguments
_ELEMENTS: dict[Any, int] = {
    aten.clamp_max: 1,
    aten.clamp_min: 1,
    aten.constant_pad_nd: 2,
    aten.full: 1,
    aten.scalar_tensor: 0,
}


def _round_number(node: torch.fx.Node) -> None:
    """Round a number that is an element of a result of half precision; Inductor does not."""
    place = _ELEMENTS.get(getattr(node.target, "overloadpacket", None), len(node.args))
    if place < len(node.args):
        node.update_arg(place, round_to_half(node.args[place], node.meta["val"].dtype))


_COMPARISONS = frozenset({torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne})


def _round_comparison(function: Callable, args: tuple) -> tuple:
    """Return the arguments of a call. A number compared with half precision is rounded, as in torch's kernel.

    Kernels that only compare internally do not round (hardtanh's gradient): their decompositions' calls are left alone.
    """
    if function not in _COMPARISONS or not isinstance(args[0], torch.Tensor):
        return args
    return args[0], round_to_half(args[1], args[0].dtype)


def round_to_half(number: Any, dtype: torch.dtype) -> Any:
    """Return a number rounded to a half-precision dtype; for another argument or dtype, the argument itself."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or dtype not in HALVES:
        return number
    with disable_current_modes():
        return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def _clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    x = x if min is None else torch.clamp_min(x, min)
    return x if max is None else torch.clamp_max(x, max)


def _view_copy(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return x.reshape(size).clone(memory_format=torch.contiguous_format)


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    return x.rsqrt() if exponent == -0.5 and (x.is_floating_point() or x.is_complex()) else NotImplemented


def _flip(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return select_decomp_table()[aten.flip.default](x, dims) if x.ndim else x.clone()


def _avg_pool(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    count = len(kernel_size)
    steps, pads = tuple(stride or kernel_size), tuple(padding) * (count // len(padding))
    covered = prims.covered_dims(x, tuple(kernel_size), steps, pads, ceil_mode)
    lengths, dims = x.shape[x.ndim - count :], [*range(x.ndim - count, x.ndim)]
    if all(covered) and x.is_floating_point():
        if divisor_override is None:
            return x.mean(dims, keepdim=True)
        total = x.sum(dims, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        return (total / divisor_override).to(x.dtype)
    clips = [is_covered and isinstance(length, int) for is_covered, length in zip(covered, lengths, strict=True)]
    clipped = [length if clip else size for length, size, clip in zip(lengths, kernel_size, clips, strict=True)]
    if clipped == list(kernel_size):
        return NotImplemented
    pool = aten.avg_pool3d if count > 2 else aten.avg_pool2d
    return pool.default(x, clipped, steps, pads, ceil_mode, count_include_pad, divisor_override)


INTERPOLATIONS: dict[Any, Callable] = {
    aten.upsample_linear1d.default: interpolation.linear,
    aten.upsample_bilinear2d.default: interpolation.linear,
    aten.upsample_trilinear3d.default: interpolation.linear,
    aten.upsample_bicubic2d.default: interpolation.cubic,
}
_ROW_LOOPS: dict[Any, Callable] = {row_product: in_loops, **IN_LOOPS}

# clamp: Inductor computes in float32, where the bounds are other numbers. view_copy: its decomposition copies no tensor
# that has no view of that shape. pow: torch's kernel takes the root, whose values of -0.0 and -inf are others.
# flip: before torch 2.13, Inductor has no index for the missing dim of a 0-d tensor. avg_pool: Inductor's loops visit
# each place of a window that ceil_mode clips, and one window is a mean
_OWN: dict[Any, Callable] = {
    aten.avg_pool2d.default: _avg_pool,
    aten.avg_pool3d.default: _avg_pool,
    aten.clamp.default: _clamp,
    aten.flip.default: _flip,
    aten.pow.Tensor_Scalar: _pow,
    **INTERPOLATIONS,
    **_ROW_LOOPS,
    aten.view_copy.default: _view_copy,
}


def _fold(node: torch.fx.Node) -> None:
    """Compute an elementwise function of single-element tensors; Inductor does so without rounding."""
    inputs = node.all_input_nodes
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or not inputs or not all(map(_is_uniform, inputs)):
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _one_element)
    target: Any = node.target
    output, value = node.meta["val"], target(*args, **kwargs).item()
    options = {"dtype": output.dtype, "layout": torch.strided, "device": output.device, "pin_memory": False}
    node.target, node.args, node.kwargs = aten.full.default, (list(output.shape), value), options


def _share_rows(graph: torch.fx.Graph) -> None:
    """Materialize a row that several products read once, unless it is already in a GPU's memory, which would cost a
    launch: as_strided makes Inductor write it (in_loops)."""
    writes: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in graph.nodes:
        if node.target is not aten.as_strided.default or not _only_relabels(node):
            continue
        copy = root = arguments(node)[0]
        dtypes = []  # each rounds
        while root.target in _COPIES or root.target in _SHAPES:
            dtypes.append(root.meta["val"].dtype)
            root = arguments(root)[0]
        key = (root, tuple(copy.meta["val"].shape), *dtypes)
        is_there = root.op == "placeholder" and root.meta["val"].device.type == _LAUNCHES
        first = copy if is_there else writes.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_uniform(node: torch.fx.Node) -> bool:
    if node.target is not aten.full.default:
        return False
    shape, value = arguments(node)[:2]
    return isinstance(value, (int, float)) and all(isinstance(size, int) for size in shape)


def _one_element(node: torch.fx.Node) -> torch.Tensor:
    full = node.meta["val"]
    return torch.full([1] * full.ndim, arguments(node)[1], dtype=full.dtype)


def _only_relabels(node: torch.fx.Node) -> bool:
    """Return whether as_strided only changes strides that do not matter, of dims of size 1: adaptive pooling of a
    channels-last image ends so, in place."""
    args: Any = torch.fx.map_arg(node.args, lambda each: each.meta["val"])  # a size may be a node
    x, shape, strides = args[:3]
    if len(args) > 3 or len(shape) != x.ndim:
        return False
    dims = zip(x.shape, shape, x.stride(), strides, strict=True)
    return all(
        statically_true(size == new) and (statically_true(size == 1) or statically_true(one == other))
        for size, new, one, other in dims
    )


def changes(target: Any) -> bool:
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


def is_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


class _Lengths(PythonReferenceAnalysis):
    """Evaluator of expressions of sizes with Python's operators, divisions too: torch's division creates a new
    expression, unrelated to the graph's sizes."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return math.trunc(x)


def _value(values: dict[str, Any], symbols: dict[Any, torch.SymInt], leaf: Any) -> Any:
    """Return an argument's value in the graph. An expression of sizes is computed there: make_fx identifies a size by
    the calls that made it."""
    if isinstance(leaf, torch.SymInt) and symbols.keys() >= leaf.node.expr.free_symbols:
        return sympy_interp(_Lengths, symbols, leaf.node.expr)
    return values[leaf.name] if isinstance(leaf, Proxy) else leaf
