"""Which calls Inductor writes loops for, and an artifact of a region of them.

Source: torch._inductor.compile_fx.compile_fx_inner, which compiles a graph of aten operators on tensors without values.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add, mul
from typing import Any

import torch
from torch.compiler import config as compiler_config
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from forge.compiler.claim import claim
from forge.compiler.layout import ATTENTION, Layout, Layouts, pair_leaves
from forge.executors.errors import CheckError
from forge.executors.executor import Decision, Declined, decline, resolve_executors
from forge.executors.inductorex import accuracy, artifacts, compile_wait, isa_probe
from forge.executors.inductorex.graphs import ROUNDED, describe
from forge.executors.inductorex.out_of_process import Compilation
from forge.executors.inductorex.strides import Strides, sizes_of
from forge.ir import BoundSymbol, Number, NumberProxy, Proxy, TensorProxy, Trace, check
from forge.ir.checks import in_one_line
from forge.ir.locks import new_lock
from forge.ir.pytree import leaves, proxies, tensors, tree_map
from forge.ir.strides import same
from forge.ir.unresolved import UnresolvedSymInt
from forge.prims.library import symbolic_dispatch
from forge.torch_internals.dispatch import OpOverload, disable_current_modes
from forge.torch_internals.dynamo import TracingContext, tracing
from forge.torch_internals.fake_tensors import FakeTensorMode, fake_impls
from forge.torch_internals.functorch import functorch_config
from forge.torch_internals.inductor import barriers, index_bound, local_buffers
from forge.torch_internals.inductor.compiler import (
    CompiledFxGraph,
    compile_fx_inner,
    get_cpp_wrapper_config,
    lowering,
    select_decomp_table,
)
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.sympy import PythonReferenceAnalysis, sympy_interp
from forge.torch_internals.versions import TORCH

aten = torch.ops.aten
_log = logging.getLogger("forge.inductor")

# torch's own kernels for these are the ones to run
_TORCHS = frozenset(
    {
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.addmv,
        aten.mv,
        aten.dot,
        aten.vdot,
        aten.addbmm,
        aten.convolution,
        aten.convolution_backward,
        aten.embedding_dense_backward,
        aten.upsample_bicubic2d,
    }
)
_WRITES = frozenset({aten.native_batch_norm, aten.cudnn_batch_norm})  # the running statistics: no schema says so
# whose kernels refuse mixtures of dtypes, or give another one than their fake implementations and decompositions
_OF_ONE_DTYPE = frozenset(
    {aten.binary_cross_entropy, aten.binary_cross_entropy_backward, aten.huber_loss, aten.huber_loss_backward}
)
_NORMS = frozenset(  # with parameters in float32 for half precision
    {
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
    }
)
_REMAINDERS = frozenset({aten.remainder, aten.fmod})
_WRONG = frozenset(
    {
        aten.floor_divide,  # of infinities; of integers by zero, which ends the process
        aten.div.Tensor_mode,
        aten.div.Scalar_mode,
        aten.avg_pool2d_backward,  # with ceil_mode
        aten.avg_pool3d_backward,
        aten.fractional_max_pool3d,  # its samples are taken in reverse, as those of an image are
        aten.scalar_tensor,  # a whole number's dtype
        aten.multilabel_margin_loss_forward,  # of a row with fewer targets than classes
        aten.frexp,  # of a tensor of one value: Inductor folds the call as if it gave one tensor
        aten.nextafter,  # of half precision: the next float32, rounded back
        aten._unsafe_masked_index,  # of indices out of range, which torch clamps
        aten._unsafe_masked_index_put_accumulate,
        *([aten.searchsorted, aten.bucketize] if TORCH < (2, 13) else []),  # among a part of a tensor (issue 182343)
    }
)
# Inductor's vectorized C++ reduces 8-bit integers from a wrong initial value, and does not compile extrema of bools
_EXTREMA = frozenset(
    {aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin, aten.cummax, aten.cummin, aten.max, aten.min}
)
_SUMS = frozenset({aten.cumprod, aten.cumsum, aten.prod, aten.sum})
_BYTES = (torch.bool, torch.int8, torch.uint8)
_INEXACT = frozenset({aten.acosh, aten.erfinv})  # on a CPU: acosh of 2e19 and more is infinite, and erfinv has 5 digits
# an index out of range: torch raises; Inductor's loops on a CPU end the process, or wrap it
_INDEXED = frozenset(
    {
        aten.embedding,
        aten.gather,
        aten.index,
        aten.index_add,
        aten.index_copy,
        aten.index_fill,
        aten.index_put,
        aten.index_reduce,
        aten.index_select,
        aten.nll_loss_forward,
        aten.nll_loss2d_forward,
        aten.put,
        aten.scatter,
        aten.scatter_add,
        aten.scatter_reduce,
        aten.take,
    }
)
# of half precision, Inductor's loops round where torch's kernels do not, or the other way round
_ROUNDED_OTHERWISE = frozenset(
    {
        aten._log_softmax,
        aten.addcmul,
        aten.addr,
        aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward,
        aten.col2im,
        aten.glu,
        aten.glu_backward,
        aten.huber_loss,
        aten.huber_loss_backward,
        aten.ldexp,
        aten.linalg_cross,
        aten.log_sigmoid_backward,
        aten.logit,
        aten.logit_backward,
        aten.logsumexp,
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.pow,
        aten.prod,
        aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward,
        aten.soft_margin_loss,
        aten.special_entr,
        aten.special_xlog1py,
        aten.xlogy,
    }
)
_ARITHMETIC = frozenset({aten.add, aten.div, aten.mul, aten.rsub, aten.sub})
# torch's kernels round each step: those for a CPU in float16, those for a GPU in both
_BY_STEPS = frozenset({aten.sigmoid_backward, aten.tanh_backward})
_BY_STEPS_ON_A_GPU = frozenset({aten._softmax_backward_data})  # which multiply by the gradient in a kernel of its own
# torch's kernels round the numbers that they are given first; that of a division rounds what is divided alone
_ROUND_NUMBERS = frozenset({aten.add, aten.fmod, aten.remainder, aten.sub, aten.rsub})
_ROUND_NUMBERS_ON_A_GPU = frozenset({aten.threshold, aten.threshold_backward})
_EXACT = frozenset({aten.abs, aten.cat, aten.clone, aten.empty, aten.full, aten.full_like, aten.neg, aten.where})
_HALVES = (torch.bfloat16, torch.float16)
# strides and devices are known from the trace; partitions serve CUDA graphs, and cost a call each time; a kernel that
# reduces rows and columns at once leaves results unwritten that lie in another one's memory (torch's issue 193061)
_OFF = ("size_asserts", "alignment_asserts", "graph_partition", "triton.mix_order_reduction")
_SETTINGS = {name: False for name in _OFF if hasattr(inductor_config, name)}
_CONVERSIONS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
_NOTHING = frozenset({aten.detach.default, aten.alias.default})
_lock = new_lock()
isa_probe.remember()
# indices of known lengths are expanded to a symbolic shape; outside the mode of tensors without values, torch refuses:
# its fake implementation is inside, as that of aten.index is
fake_impls.op_implementations_dict.setdefault(
    aten._unsafe_index.Tensor, fake_impls.op_implementations_dict[aten.index.Tensor]
)


def takes(bound: BoundSymbol, *, whole: bool = False, rounds: bool = False) -> Decision:
    """Return whether the aten operators of torch's function for a call are ones that Inductor writes loops for; or, as
    a part of a whole program, ones that it calls. rounds: whether its loops must round where torch's kernels do."""
    if not all(isinstance(proxy, (TensorProxy, NumberProxy)) for proxy in _proxies_of(bound)):  # what attention keeps
        return whole or decline("it reads a value that is not a tensor")
    results = list(tensors(bound.output))
    if results and all(map(_has_no_elements, results)):
        return decline("its results have no elements")
    operators = _operators(bound)
    if operators is None:
        return decline("torch does not run it on fake tensors")
    for operator in operators:
        if operator.overloadpacket in _OF_ONE_DTYPE | _NORMS and _mixes_dtypes(bound, operator):
            return decline(f"{operator} supports one dtype only", parts=False)
        if not (_is_function(operator) if whole else _has_loops(operator)):
            return decline(f"{operator} is left to torch")
        if operator.overloadpacket in _INDEXED and _is_on_cpu(bound):
            return decline(f"{operator} raises where an index is out of range")
        if operator.overloadpacket is aten.upsample_nearest2d_backward and not _is_of_known_size(bound):
            return decline(f"Inductor has loops for {operator} of static sizes only")
        if operator.overloadpacket in _INEXACT and _is_on_cpu(bound):
            return decline(f"Inductor's C++ for {operator} is less exact than torch's kernel")
        if _is_on_cpu(bound) and _reduces_bytes(bound, operator.overloadpacket):
            return decline(f"Inductor's C++ for {operator} of 8-bit integers and bools is wrong")
        if operator.overloadpacket in _REMAINDERS and _may_divide_by_zero(bound):
            return decline(f"{operator} of integers raises where it divides by zero")
        if operator.overloadpacket is aten.any and tensors(bound.output)[0].dtype == torch.uint8:
            return decline(f"{operator} of uint8 is uint8, and Inductor's is bool")
    return _rounds_alike(bound, operators) if rounds and _is_half(bound) else True


def _has_no_elements(proxy: TensorProxy) -> bool:
    return any(isinstance(length, int) and length == 0 for length in proxy.shape)


def _is_of_known_size(bound: BoundSymbol) -> bool:
    """Return whether the height and the width of what a call returns are numbers."""
    return all(isinstance(length, int) for proxy in tensors(bound.output) for length in proxy.shape[-2:])


def _is_half(bound: BoundSymbol) -> bool:
    return any(proxy.dtype in _HALVES for proxy in tensors((bound.args, bound.kwargs, bound.output)))


def _rounds_alike(bound: BoundSymbol, operators: list[Any]) -> Decision:
    """Return whether Inductor's loops for a call of half precision round where torch's kernels do."""
    if TORCH < (2, 13) and _is_on_cpu(bound):
        return decline("before torch 2.13, Inductor's C++ does not round as eager does", parts=False)
    for operator in operators:
        if _rounds_otherwise(bound, operator.overloadpacket):
            return decline(f"Inductor's loops for {operator} round otherwise than torch's kernel", parts=False)
    region = Trace("region")
    region.inputs, region.output = _proxies_of(bound), tuple(tensors(bound.output))
    region.bound_symbols.append(bound)
    try:
        with _exclusive():
            graph, _ = _graph_of(region, Layouts(region.inputs, shared=False), rounds=True)
    except UnresolvedSymInt:
        raise
    except Exception as error:
        return decline(f"it has no graph: {in_one_line(error)}")
    inner = next(filter(_rounds_within, graph.graph.nodes), None)
    if inner is not None:
        return decline(f"Inductor makes {inner.target} and others of it, which each round", parts=False)
    return True


def _rounds_otherwise(bound: BoundSymbol, operator: Any) -> bool:
    """Return whether Inductor's loops for an operator are known to round elsewhere than torch's kernel."""
    (dtype, *_) = [proxy.dtype for proxy in tensors((bound.args, bound.kwargs, bound.output)) if proxy.dtype in _HALVES]
    if operator in _BY_STEPS and (dtype == torch.float16 or not _is_on_cpu(bound)):
        return True
    if operator in _ARITHMETIC and any(_is_number_of_another_dtype(proxy, dtype) for proxy in tensors(bound.args)):
        return True
    if operator in _BY_STEPS_ON_A_GPU and not _is_on_cpu(bound):
        return True
    if operator is aten.div:
        rounded = bound.args[:1]
    elif operator in _ROUND_NUMBERS or (operator in _ROUND_NUMBERS_ON_A_GPU and not _is_on_cpu(bound)):
        rounded = (bound.args, bound.kwargs)
    else:
        return operator in _ROUNDED_OTHERWISE
    numbers = [leaf for leaf in leaves(rounded) if isinstance(leaf, float)]
    return any(_round_to_half(each, dtype) != each for each in numbers)


def _is_number_of_another_dtype(proxy: TensorProxy, dtype: torch.dtype) -> bool:
    """Return whether torch's kernels take a tensor for a number: that they compute with it unrounded."""
    return proxy.ndim == 0 and proxy.device.type == "cpu" and proxy.dtype not in (dtype, torch.bool)


def _rounds_within(node: torch.fx.Node) -> bool:
    """Return whether a node gives a value of half precision that an operator's decomposition goes on with: torch's
    kernel, which is one, does not round it."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in _HALVES:
        return False
    return not (node.meta.get(ROUNDED) or _is_exact(node)) and any(user.op != "output" for user in node.users)


def _is_exact(node: torch.fx.Node) -> bool:
    """Return whether a call gives values that it is given, or constants."""
    return _is_view(node) or getattr(node.target, "overloadpacket", None) in _EXACT


def _mixes_dtypes(bound: BoundSymbol, operator: Any) -> bool:
    """Return whether a call's tensors have dtypes that its operator's kernel may refuse."""
    dtypes = {proxy.dtype for proxy in tensors(bound.args)}
    if operator.overloadpacket in _NORMS and dtypes in (
        {torch.bfloat16, torch.float32},
        {torch.float16, torch.float32},
    ):
        return False
    return len(dtypes) > 1


def _is_on_cpu(bound: BoundSymbol) -> bool:
    return any(proxy.device.type == "cpu" for proxy in tensors(bound.output))


def _reduces_bytes(bound: BoundSymbol, operator: Any) -> bool:
    """Return whether an operator reduces 8-bit integers or bools: a sum those of its result's dtype."""
    if operator not in _EXTREMA | _SUMS:
        return False
    operand = (bound.args, bound.kwargs) if operator in _EXTREMA else bound.output
    return tensors(operand)[0].dtype in _BYTES


def _may_divide_by_zero(bound: BoundSymbol) -> bool:
    if any(proxy.dtype.is_floating_point for proxy in tensors(bound.output)):
        return False
    divisor = bound.args[1] if len(bound.args) > 1 else None
    return not isinstance(divisor, int) or divisor == 0


def _operators(bound: BoundSymbol) -> list[Any] | None:
    try:
        calls = claim_by_torch([bound])
    except NotImplementedError:
        return None
    layouts = Layouts()
    for proxy in _proxies_of(bound):
        layouts.add(proxy)
    found: list[Any] = []
    for call in calls:
        read = [proxy.name for proxy in proxies((call.args, call.kwargs))]
        inside = not layouts.values.keys() >= set(read)  # a constant that the call's body alone reads
        ran = None if inside else layouts.run(call)
        if ran is None or not ran.known:
            return None
        found += ran.operators
    return found


def _proxies_of(bound: BoundSymbol) -> list[Proxy]:
    found = [leaf for leaf in leaves((bound.args, bound.kwargs)) if isinstance(leaf, Proxy)]
    return list({proxy.name: proxy for proxy in found}.values())


def claim_by_torch(calls: list[BoundSymbol]) -> list[BoundSymbol]:
    """Return the calls as torch's own."""
    trace = Trace("region")
    trace.adopt(calls)
    return claim(trace, resolve_executors(["torch"]))[0].bound_symbols


def _has_loops(operator: Any) -> bool:
    if operator.namespace == "prim" or operator in _NOTHING:
        return True
    if _changes(operator):  # a region's graph is a function of its inputs
        return False
    if _is_of(operator, _TORCHS | _WRITES | _WRONG) or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return operator in _decompositions() or (operator in lowering.lowerings and operator not in lowering.fallbacks)


def _is_function(operator: Any) -> bool:
    if _has_loops(operator):
        return True
    draws = torch.Tag.nondeterministic_seeded in operator.tags and operator.overloadpacket not in ATTENTION
    return not (draws or _changes(operator) or _is_of(operator, _WRONG | _WRITES))


def _is_of(operator: Any, known: frozenset) -> bool:
    """Return whether an operator, in all its overloads or in this one, is among those."""
    return operator in known or operator.overloadpacket in known


def _decompositions() -> dict:
    return select_decomp_table()


def count_kernels(bound: BoundSymbol) -> int:
    """Return how many kernels torch's function for a call runs."""
    return len([op for op in _operators(bound) or () if op.namespace != "prim" and op not in _NOTHING])


def compile_region(
    region: Trace, codegen: "Codegen | None" = None, *, whole: bool = False, rounds: bool = False
) -> Callable | Declined:
    """Return a function of one list, the region's inputs, that returns its outputs. Declined where Inductor fails, with
    the error unless it is a NotImplementedError that says what Inductor is known not to do.

    codegen: makes the function of the lowered graph; Inductor by default. rounds: each value of half precision is
    rounded to its dtype, as torch's functions do.
    """
    try:
        layouts = Layouts(region.inputs, shared=False)
        with _exclusive():
            graph, given = _graph_of(region, layouts, rounds=rounds)
            return (codegen or generate)(graph, given, layouts.fake, _other_strides(graph, region, given), whole=whole)
    except (UnresolvedSymInt, CheckError):
        raise
    except Exception as error:
        _log.debug("%s", region, exc_info=True)
        inner = getattr(error, "inner_exception", None)  # of Inductor's own error
        error = inner if isinstance(inner, index_bound.LongIndex) else error
        if isinstance(error, NotImplementedError) and str(error):
            return decline(f"Inductor cannot compile it: {in_one_line(error)}")
        compile_wait.notice(error)
        return decline(f"Inductor failed: {in_one_line(error)}", error=error)


def generate(
    graph: torch.fx.GraphModule, given: list[Any], fake: FakeTensorMode, strides: Strides, *, whole: bool
) -> Callable:
    """Inductor's artifact of a graph; `given` are stand-ins for its inputs, of the mode `fake`. strides: those that
    results get where the graph gives others. whole: C++ calls all kernels."""
    isa_probe.wait()
    with compile_wait.defer_waits() as started:
        compiled = compile_graph(graph, given, fake, whole=whole)
        started.function = strides.wrap(compiled.current_callable)
    artifacts.keep(started.function, compiled, strides)
    return started.function


Codegen = Callable[..., Callable | Declined]  # of the arguments of `generate`


def compile_region_in_worker(region: Trace, start: Callable = Compilation, *, rounds: bool = False) -> Any | Declined:
    """`compile_region` of a whole program by another process. What it returns can be called once it is complete.

    start: is given the described graph, and the strides of results where the graph gives others.
    """
    try:
        layouts = Layouts(region.inputs, shared=False)
        with _exclusive():
            graph, given = _graph_of(region, layouts, rounds=rounds)
        inputs = [layouts.values[proxy.name] for proxy in region.inputs]
        if not all(isinstance(each, Layout) for each in inputs) or layouts.is_symbolic:
            return decline("its sizes are not static")
        return start(describe(graph, inputs), _other_strides(graph, region, given))
    except CheckError:
        raise
    except Exception as error:
        _log.debug("%s", region, exc_info=True)
        return decline(f"not compiled as a whole: {in_one_line(error)}")


@contextmanager
def _exclusive() -> Iterator[None]:
    """Enter a context in which Inductor compiles: for one thread at a time, and under none of the caller's modes."""
    with _lock, disable_current_modes(), torch.no_grad():
        yield


def _graph_of(region: Trace, layouts: Layouts, *, rounds: bool) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return the region as a graph of aten operators, and the stand-ins for its inputs that it was traced with. rounds:
    its nodes say which values torch's functions would have rounded."""
    calls = claim_by_torch(region.bound_symbols)
    names = region.input_names

    def run(*given: Any) -> list[torch.Tensor]:
        known = dict(zip(names, given, strict=True))
        symbols = {each.node.expr: each for each in given if isinstance(each, torch.SymInt)}
        for call in calls:
            args, kwargs = tree_map(partial(_value, known, symbols), (tuple(call.args), call.kwargs))
            result = call.symbol.op(*_round_comparison(call.symbol.op, args), **kwargs)
            known.update(
                (leaf.name, value) for leaf, value in pair_leaves(call.output, result) if isinstance(leaf, Proxy)
            )
        return [known[proxy.name] for proxy in region.output]

    rounding = inductor_config.patch(emulate_precision_casts=rounds)
    with layouts.fake, symbolic_dispatch(layouts.is_symbolic), rounding:
        given = [layouts.stand_in(proxy) for proxy in region.inputs]
        graph = make_fx(run, decomposition_table={**_decompositions(), **_OWN})(*given)
    for node in graph.graph.nodes:
        if node.target is aten.as_strided_.default and _only_relabels(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if node.target in _OF_TWO:
            _of_two(node)
            continue
        _round_number(node)
        _fold(node)
        check(not _changes(node.target), lambda node=node: f"{node.target} changes its argument", RuntimeError)
    _check_dtypes(graph, region)
    return graph, [_canonical_size(each) for each in given]


def _check_dtypes(graph: torch.fx.GraphModule, region: Trace) -> None:
    """Raise NotImplementedError where a decomposition gives another dtype than torch's kernel (block_diag of one empty
    tensor of another dtype)."""
    (results,) = graph.graph.output_node().args
    for proxy, node in zip(region.output, results, strict=True):
        if isinstance(proxy, TensorProxy):
            found = node.meta["val"].dtype
            check(
                found == proxy.dtype,
                lambda proxy=proxy, found=found: f"{proxy.name} would be {found}, where torch gives {proxy.dtype}",
                NotImplementedError,
            )


def _canonical_size(value: Any) -> Any:
    """Return a size by the symbol that stands for it now. Inductor defines the symbol that it was made with, which
    a guard may have replaced since: two inputs that turned out to have one size have two symbols, of which one is
    used."""
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


# what make_fx calls with all of a number's terms, and the operator of two that Inductor knows
_OF_TWO = {add: add, mul: mul}
_OF_TWO |= {
    several: two
    for name, two in (("_nary_sym_max", torch.sym_max), ("_nary_sym_min", torch.sym_min))
    if (several := getattr(proxy_tensor, name, None)) is not None  # since torch 2.13
}


def _of_two(node: torch.fx.Node) -> None:
    """Make a sum, product, maximum or minimum of several lengths one of two at a time."""
    *others, last = node.args
    graph, node.target = node.graph, _OF_TWO[node.target]
    with graph.inserting_before(node):
        made = reduce(lambda x, y: graph.call_function(node.target, (x, y)), others)
    node.args = made, last


# where numbers become elements of the result, by place among the arguments
_ELEMENTS = {
    aten.clamp_max: 1,
    aten.clamp_min: 1,
    aten.constant_pad_nd: 2,
    aten.full: 1,
    aten.scalar_tensor: 0,
}


def _round_number(node: torch.fx.Node) -> None:
    """Round a number that is an element of a result of half precision; Inductor uses it as it is."""
    place = _ELEMENTS.get(getattr(node.target, "overloadpacket", None), len(node.args))
    if place < len(node.args):
        node.update_arg(place, _round_to_half(node.args[place], node.meta["val"].dtype))


_COMPARISONS = frozenset({torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne})


def _round_comparison(function: Callable, args: tuple) -> tuple:
    """Return the arguments of a call. Where half precision is compared with a number, the number is rounded, as in
    torch's kernel.

    Kernels that compare and go on do not round (hardtanh's gradient): the calls of their decompositions are left alone.
    """
    if function not in _COMPARISONS or not isinstance(args[0], torch.Tensor):
        return args
    return args[0], _round_to_half(args[1], args[0].dtype)


def _round_to_half(number: Any, dtype: torch.dtype) -> Any:
    """Return a number as rounded to a half-precision dtype; for another argument or dtype, the argument itself."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or dtype not in _HALVES:
        return number
    with disable_current_modes():
        return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def _clamp(x: torch.Tensor, min: Number | None = None, max: Number | None = None) -> torch.Tensor:
    x = x if min is None else torch.clamp_min(x, min)
    return x if max is None else torch.clamp_max(x, max)


def _view_copy(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return x.reshape(size).clone(memory_format=torch.contiguous_format)


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    return x.rsqrt() if exponent == -0.5 and (x.is_floating_point() or x.is_complex()) else NotImplemented


def _flip(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return _decompositions()[aten.flip.default](x, dims) if x.ndim else x.clone()


# clamp: Inductor computes in float32, where the bounds are other numbers. view_copy: its decomposition copies no tensor
# that has no view of that shape. pow: torch's kernel takes the root, whose values of -0.0 and -inf are others.
# flip: before torch 2.13, Inductor has no index for the dim that a 0-d tensor does not have
_OWN = {
    aten.clamp.default: _clamp,
    aten.flip.default: _flip,
    aten.pow.Tensor_Scalar: _pow,
    aten.view_copy.default: _view_copy,
}


def _fold(node: torch.fx.Node) -> None:
    """Compute an elementwise function of tensors that hold one number each; Inductor does so without rounding."""
    given = node.all_input_nodes
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or not given or not all(map(_is_uniform, given)):
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _one_element)
    made, value = node.meta["val"], node.target(*args, **kwargs).item()
    options = {"dtype": made.dtype, "layout": torch.strided, "device": made.device, "pin_memory": False}
    node.target, node.args, node.kwargs = aten.full.default, (list(made.shape), value), options


def _is_uniform(node: torch.fx.Node) -> bool:
    if node.target is not aten.full.default or not isinstance(node.args[1], (int, float)):
        return False
    return all(isinstance(length, int) for length in node.args[0])


def _one_element(node: torch.fx.Node) -> torch.Tensor:
    full = node.meta["val"]
    return torch.full([1] * full.ndim, node.args[1], dtype=full.dtype)


def _only_relabels(node: torch.fx.Node) -> bool:
    """Return whether as_strided_ gives a tensor of the same elements other strides where they say nothing: adaptive
    pooling of an image whose channels lie beside each other ends so."""
    x, (shape, strides) = node.args[0].meta["val"], node.args[1:3]
    alike = (length == 1 or one == other for length, one, other in zip(x.shape, x.stride(), strides, strict=True))
    return len(node.args) == 3 and tuple(x.shape) == tuple(shape) and all(alike)


def _changes(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


def _other_strides(graph: torch.fx.GraphModule, region: Trace, given: list[Any]) -> Strides:
    """Return the strides that torch gives results where a decomposition gives others."""
    (output,) = graph.graph.find_nodes(op="output")
    made = [tuple(node.meta["val"].stride()) for node in output.args[0]]
    wanted = {place: proxy.strides for place, proxy in enumerate(region.output) if not same(made[place], proxy.strides)}
    return Strides.of(wanted, given)


def _rounding(graph: torch.fx.GraphModule) -> dict[str, bool]:
    """Inductor computes in float32 what is of half precision, which is within the rounding of its calls; but a program
    that converts to a narrower dtype and back asks for the rounding itself, and a graph may say what is rounded."""
    rounded = [node for node in graph.graph.nodes if _is_narrowing(node) and _is_widened(node)]
    if TORCH < (2, 13) and any(node.meta["val"].device.type == "cpu" for node in rounded):
        raise NotImplementedError("before torch 2.13, its C++ forgets the rounding of a conversion there and back")
    return {"emulate_precision_casts": True} if rounded or _is_marked(graph) else {}


def _is_marked(graph: torch.fx.GraphModule) -> bool:
    """Return whether a graph says which of its values are rounded."""
    return any(node.meta.get(ROUNDED) for node in graph.graph.nodes)


def _is_widened(node: torch.fx.Node) -> bool:
    """Return whether a call of its, or of a view of it, converts a value to a wider dtype."""
    wider = (_is_conversion(user) and _width(user) > _width(node) for user in node.users)
    return any(wider) or any(_is_view(user) and _is_widened(user) for user in node.users)


def _is_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _is_narrowing(node: torch.fx.Node) -> bool:
    return _is_conversion(node) and _width(node) < _width(node.args[0])


def _is_conversion(node: torch.fx.Node) -> bool:
    return node.target in _CONVERSIONS and node.meta["val"].dtype.is_floating_point


def _width(node: torch.fx.Node) -> int:
    return node.meta["val"].element_size() if node.meta["val"].dtype.is_floating_point else 0


def _binding(given: list[Any]) -> dict[str, bool]:
    """Since torch 2.14, Inductor reads a length that is no input of its own from a tensor only where it asserts sizes,
    and from an empty tensor never."""
    lengths = {each.node.expr for each in given if isinstance(each, torch.SymInt)}
    shapes = [each.shape for each in given if isinstance(each, torch.Tensor)]
    sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    if TORCH < (2, 14) or not {symbol for size in sizes for symbol in size.node.expr.free_symbols} - lengths:
        return {}
    if any(isinstance(size, int) and size == 0 for shape in shapes for size in shape):
        raise NotImplementedError("since torch 2.14, it reads no length of an empty tensor")
    return {"size_asserts": True}


def _not_in_its_key(graph: torch.fx.GraphModule, given: list[Any], fake: FakeTensorMode) -> tuple:
    """Return what Inductor compiles for and does not look at when it finds a graph in its cache: which nodes round, the
    default dtype (torch 2.11), the bounds of lengths that values decide, which it asserts and simplifies by, and the
    symbols that its code defines."""
    ranges = fake.shape_env.var_to_range
    bounds = sorted((str(each), str(ranges[each])) for each in free_unbacked_symbols(given))
    rounded = tuple(place for place, node in enumerate(graph.graph.nodes) if node.meta.get(ROUNDED))
    return (
        "with barriers, local buffers of untiled loops, functions exact near 0",
        rounded,
        torch.get_default_dtype(),
        *bounds,
        *sizes_of(given),
    )


class _Lengths(PythonReferenceAnalysis):
    """Computes an expression of lengths with Python's operators, divisions too: for these, torch's gives a new
    expression, of no length of the graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return math.trunc(x)


def _value(known: dict[str, Any], symbols: dict[Any, torch.SymInt], leaf: Any) -> Any:
    """Return an argument's value in the graph. An expression of lengths is computed there: make_fx knows a length by
    the calls that made it."""
    if isinstance(leaf, torch.SymInt) and symbols.keys() >= leaf.node.expr.free_symbols:
        return sympy_interp(_Lengths, symbols, leaf.node.expr)
    return known[leaf.name] if isinstance(leaf, Proxy) else leaf


def compile_graph(
    graph: torch.fx.GraphModule, given: list[Any], fake: FakeTensorMode, *, whole: bool
) -> CompiledFxGraph:
    """Inductor's artifact of a graph that returns a list; `given` are stand-ins of the mode `fake` for its inputs.
    whole: C++ calls all of its kernels."""
    (output,) = graph.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # they keep their strides
    with (
        tracing(TracingContext(fake)),
        barriers.insert_barriers,
        local_buffers.share_outer_loops,
        index_bound.bound_index,
        accuracy.near_zero(as_vec=_is_marked(graph)),
        accuracy.long_sums(),
        compiler_config.patch(cache_key_tag=f"{compiler_config.cache_key_tag}{_not_in_its_key(graph, given, fake)}"),
        functorch_config.patch(bundled_autograd_cache=False),
        warnings.catch_warnings(),
        inductor_config.patch(
            {**_SETTINGS, **(get_cpp_wrapper_config() if whole else {}), **_rounding(graph), **_binding(given)}
        ),
    ):
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # how it makes its kernels
        return compile_fx_inner(graph, given, is_inference=True, cpp_wrapper=whole)
