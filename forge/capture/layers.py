"""Module calls that a layer may replace: found during Dynamo's capture, decided before the graph is recorded.

Dynamo captures a module's own forward as usual, which yields the guards and the metadata of its results; a node
(`layer_call`) marks its end and returns its argument. It holds its Site: the module's call as a function of tensors, by
the layer and by the module's own forward. On the complete graph, each layer is verified on the metadata of its call; if
it is right, the nodes of the module's own forward are dropped, and the layer is recorded: its torch code, or one call
that the layers' executor runs.
"""

import dis
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols, guard_scalar

from forge import torchlang
from forge.capture.autograd_functions import run_alone, traced_directly
from forge.capture.fake_values import memory_of
from forge.capture.higher_order import writes
from forge.compiler.report import LayerUse
from forge.executors.executor import Declined
from forge.executors.modules import ModuleExecutor, ModuleForward, ModuleOverride, ModuleTemplate, TensorSlot
from forge.ir import SYMBOLIC_TYPES, TensorProxy, Trace, recording
from forge.ir.checks import in_one_line
from forge.ir.pytree import leaves, tensors
from forge.ir.source import text_of
from forge.torch_internals.dynamo import (
    ConstantVariable,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    VariableTracker,
    wrap_fx_proxy,
)
from forge.torch_internals.dynamo_methods import capture_module
from forge.torchlang import autocast_mode

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_KEEPING = frozenset("batch_norm instance_norm".split())  # they mutate buffers, which no schema shows
_HOOKS = "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks".split()
SITE, INSIDE = "forge_layer_site", "forge_layers_inside"  # in the meta of nodes


_numbers = itertools.count()


class _KeepForward(Exception):
    """The module keeps its own forward; carries the reason."""


class Site:
    """A module's call that a layer may replace. `take`, once decided, records the layer."""

    def __init__(self, module: str, layer: str, override: ModuleOverride) -> None:
        self.number = next(_numbers)
        self.module = module
        self.layer = layer
        self.override = override
        self.take: Callable[..., Any] | None = None
        self.how: str | None = None


def layer_call(own: Any, *args: Any) -> Any:
    """Mark the end of a module's call on tensors: the results of its own forward."""
    return own


# while Dynamo captures


class _CaptureState:
    """The layers of the frame that Dynamo is capturing (one at a time), and why modules keep their own forward."""

    executor: ModuleExecutor | None = None
    refusals: dict[LayerUse, int]  # with the number of the call

    def __init__(self) -> None:
        self.refusals = {}


_state = _CaptureState()


@contextmanager
def mark_layers(executor: ModuleExecutor | None) -> Iterator[None]:
    """Mark the calls of modules with layers while Dynamo captures a frame."""
    before = _state.executor, _state.refusals
    _state.executor, _state.refusals = executor, {}
    try:
        yield
    finally:
        _state.executor, _state.refusals = before


@capture_module.provide
def capture_call(module: UnspecializedNNModuleVariable, tx: Any, args: list, kwargs: dict, call: Callable) -> Any:
    """Return `call()`, the call of a module, marked if a layer may replace it."""
    executor = _state.executor
    if executor is None:
        return call()
    value = module.value
    assert isinstance(value, torch.nn.Module)
    executor.see(type(value))
    if not executor.layers_for(value):
        return call()
    nodes = tx.output.current_tracer.graph.nodes
    last = next(iter(reversed(nodes)), None)
    result = call()
    name = _name_of(module)
    inside = _after(tx.output.current_tracer.graph, last)
    try:
        return _mark_call(executor, value, module, tx, args, kwargs, result, inside)
    except _KeepForward as refusal:
        reason = str(refusal)
    except Exception as error:  # Dynamo does not support some attributes of modules
        reason = in_one_line(error)
    _state.refusals.setdefault(LayerUse(name, "", None, reason), next(_numbers))
    return result


def _after(graph: Graph, last: Node | None) -> list[Node]:
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return [node for node in reversed(nodes) if node.op != "placeholder"]


def _name_of(module: UnspecializedNNModuleVariable) -> str:
    """Return the module's name in the model, if Dynamo knows it, and its class."""
    kind, source = type(module.value).__name__, module.source
    if source is None:
        return kind
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", text_of(source)))
    return f"{path} ({kind})" if path else kind


def _mark_call(  # noqa: PLR0913  the arguments of Dynamo's call
    executor: ModuleExecutor,
    value: torch.nn.Module,
    module: UnspecializedNNModuleVariable,
    tx: Any,
    args: list,
    kwargs: dict,
    result: Any,
    inside: list[Node],
) -> Any:
    _check_module(value)
    template = ModuleTemplate(value)
    operands = [_attribute(tx, module, name) for name in template.names]
    call, more = _arguments(value, args, kwargs)
    operands += more
    fakes = [_fake(each) for each in operands]
    training = torch.is_grad_enabled() and any(fake.requires_grad for fake in fakes)
    device = next((fake.device for fake in fakes), None)
    if device is None:
        raise _KeepForward("no tensor is given to it")
    layer = executor.find(value, device, training)
    if isinstance(layer, Declined):
        raise _KeepForward(layer.reason)
    _check_reads(tx, module, value, layer.kind)
    outputs = _outputs(result)
    _check_results(outputs, fakes, inside)
    _check_inputs(fakes, inside)
    names = _names(template, value, call)
    override = executor.override(layer, value, call, names, [fake.shape for fake in fakes], training=training)
    own = tuple(each.as_proxy() for each in outputs) if isinstance(result, TupleVariable) else outputs[0].as_proxy()
    proxy = tx.output.create_proxy("call_function", layer_call, (own, *[each.as_proxy() for each in operands]), {})
    site = proxy.node.meta[SITE] = Site(_name_of(module), layer.name, override)
    if inside:
        proxy.node.meta["stack_trace"] = inside[-1].meta.get("stack_trace")
    for node in inside:
        node.meta[INSIDE] = (*node.meta.get(INSIDE, ()), site.number)
    return wrap_fx_proxy(tx, proxy)


def _check_module(module: torch.nn.Module) -> None:
    if "forward" in vars(module):
        raise _KeepForward("the module's forward was replaced on the object")
    if any(getattr(each, hooks) for each in module.modules() for hooks in _HOOKS):
        raise _KeepForward("it has hooks")
    if autocast_mode.is_enabled():
        raise _KeepForward("it is called under torch.autocast")
    attributes = ModuleTemplate(module).unregistered_tensors()
    if attributes:
        raise _KeepForward(f"its attribute {attributes[0]} is a tensor, and neither a parameter nor a buffer")


def _attribute(tx: Any, module: Any, path: str) -> Any:
    """Return the object that Dynamo finds, and guards, at a path of attributes."""
    value, get = module, VariableTracker.build(tx, getattr)
    for name in path.split("."):
        value = get.call_function(tx, [value, ConstantVariable.create(name)], {})
        value = value.realize() if hasattr(value, "realize") else value
    return value


def _fake(variable: Any) -> torch.Tensor:
    if not isinstance(variable, TensorVariable):
        raise _KeepForward(f"it has a tensor that Dynamo sees as {type(variable).__name__}")
    return variable.as_proxy().node.meta["example_value"]


def _arguments(module: torch.nn.Module, args: list, kwargs: dict) -> tuple[tuple[tuple, dict], list]:
    """Return the call's arguments as its own forward takes them, with a TensorSlot for each tensor, and the tensors."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    variables: list[Any] = []

    def template_of(variable: Any, name: str) -> Any:
        variable = variable.realize() if hasattr(variable, "realize") else variable
        if isinstance(variable, TensorVariable):
            variables.append(variable)
            return TensorSlot(len(variables) - 1)
        if isinstance(variable, (TupleVariable, ListVariable)) and variable.python_type() in (tuple, list):
            return variable.python_type()(template_of(each, name) for each in variable.items)
        if variable.is_python_constant() and isinstance(variable.as_python_constant(), _PLAIN):
            return variable.as_python_constant()
        raise _KeepForward(f"its argument {name} is neither a tensor nor a constant")

    names = list(bound.signature.parameters)
    positional = [template_of(each, names[min(i + 1, len(names) - 1)]) for i, each in enumerate(bound.args[1:])]
    return (tuple(positional), {name: template_of(each, name) for name, each in bound.kwargs.items()}), variables


def _check_reads(tx: Any, variable: Any, module: torch.nn.Module, layer: type[torch.nn.Module]) -> None:
    """Guard the attributes that a layer's forward may read, of the module and of those inside it."""
    names = reads_of_self(layer.forward.__code__)
    for path, inside in module.named_modules():
        for name, value in vars(inside).items():
            if not (isinstance(value, _PLAIN) if names is None else name in names) or isinstance(value, dict):
                continue
            attribute = _attribute(tx, variable, f"{path}.{name}" if path else name)
            if isinstance(attribute, SymNodeVariable):
                guard_scalar(attribute.sym_num)
            elif not attribute.is_python_constant():
                kind = type(value).__name__
                raise _KeepForward(f"the layer reads its attribute {name}, a {kind} that is no constant of the program")


def reads_of_self(code: types.CodeType) -> set[str] | None:
    """Return the attributes that a method may read of its first argument, or of their values; None if it passes it
    on, so that other functions may read any."""
    if not code.co_argcount or code.co_varnames[0] in code.co_cellvars:
        return None
    owner, calls = code.co_varnames[0], list(dis.get_instructions(code))
    for each, following in zip(calls, [*calls[1:], None], strict=True):
        loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if not each.opname.startswith("LOAD_FAST") or owner not in loaded:
            continue
        if owner in loaded[:-1] or following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return None
    return set(code.co_names)


def _outputs(result: Any) -> list[TensorVariable]:
    items = list(result.items) if isinstance(result, TupleVariable) else [result]
    items = [each.realize() if hasattr(each, "realize") else each for each in items]
    outputs = [each for each in items if isinstance(each, TensorVariable)]
    if not items or len(outputs) < len(items):
        raise _KeepForward("it returns something else than tensors")
    return outputs


def _check_results(outputs: Sequence[TensorVariable], fakes: Sequence[torch.Tensor], inside: list[Node]) -> None:
    results = [_fake(each) for each in outputs]
    memory = {memory_of(fake) for fake in fakes}
    result_memory = [memory_of(each) for each in results]
    if not memory.isdisjoint(result_memory) or len(set(result_memory)) < len(result_memory):
        raise _KeepForward("what it returns shares memory with what it is given")
    if not all(each.is_contiguous() for each in results):
        raise _KeepForward("what it returns is not contiguous")
    if any(name not in ("cpu", "cuda") for name in {each.device.type for each in results}):
        raise _KeepForward("it runs on a device that forge has no verification for")
    if any(getattr(node.target, "__name__", "") in _KEEPING for node in inside):
        raise _KeepForward("its own forward may change its statistics")
    own = set(inside)
    own_memory = {
        memory_of(leaf) for node in own for leaf in leaves(node.meta.get("example_value")) if _is_tensor(leaf)
    }
    for node in inside:
        target = node.args[0] if writes(node) and node.args else None
        example = target.meta.get("example_value") if isinstance(target, Node) else None
        if _is_tensor(example) and (
            target not in own or memory_of(example) in memory or memory_of(example) not in own_memory
        ):
            raise _KeepForward("it changes a tensor that others see")


def _check_inputs(fakes: Sequence[torch.Tensor], inside: list[Node]) -> None:
    """Check that the module's own forward reads only the call's arguments: any other value would be a constant of the
    layer."""
    own, argument_ids = set(inside), {id(fake) for fake in fakes}
    sizes = {str(symbol) for fake in fakes for symbol in free_symbols(fake.shape)}
    for read in dict.fromkeys(each for node in inside for each in node.all_input_nodes if each not in own):
        example = read.meta.get("example_value")
        if id(example) in argument_ids:
            continue
        numbers = [example]
        if _is_tensor(example) and example.ndim == 0:  # Dynamo represents a symbolic number as a tensor
            numbers = [user.meta.get("example_value") for user in read.users if user in own]
        for number in numbers:
            if not isinstance(number, SYMBOLIC_TYPES):
                raise _KeepForward("its own forward reads a value that is neither given to it nor a constant")
            if not {*map(str, free_symbols(number))} <= sizes:
                guard_scalar(number)


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _names(template: ModuleTemplate, module: torch.nn.Module, call: tuple[tuple, dict]) -> list[str]:
    """Return unique names of a call's tensors: paths in the module, and parameters of its forward."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    args, kwargs = call
    names = [name.replace(".", "_") for name in template.names]
    arguments = [*((parameters[min(i, len(parameters) - 1)], each) for i, each in enumerate(args)), *kwargs.items()]
    for name, each in arguments:
        names += [name] * sum(isinstance(leaf, TensorSlot) for leaf in _walk(each))
    result: list[str] = []
    for name in names:
        free = (each for each in (name, *(f"{name}_{i}" for i in range(len(names)))) if each not in result)
        result.append(next(free))
    return result


def _walk(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _walk(each)
    else:
        yield tree


# before a graph is recorded


def decide(graph: GraphModule, executor: ModuleExecutor | None) -> list[LayerUse]:
    """Decide on each site of a graph, outer ones first, and return the result for each."""
    if executor is None:
        return []
    uses = dict(_state.refusals)
    _state.refusals.clear()
    for part in (each for each in graph.modules() if isinstance(each, GraphModule)):
        layer_sites: set[int] = set()
        for node in reversed(part.graph.nodes):
            site = node.meta.get(SITE)
            if site is not None and layer_sites.isdisjoint(node.meta.get(INSIDE, ())):
                use = _decide(site, node)
                uses[use] = site.number
                if use.how is not None:
                    layer_sites.add(site.number)
    return sorted(uses, key=uses.__getitem__)


def _decide(site: Site, node: Node) -> LayerUse:
    tensors = node.args[1:]
    fakes = [each.meta.get("example_value") for each in tensors if isinstance(each, Node)]
    examples = [each for each in fakes if _is_tensor(each)]
    if len(examples) < len(tensors):
        return LayerUse(site.module, site.layer, None, "the metadata of what it is given is not known")
    decision = site.override.verify(examples)
    if isinstance(decision, Declined):
        return LayerUse(site.module, site.layer, None, decision.reason)
    if _is_traceable(site.override.function, examples, node.meta["example_value"]):
        site.how, site.take = "traced", _LayerTracer(site.override.function)
    else:
        site.how, site.take = "one call", site.override.symbol()
    return LayerUse(site.module, site.layer, site.how)


class _LayerTracer:
    """Tracer of a layer's torch code, with its own memory."""

    def __init__(self, function: ModuleForward) -> None:
        self.function = function

    def __call__(self, *args: TensorProxy) -> Any:
        run = run_alone(self._body, args, lambda result: tuple(tensors(result)))
        if run.writes or any(place is not None for place in run.shared):
            raise NotImplementedError("it changes what it is given, or returns it")
        return run.result

    def _body(self, *args: TensorProxy) -> Any:
        with traced_directly():
            return self.function(*args)


def _is_traceable(function: ModuleForward, inputs: Sequence[torch.Tensor], example: Any) -> bool:
    """Return whether a layer is pure torch code that is equivalent to the module's own forward."""
    trace = Trace("layer")
    try:
        with recording(trace, torchlang.language):
            proxies = [trace.add_input(_proxy(trace, each)) for each in inputs]
            results = tensors(_LayerTracer(function)(*proxies))
    except Exception:  # of the layer's own code, which may not support proxies
        return False
    expected = [leaf for leaf in leaves(example) if _is_tensor(leaf)]
    return [_meta(each) for each in results] == [_meta(each) for each in expected]


def _proxy(trace: Trace, tensor: torch.Tensor) -> TensorProxy:
    return trace.tensor(tuple(tensor.shape), tensor.dtype, tensor.device, strides=tuple(tensor.stride()))


def _meta(value: Any) -> tuple:
    return tuple(map(str, value.shape)), value.dtype, value.device


def replaced_nodes(graph: Graph) -> set[Node]:
    """Return the nodes to delete: the own forwards of modules whose calls layers replace."""
    result: set[Node] = set()
    layer_sites: set[int] = set()
    for node in reversed(graph.nodes):
        site = node.meta.get(SITE)
        is_inside = not layer_sites.isdisjoint(node.meta.get(INSIDE, ()))
        if is_inside and all(user in result or _is_taken(user) for user in node.users):
            result.add(node)
        elif site is not None and site.take is not None:
            layer_sites.add(site.number)
    return result


def _is_taken(node: Node) -> bool:
    site = node.meta.get(SITE)
    return site is not None and site.take is not None
