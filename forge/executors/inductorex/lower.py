"""Compilation of regions to Inductor's artifacts.

Source: torch._inductor.compile_fx.compile_fx_inner, which compiles a graph of aten operators on fake tensors.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.compiler import config as compiler_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from forge.compiler.layout import Layout, Layouts
from forge.executors.errors import CheckError
from forge.executors.executor import Declined, decline
from forge.executors.inductorex import artifacts, compile_wait, isa_probe
from forge.executors.inductorex.aten_graph import (
    FALLBACK,
    HAS_ROW_PRODUCTS,
    arguments,
    exclusive,
    graph_of,
    is_view,
    results_of,
)
from forge.executors.inductorex.graphs import ROUNDED, describe
from forge.executors.inductorex.out_of_process import Compilation
from forge.executors.inductorex.strides import Strides, sizes_of
from forge.ir import Dim, TensorProxy, Trace
from forge.ir.checks import in_one_line
from forge.ir.strides import same
from forge.ir.unresolved import UnresolvedSymInt, refuse_guards_in
from forge.torch_internals.dynamo import TracingContext, tracing
from forge.torch_internals.fake_tensors import FakeTensorMode
from forge.torch_internals.functorch import functorch_config
from forge.torch_internals.inductor import (
    accuracy,
    barriers,
    concatenation,
    index_bound,
    local_buffers,
    masked_bools,
    persistent,
    shared_kernels,
    simplified_indices,
)
from forge.torch_internals.inductor.codegen import V
from forge.torch_internals.inductor.compiler import (
    CompiledAOTI,
    CompiledFxGraph,
    call_kernels,
    compile_fx_inner,
    get_cpp_wrapper_config,
    quiet_lowering,
)
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.versions import TORCH

aten = torch.ops.aten
_log = logging.getLogger("forge.inductor")
# strides and devices are known from the trace; partitions serve CUDA graphs, and cost a call each time; a kernel that
# reduces rows and columns at once leaves results unwritten that alias another one's memory (torch's issue 193061)
_OFF = ("size_asserts", "alignment_asserts", "graph_partition", "triton.mix_order_reduction")
_SETTINGS = {name: False for name in _OFF if hasattr(inductor_config, name)}
_SEARCH = {
    name: value
    for name, value in {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "ATEN,TRITON,CPP",
        "autotune_num_choices_displayed": 0,  # a table on stderr
        "max_autotune_report_choices_stats": False,  # part of that table
    }.items()
    if hasattr(inductor_config, name)
}
# a value of an interpolated image is a long expression of 4 to 16 values, which Inductor would otherwise write to
# memory in float32, half computed, before its consumer
_LONG_EXPRESSIONS = {"realize_opcount_threshold": 200, "realize_acc_reads_threshold": 32}
_FEW_LAUNCHES = {"combo_kernels": True}  # independent kernels of one step are one launch
# simpler code for a GPU, if Inductor's own or Triton failed: loops over rows, and no analysis of reads
_PLAIN = {
    name: False
    for name in ("triton.persistent_reductions", "triton.coalesce_tiling_analysis")
    if hasattr(inductor_config, name)
}
_AHEAD_OF_TIME = {"aot_inductor.package": True, "always_keep_tensor_constants": True}
_TORCHS_PRODUCT = re.compile(r"extern_kernels\.(bias_)?(mm|bmm|addmm|baddbmm)\(")
_CONVERSIONS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
_compiler_config: Any = compiler_config  # torch adds `patch` when it is imported
isa_probe.remember()


def compile_region(
    region: Trace,
    codegen: "Codegen | None" = None,
    *,
    whole_program: bool = False,
    eager_numerics: bool = False,
    is_plain: bool = False,
) -> Callable | Declined:
    """Return a function of one list, the region's inputs, that returns its outputs. Declined if Inductor fails, with
    the error unless it is a NotImplementedError for a known limitation of Inductor's.

    codegen: makes the function of the lowered graph; Inductor by default. eager_numerics: each value of half precision
    is rounded to its dtype, as torch's functions do. is_plain: use simpler code, to recompile a failed GPU
    region.
    """
    again = partial(compile_region, region, whole_program=whole_program, eager_numerics=eager_numerics, is_plain=True)
    generated = codegen or partial(generate, settings=_PLAIN if is_plain else {}, again=None if is_plain else again)
    try:
        layouts = Layouts(region.inputs, shared=False)
        with exclusive():
            graph, example_inputs = graph_of(region, layouts, eager_numerics=eager_numerics)
            return generated(
                graph,
                example_inputs,
                layouts.fake,
                _other_strides(graph, region, example_inputs),
                whole_program=whole_program,
            )
    except (UnresolvedSymInt, CheckError):
        raise
    except Exception as error:
        _log.debug("%s", region, exc_info=True)
        inner = getattr(error, "inner_exception", None)  # of Inductor's own error
        error = inner if isinstance(inner, index_bound.LongIndex) else error
        if isinstance(error, NotImplementedError) and str(error):
            return decline(f"Inductor cannot compile it: {in_one_line(error)}")
        if codegen is None and not is_plain and any(map(is_on_gpu, region.inputs)):
            plain = again()
            if not isinstance(plain, Declined):
                return plain
        if codegen is not generate_product and not is_plain:  # whose parts run instead, as fast as they were measured
            compile_wait.notice(error)
        return decline(f"Inductor failed: {in_one_line(error)}", error=error)


def generate(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake: FakeTensorMode,
    strides: Strides,
    *,
    whole_program: bool,
    settings: Mapping[str, Any] = MappingProxyType({}),
    again: Callable[[], Callable | Declined] | None = None,
) -> Callable:
    """Return Inductor's artifact of a graph; `example_inputs` are its fake inputs, of the mode `fake`.

    strides: those of results if the graph's differ. whole_program: C++ calls all kernels. settings:
    Inductor's. again: makes the function in another way, if a kernel for a GPU cannot be built.
    """
    isa_probe.wait()
    with compile_wait.defer_waits() as started:
        started.again = again if any(map(is_on_gpu, example_inputs)) else None
        if _waits_for_launches(graph, example_inputs):
            settings = {**settings, **_FEW_LAUNCHES}
        compiled = compile_graph(graph, example_inputs, fake, whole_program=whole_program, settings=settings)
        assert compiled.current_callable is not None
        started.function = strides.wrap(compiled.current_callable)
    artifacts.keep(started.function, compiled, strides)
    return started.function


def _waits_for_launches(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> bool:
    """Return whether a graph's kernels take about as long as their launches: on a GPU, with one row of hidden
    states."""
    are_static = not any(isinstance(each, torch.SymInt) for each in example_inputs)
    return HAS_ROW_PRODUCTS in graph.meta and are_static and any(map(is_on_gpu, example_inputs))


def is_on_gpu(value: Any) -> bool:
    """Return whether a tensor, or a fake one, is on a GPU."""
    return isinstance(value, (torch.Tensor, TensorProxy)) and value.device.type == "cuda"


def generate_product(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake: FakeTensorMode,
    strides: Strides,
    *,
    whole_program: bool,
) -> Callable | Declined:
    """Return Inductor's artifact of a product and its epilogue, by the fastest template of Inductor's search; Declined
    if that is torch's kernel. The search runs kernels, so no wait for one is deferred."""
    isa_probe.wait()
    compiled = compile_graph(graph, example_inputs, fake, whole_program=whole_program, settings=_SEARCH)
    if _TORCHS_PRODUCT.search(compiled.source_code):
        return decline("torch's kernel is the fastest in Inductor's search")
    assert compiled.current_callable is not None
    function = strides.wrap(compiled.current_callable)
    artifacts.keep(function, compiled, strides)
    return function


Codegen = Callable[..., Callable | Declined]  # of the arguments of `generate`


def compile_region_in_worker(
    region: Trace, start: Callable = Compilation, *, eager_numerics: bool = False
) -> Any | Declined:
    """Compile a whole program in another process, as `compile_region` does; the result can be called once complete.

    start: takes the serialized graph, and the strides of results if the graph's differ.
    """
    try:
        layouts = Layouts(region.inputs, shared=False)
        with exclusive():
            graph, example_inputs = graph_of(region, layouts, eager_numerics=eager_numerics)
        inputs = [layouts.values[proxy.name] for proxy in region.inputs]
        if not all(isinstance(each, Layout) for each in inputs) or layouts.is_symbolic:
            return decline("the region's sizes are not static")
        return start(describe(graph, inputs), _other_strides(graph, region, example_inputs))
    except CheckError:
        raise
    except Exception as error:
        _log.debug("%s", region, exc_info=True)
        return decline(f"not compiled as a whole: {in_one_line(error)}")


def _other_strides(graph: torch.fx.GraphModule, region: Trace, example_inputs: list[Any]) -> Strides:
    """Return torch's strides of the results if a decomposition's differ."""
    actual = [tuple(node.meta["val"].stride()) for node in results_of(graph)]
    expected = {
        index: proxy.strides for index, proxy in enumerate(region.output) if not same(actual[index], proxy.strides)
    }
    return Strides.of(expected, example_inputs)


def _precision(graph: torch.fx.GraphModule) -> dict[str, bool]:
    """Return the settings for rounding. Inductor computes half precision in float32, within the rounding of its calls;
    but a program that converts to a narrower dtype and back needs the rounding itself, and a graph may mark rounded
    values."""
    rounded = [node for node in graph.graph.nodes if _is_narrowing(node) and _is_widened(node)]
    if TORCH < (2, 13) and any(node.meta["val"].device.type == "cpu" for node in rounded):
        raise NotImplementedError("before torch 2.13, its C++ forgets the rounding of a conversion there and back")
    return {"emulate_precision_casts": True} if rounded or _is_marked(graph) else {}


def _is_marked(graph: torch.fx.GraphModule) -> bool:
    """Return whether a graph marks rounded values."""
    return any(node.meta.get(ROUNDED) for node in graph.graph.nodes)


def _is_widened(node: torch.fx.Node) -> bool:
    """Return whether a user of a node, or of a view of it, converts its value to a wider dtype."""
    wider = (_is_conversion(user) and _width(user) > _width(node) for user in node.users)
    return any(wider) or any(is_view(user) and _is_widened(user) for user in node.users)


def _is_narrowing(node: torch.fx.Node) -> bool:
    return _is_conversion(node) and _width(node) < _width(arguments(node)[0])


def _is_conversion(node: torch.fx.Node) -> bool:
    return node.target in _CONVERSIONS and node.meta["val"].dtype.is_floating_point


def _width(node: torch.fx.Node) -> int:
    return node.meta["val"].element_size() if node.meta["val"].dtype.is_floating_point else 0


def _interpolates(graph: torch.fx.GraphModule) -> bool:
    """Return whether a graph reads the neighbours of an interpolated value (interpolation.py). The graph itself tells,
    also in a process that rebuilt it: its metadata stays behind."""
    return any(node.target is aten._unsafe_index.Tensor for node in graph.graph.nodes)


def _size_binding(example_inputs: list[Any]) -> dict[str, bool]:
    """Return the settings with which Inductor reads sizes from tensors: since torch 2.14, it reads one that is not an
    input only if it asserts sizes, and never from an empty tensor."""
    sizes = {each.node.expr for each in example_inputs if isinstance(each, torch.SymInt)}
    shapes = [each.shape for each in example_inputs if isinstance(each, torch.Tensor)]
    read = {symbol for shape in shapes for size in shape for symbol in _symbols_of(size)}
    if TORCH < (2, 14) or not read - sizes:
        return {}
    if any(isinstance(size, int) and size == 0 for shape in shapes for size in shape):
        raise NotImplementedError("since torch 2.14, it reads no length of an empty tensor")
    return {"size_asserts": True}


def _symbols_of(size: Dim) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def _not_in_its_key(graph: torch.fx.GraphModule, example_inputs: list[Any], fake: FakeTensorMode) -> tuple:
    """Return the parts of a graph that Inductor compiles for and omits from its cache key: which nodes round, the
    default dtype (torch 2.11), the bounds of data-dependent sizes, which it asserts and simplifies by, the
    symbols that its code defines, and the program's facts about sizes: another program that took the graph from the
    cache would guard all of these."""
    assert fake.shape_env is not None
    ranges = fake.shape_env.var_to_range
    bounds = sorted((str(each), str(ranges[each])) for each in free_unbacked_symbols(example_inputs))
    rounded = tuple(index for index, node in enumerate(graph.graph.nodes) if node.meta.get(ROUNDED))
    return (
        "with barriers, local buffers of untiled loops, functions exact near 0, persistent rows, blocks of products, "
        "chunks of sums",
        rounded,
        torch.get_default_dtype(),
        *bounds,
        *sizes_of(example_inputs),
        _length_guards(example_inputs, fake.shape_env),
    )


def _length_guards(example_inputs: list[Any], environment: ShapeEnv) -> str | None:
    """Return the guards of a graph's size inputs, as Inductor stores them with its code."""
    lengths = [each for each in example_inputs if isinstance(each, torch.SymInt) and not free_unbacked_symbols(each)]
    if not lengths:
        return None
    return environment.produce_guards_expression(lengths, guards=environment.get_pruned_guards(lengths))


@accuracy.needs_chunks.provide
def _needs_chunks(ask: Callable[[], bool]) -> bool:
    """Return torch's answer; True if it depends on the size."""
    try:
        with refuse_guards_in([V.graph.sizevars.shape_env]):
            return ask()
    except UnresolvedSymInt:
        return True


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake: FakeTensorMode,
    *,
    whole_program: bool,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> CompiledFxGraph:
    """Return Inductor's artifact of a graph that returns a list; `example_inputs` are its fake inputs, of the mode
    `fake`. whole_program: C++ calls all of its kernels. settings: Inductor's, for this graph."""
    with _compiling(graph, example_inputs, fake, whole_program=whole_program, settings=settings):
        compiled = compile_fx_inner(graph, example_inputs, is_inference=True, cpp_wrapper=whole_program)
    assert isinstance(compiled, CompiledFxGraph)
    return compiled


def compile_package(
    graph: torch.fx.GraphModule, example_inputs: list[Any], fake: FakeTensorMode, settings: Mapping[str, Any]
) -> list[str]:
    """Return the paths of the files that AOTInductor generates for a graph, whose weights are attributes of it."""
    kernels = [node.target for node in graph.graph.nodes if node.meta.get(FALLBACK)]
    with (
        V.set_aot_compilation(True),
        call_kernels(kernels),
        quiet_lowering(),
        _compiling(graph, example_inputs, fake, whole_program=True, settings={**_AHEAD_OF_TIME, **settings}),
    ):
        compiled = compile_fx_inner(graph, example_inputs, is_inference=True, cpp_wrapper=True)
    assert isinstance(compiled, CompiledAOTI) and isinstance(compiled.filename, list)
    return [path for path in compiled.filename if isinstance(path, str)]


@contextmanager
def _compiling(
    graph: torch.fx.GraphModule,
    example_inputs: list[Any],
    fake: FakeTensorMode,
    *,
    whole_program: bool,
    settings: Mapping[str, Any],
) -> Iterator[None]:
    """Enter the context in which Inductor compiles a graph, with its settings and corrections."""
    visible = list(range(len(results_of(graph))))
    graph.graph.output_node().meta["user_visible_output_idxs"] = visible  # they keep their strides
    with (
        tracing(TracingContext(fake)),
        barriers.insert_barriers,
        concatenation.write_parts,
        shared_kernels.name_by_text,
        simplified_indices.remember_simplified,
        simplified_indices.stride_of_named_lengths,
        local_buffers.share_outer_loops,
        index_bound.bound_index,
        masked_bools.pad_masks,
        accuracy.near_zero(as_vec=_is_marked(graph)),
        accuracy.chunk_sums,
        V.set_choices_handler(persistent.RowChoices()),
        _compiler_config.patch(
            cache_key_tag=f"{_compiler_config.cache_key_tag}{_not_in_its_key(graph, example_inputs, fake)}"
        ),
        functorch_config.patch(bundled_autograd_cache=False),
        warnings.catch_warnings(),
        inductor_config.patch(
            {
                **_SETTINGS,
                **(_LONG_EXPRESSIONS if _interpolates(graph) else {}),
                **(get_cpp_wrapper_config() if whole_program else {}),
                **_precision(graph),
                **_size_binding(example_inputs),
                **settings,
            }
        ),
    ):
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # how it makes its kernels
        yield
