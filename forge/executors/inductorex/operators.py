"""Selection of the calls that Inductor lowers to loops, by the aten operators that torch runs for a call."""

import math
from typing import Any

import torch

from forge import prims
from forge.compiler.layout import ATTENTION, Layouts
from forge.executors.executor import Decision, decline
from forge.executors.inductorex.aten_graph import (
    HALVES,
    INTERPOLATIONS,
    changes,
    claim_by_torch,
    decompositions,
    exclusive,
    graph_of,
    is_view,
    round_to_half,
)
from forge.executors.inductorex.graphs import ROUNDED
from forge.executors.torchex.quantized import IN_LOOPS
from forge.ir import BoundSymbol, NumberProxy, Proxy, Tag, TensorProxy, Trace
from forge.ir.checks import in_one_line
from forge.ir.proxies import hint_of
from forge.ir.pytree import leaves, proxies, tensors
from forge.ir.unresolved import UnresolvedSymInt
from forge.torch_internals.inductor.compiler import lowering
from forge.torch_internals.versions import TORCH
from forge.transforms.makers import innermost
from forge.transforms.sum_few_rows import MANY

aten = torch.ops.aten
_TEMPLATES = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm})  # for which Inductor has templates
_TEMPLATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_POINTWISE = frozenset(  # which torch does not tag as such
    {
        aten._to_copy,
        aten.elu_backward,
        aten.hardswish_backward,
        aten.hardtanh_backward,
        aten.leaky_relu_backward,
        aten.log_sigmoid_backward,
        aten.mish_backward,
        aten.softplus_backward,
    }
)
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
    }
)
_WRITES = frozenset({aten.native_batch_norm, aten.cudnn_batch_norm})  # the running statistics, which no schema shows
# whose kernels reject mixed dtypes, or return another dtype than their fake implementations and decompositions
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
        aten.fractional_max_pool3d,  # its samples are taken in reverse, as those of an image are
        aten.multilabel_margin_loss_forward,  # of a row with fewer targets than classes
        aten.frexp,  # of a tensor of one value: Inductor folds the call as if it returned one tensor
        aten.nextafter,  # of half precision: the next float32, rounded back
        aten._unsafe_masked_index,  # of indices out of range, which torch clamps
        aten._unsafe_masked_index_put_accumulate,
        aten._grouped_mm,  # of dense operands, which its kernel rejects if their rows are unaligned
        *([aten.searchsorted, aten.bucketize] if TORCH < (2, 13) else []),  # within a slice of a tensor (issue 182343)
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
# in half precision, Inductor's loops round where torch's kernels do not, or vice versa
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
_BY_STEPS_ON_A_GPU = frozenset({aten._softmax_backward_data})  # which multiply by the gradient in a separate kernel
# torch's kernels first round their number arguments; that of a division rounds only the dividend
_ROUND_NUMBERS = frozenset({aten.add, aten.fmod, aten.remainder, aten.sub, aten.rsub})
_ROUND_NUMBERS_ON_A_GPU = frozenset({aten.threshold, aten.threshold_backward})
_EXACT = frozenset(
    {
        aten.abs,
        aten.cat,
        aten.clone,
        aten.empty,
        aten.full,
        aten.full_like,
        aten.neg,
        aten.scalar_tensor,
        aten.where,
    }
)
_POOL_GRADIENTS = frozenset({aten.avg_pool2d_backward, aten.avg_pool3d_backward})
_SCATTERED_SUMS = frozenset({aten.scatter_add, aten.scatter_reduce})
_NOTHING = frozenset({aten.detach.default, aten.alias.default})


def takes(bound: BoundSymbol, *, whole_program: bool = False, eager_numerics: bool = False) -> Decision:
    """Return whether Inductor writes loops for the aten operators of torch's function for a call; or, in a whole
    program, whether it calls them. eager_numerics: whether its loops must round where torch's kernels do."""
    if not all(isinstance(proxy, (TensorProxy, NumberProxy)) for proxy in _proxies_of(bound)):  # attention's state
        return whole_program or decline("the call reads a value that is not a tensor")
    results = list(tensors(bound.output))
    if results and all(map(_has_no_elements, results)):
        return decline("the results have no elements")
    operators = _operators(bound)
    if operators is None:
        return decline("torch does not run it on fake tensors")
    if eager_numerics and any(operator in IN_LOOPS for operator in operators):
        return decline("loops do not round the values of a quantized weight", parts=False)
    for operator in operators:
        if operator.overloadpacket in _OF_ONE_DTYPE | _NORMS and _mixes_dtypes(bound, operator):
            return decline(f"{operator} supports one dtype only", parts=False)
        if not (_is_function(operator) if whole_program else _has_loops(operator)):
            return decline(f"{operator} is left to torch")
        if operator.overloadpacket is aten.scalar_tensor and not tensors((bound.args, bound.kwargs)):
            return decline(f"Inductor's {operator} of a whole number has another dtype")  # without an explicit dtype
        if operator.overloadpacket is aten.scalar_tensor and _may_overflow(bound):
            return decline(f"{operator} raises where a number does not fit its dtype")
        if operator.overloadpacket in _INDEXED and _is_on_cpu(bound) and Tag.IN_BOUNDS not in bound.tags:
            return decline(f"{operator} raises where an index is out of range")
        if operator.overloadpacket is aten.index_put and _adds_many_to_few(bound):
            return decline(f"{operator} adds many values to few, which torch sorts on a GPU and adds in float32")
        if operator.overloadpacket in _SCATTERED_SUMS and _adds_halves_on_gpu(bound):
            return decline(f"{operator} adds values of half precision one by one, which torch's kernel does faster")
        if operator.overloadpacket is aten.upsample_nearest2d_backward and not _is_of_known_size(bound):
            return decline(f"Inductor has loops for {operator} of static sizes only")
        if operator.overloadpacket in _POOL_GRADIENTS and (_is_on_cpu(bound) or _clips_windows(bound)):
            return decline(f"Inductor's {operator} is slow on a CPU, and wrong with ceil_mode")
        if operator in INTERPOLATIONS and not tensors(bound.output)[0].dtype.is_floating_point:
            return decline(f"Inductor's loops for {operator} of integers round otherwise than torch's kernel")
        if operator is aten.upsample_bicubic2d.default and _is_on_cpu(bound):
            return decline(f"torch's kernel for {operator} is faster than Inductor's C++")
        if operator.overloadpacket in _INEXACT and _is_on_cpu(bound):
            return decline(f"Inductor's C++ for {operator} is less exact than torch's kernel")
        if _is_on_cpu(bound) and _reduces_bytes(bound, operator.overloadpacket):
            return decline(f"Inductor's C++ for {operator} of 8-bit integers and bools is wrong")
        if operator.overloadpacket in _REMAINDERS and _may_divide_by_zero(bound):
            return decline(f"{operator} of integers raises where it divides by zero")
        if operator.overloadpacket is aten.any and tensors(bound.output)[0].dtype == torch.uint8:
            return decline(f"{operator} of uint8 is uint8, and Inductor's is bool")
    return _rounds_alike(bound, operators) if eager_numerics and _is_half(bound) else True


def _adds_many_to_few(bound: BoundSymbol) -> bool:
    """Return whether a call adds several values to each of a tensor's: atomic additions serialize, and each one
    rounds."""
    for call in innermost(bound):
        if call.symbol is not prims.index_put:
            continue
        x, indices, _, accumulate = (*call.args, call.kwargs.get("accumulate", False))[:4]
        if accumulate and not prims.has_mask(indices):
            added = math.prod(map(hint_of, prims.indexed_shape(call.symbol.name, x, indices)))
            if added >= MANY * math.prod(map(hint_of, x.shape)):
                return True
    return False


def _clips_windows(bound: BoundSymbol) -> bool:
    """Return whether a call is a gradient of avg_pool with ceil_mode."""
    pools = [call.args for call in innermost(bound) if call.symbol is prims.avg_pool_backward]
    return not pools or any(ceil_mode for _, _, _, _, _, ceil_mode, *_ in pools)


def _adds_halves_on_gpu(bound: BoundSymbol) -> bool:
    """Return whether a call adds values of half precision by atomics. An H200 took 0.15 ms for 25 million in torch's
    kernel, and 0.5 to 1.1 ms in Triton's."""
    sums = {"sum", "mean"}
    return _is_half(bound) and any(
        call.symbol is prims.scatter_reduce and not sums.isdisjoint((*call.args[4:], *call.kwargs.values()))
        for call in innermost(bound)
        if call.inputs and not _is_on_cpu(call)
    )


def is_product(bound: BoundSymbol) -> Decision:
    """Return whether a call is one matrix product, with views of its operands and result; Declined if Inductor has no
    template for it."""
    operators = _operators(bound) or ()
    products = [each for each in operators if each.overloadpacket in _TEMPLATES]
    if len(products) != 1 or not all(each in products or _maps_elements(each) for each in operators):
        return False
    results = tensors(bound.output)
    if any(map(_has_no_elements, [*results, *tensors((bound.args, bound.kwargs))])):
        return decline("the product has no elements")
    if not all(proxy.dtype in _TEMPLATE_DTYPES for proxy in results):
        return decline(f"Inductor has no template for a product of {results[0].dtype}")
    if _is_on_cpu(bound) and products[0].overloadpacket is not aten.bmm:
        return decline(f"Inductor's C++ template for {products[0]} takes constant weights only")
    return True


def is_pointwise(bound: BoundSymbol) -> Decision:
    """Return whether each element of a call's results depends on one element of each tensor that it reads."""
    operators = _operators(bound) or ()
    return all(map(_maps_elements, operators)) or decline(f"{bound.symbol.id} is not pointwise")


def _maps_elements(operator: Any) -> bool:
    if operator.namespace == "prim" or operator in _NOTHING or operator.is_view:
        return True
    return torch.Tag.pointwise in operator.tags or _is_of(operator, _POINTWISE)


def _has_no_elements(proxy: TensorProxy) -> bool:
    return any(isinstance(size, int) and size == 0 for size in proxy.shape)


def _is_of_known_size(bound: BoundSymbol) -> bool:
    """Return whether the height and the width of a call's result are static."""
    return all(isinstance(size, int) for proxy in tensors(bound.output) for size in proxy.shape[-2:])


def _is_half(bound: BoundSymbol) -> bool:
    return any(proxy.dtype in HALVES for proxy in tensors((bound.args, bound.kwargs, bound.output)))


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
        with exclusive():
            graph, _ = graph_of(region, Layouts(region.inputs, shared=False), eager_numerics=True)
    except UnresolvedSymInt:
        raise
    except Exception as error:
        return decline(f"torch gives no graph of the call: {in_one_line(error)}")
    inner = next(filter(_rounds_within, graph.graph.nodes), None)
    if inner is not None:
        return decline(f"Inductor makes {inner.target} and others of it, which each round", parts=False)
    return True


def _rounds_otherwise(bound: BoundSymbol, operator: Any) -> bool:
    """Return whether Inductor's loops for an operator are known to round elsewhere than torch's kernel."""
    (dtype, *_) = [proxy.dtype for proxy in tensors((bound.args, bound.kwargs, bound.output)) if proxy.dtype in HALVES]
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
    return any(round_to_half(each, dtype) != each for each in numbers)


def _is_number_of_another_dtype(proxy: TensorProxy, dtype: torch.dtype) -> bool:
    """Return whether torch's kernels treat a tensor as a number, which they do not round."""
    return proxy.ndim == 0 and proxy.device.type == "cpu" and proxy.dtype not in (dtype, torch.bool)


def _rounds_within(node: torch.fx.Node) -> bool:
    """Return whether a node is an intermediate half-precision value of an operator's decomposition: torch's single
    kernel does not round it."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in HALVES:
        return False
    return not (node.meta.get(ROUNDED) or _is_exact(node)) and any(user.op != "output" for user in node.users)


def _is_exact(node: torch.fx.Node) -> bool:
    """Return whether a call only returns values of its arguments, or constants."""
    return is_view(node) or getattr(node.target, "overloadpacket", None) in _EXACT


def _mixes_dtypes(bound: BoundSymbol, operator: Any) -> bool:
    """Return whether a call's tensors have dtypes that its operator's kernel may reject."""
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
    """Return whether an operator reduces 8-bit integers or bools; for a sum, the result's dtype counts."""
    if operator not in _EXTREMA | _SUMS:
        return False
    operand = (bound.args, bound.kwargs) if operator in _EXTREMA else bound.output
    return tensors(operand)[0].dtype in _BYTES


def _may_divide_by_zero(bound: BoundSymbol) -> bool:
    if any(proxy.dtype.is_floating_point for proxy in tensors(bound.output)):
        return False
    divisor = bound.args[1] if len(bound.args) > 1 else None
    return not isinstance(divisor, int) or divisor == 0


def _may_overflow(bound: BoundSymbol) -> bool:
    """Return whether a number may be out of the range of the integers that a call returns."""
    dtypes = [proxy.dtype for proxy in tensors(bound.output)]
    largest = [torch.iinfo(dtype).max for dtype in dtypes if dtype != torch.bool and not dtype.is_floating_point]
    numbers = [leaf for leaf in leaves((bound.args, bound.kwargs)) if type(leaf) is int]
    return any(abs(number) > limit for number in numbers for limit in largest)


def _operators(bound: BoundSymbol) -> list[Any] | None:
    try:
        calls = claim_by_torch([bound])
    except NotImplementedError:
        return None
    layouts = Layouts()
    for proxy in _proxies_of(bound):
        layouts.add(proxy)
    operators: list[Any] = []
    for call in calls:
        read = [proxy.name for proxy in proxies((call.args, call.kwargs))]
        inside = not layouts.values.keys() >= set(read)  # a constant that only the call's body reads
        run = None if inside else layouts.run(call)
        if run is None or not run.is_exact:
            return None
        operators += run.operators
    return operators


def _proxies_of(bound: BoundSymbol) -> list[Proxy]:
    inputs = [leaf for leaf in leaves((bound.args, bound.kwargs)) if isinstance(leaf, Proxy)]
    return list({proxy.name: proxy for proxy in inputs}.values())


def _has_loops(operator: Any) -> bool:
    if operator.namespace == "prim" or operator in _NOTHING:
        return True
    if changes(operator):  # a region's graph is a function of its inputs
        return False
    if _is_of(operator, _TORCHS | _WRITES | _WRONG) or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return operator in decompositions() or (operator in lowering.lowerings and operator not in lowering.fallbacks)


def _is_function(operator: Any) -> bool:
    if _has_loops(operator):
        return True
    draws = torch.Tag.nondeterministic_seeded in operator.tags and operator.overloadpacket not in ATTENTION
    return not (draws or changes(operator) or _is_of(operator, _WRONG | _WRITES))


def _is_of(operator: Any, operators: frozenset) -> bool:
    """Return whether an operator, in all its overloads or in this one, is among those."""
    return operator in operators or operator.overloadpacket in operators


def count_kernels(bound: BoundSymbol) -> int:
    """Return the number of kernels that torch's function for a call launches."""
    operators = _operators(bound) or ()
    if any(op in IN_LOOPS for op in operators):
        return 2  # torch dequantizes the weight first
    nothing = _NOTHING | {aten.scalar_tensor.default} if _is_on_cpu(bound) else _NOTHING  # which a GPU fills
    return len([op for op in operators if op.namespace != "prim" and op not in nothing])
