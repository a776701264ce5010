"""The keys of one kernel of an operator's entry, and the KernelEntry that they make.

The file is long because all keys share the reader of the operator's kernels, and most use each other's readings.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from forge.hub.manifest.aliases import AliasReader, Meta, dtype, dtype_or_alias, meta
from forge.hub.manifest.errors import InvalidText, Mark, did_you_mean
from forge.hub.manifest.layout import ORDERS
from forge.hub.manifest.model import (
    NO_LIBRARY,
    REQUIRED,
    Argument,
    Constant,
    Device,
    DimOrder,
    Grad,
    KernelArgument,
    KernelEntry,
    Layout,
    Library,
    Parameter,
    SavedTensor,
    Signature,
)
from forge.hub.manifest.parse import Node
from forge.hub.manifest.schema import (
    BOTH,
    EXECUTORCH,
    NAME,
    Reading,
    WrongKind,
    any_node,
    key,
    many,
    number,
    pairs,
    text,
    text_of_form,
    whole,
)
from forge.hub.manifest.shapes import ShapePattern, make_shape, parse_shape
from forge.hub.manifest.views import RESULT, parse_view
from forge.hub.manifest.where import Where, parse_where

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})*"
_FUNCTION = re.compile(
    rf"(?:{_DOTTED}|{_IDENTIFIER}(?:::{_IDENTIFIER})+(?:\.{_IDENTIFIER})?"
    rf"|python:\.*(?:{_DOTTED})?:{_DOTTED}|hub:[\w.-]+/[\w.-]+(?:@[\w./-]+)?:{_DOTTED})"
)
_CAPABILITY = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d{1,3})(?:\.(\d{1,2}))?")
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "meta")
_RESULT = re.compile(r"__ret_(\d{1,2})")
_MAX_RESULTS = 16
_OF_SEVERAL = re.compile(r"(?:grad_)?output_\d+")
_GRADS = ("none", "composite", "autograd")
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # in 0.1.0, operators had arguments of these names too

function_name = text_of_form(_FUNCTION, "'function', 'ns::name', 'python:module:function' or 'hub:org/repo:function'")


@dataclass(frozen=True)
class KernelReader(AliasReader):
    """A reader of the kernels of one operator.

    signature: None while it is not known. more: values besides the operator's arguments that may be passed to a kernel,
    such as gradients to a backward.
    """

    op: str = ""
    kind: str = "op"
    signature: Signature | None = None
    library: Library = NO_LIBRARY
    has_reference: bool = False
    more: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.signature.parameters if self.signature else ()

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments that may be tensors and are not outputs."""
        return tuple(p.name for p in self.parameters if p.may_be_tensor and not p.out)

    @property
    def outs(self) -> tuple[str, ...]:
        """The arguments that an out-variant writes to."""
        return tuple(p.name for p in self.parameters if p.out)

    @property
    def returns(self) -> int | None:
        return self.signature.returns if self.signature else None

    def torch_name(self, name: str) -> str:
        """Return torch's name of an argument with a NumPy name in the manifest, with a DeprecationWarning."""
        new = _OF_NUMPY.get(name, name)
        if new == name or name in self.arguments or new not in self.arguments:
            return name
        message = f"{self.op}: the argument {name!r} is now {new!r}; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return new

    def check_argument(self, name: str, mark: Mark, what: str) -> None:
        """Report a name that is not an argument of the operator that may be a tensor."""
        if self.signature is None or name in self.signature.tensors:
            return
        names = self.signature.tensors
        kind = "a tensor argument" if name in self.signature.by_name else "an argument"
        listing = f"tensor arguments: {', '.join(names) or 'none'}{did_you_mean(name, names)}"
        self.problems.add(mark, f"{what} names {name!r}, not {kind} of {self.op}; {listing}")


# constraints


def _arg_meta(reader: KernelReader, node: Node, what: str) -> dict[str | int, Meta]:
    """Return the constraints by argument, and those on results by position."""
    metas: dict[str | int, Meta] = {}
    for name, mark, item in pairs(node, "null or a mapping from arguments to [dtype, order]"):
        result = _RESULT.fullmatch(name)
        if result is None:
            reader.check_argument(name, mark, what)
        elif reader.returns is not None and int(result[1]) >= reader.returns:
            reader.problems.add(mark, f"{what} names {name!r}, but {reader.op} has {reader.returns} results")
        metas[int(result[1]) if result else name] = reader.read(meta, item, f"{what} of {name}") or Meta()
    return metas


def _shape(reader: KernelReader, node: Node, what: str) -> ShapePattern:
    """Return a pattern. Its dims may not have an argument's name, which would be ambiguous in a where expression."""
    if node.is_list and not any(item.is_list or item.is_mapping for item in node.value):
        pattern = make_shape([str(item.value) for item in node.value])
    else:
        pattern = parse_shape(text(reader, node, what).strip().removesuffix("?"))
    for name in pattern.names:
        if reader.torch_name(name) in reader.arguments:
            problem = f"the dim {name!r} has the name of an argument; rename the dim"
            reader.problems.add(node.mark, f"shape {pattern}: {problem}")
    return pattern


def _shapes(reader: KernelReader, node: Node, what: str) -> dict[str, ShapePattern | None]:
    shapes = {}
    for name, mark, item in pairs(node, 'a mapping from arguments to patterns such as "[..., H]"'):
        reader.check_argument(name, mark, what)
        shapes[name] = reader.read(_shape, item, f"{what} of {name}")
    return shapes


def _condition(reader: KernelReader, node: Node, what: str) -> Where:
    return parse_where(text(reader, node, what), key=what).rename(reader.torch_name)


def _device_type(reader: KernelReader, node: Node, what: str) -> str:
    name = text(reader, node, what)
    if name not in _DEVICES:
        hint = did_you_mean(name, _DEVICES) or f"; known: {', '.join(_DEVICES)}"
        raise InvalidText(f"unknown device type {name!r}{hint}")
    return name


def _capability(reader: KernelReader, node: Node, what: str) -> tuple[tuple[str, tuple[int, int]], ...]:
    parts = text(reader, node, what).split(",")
    matches = [match for part in parts if (match := _CAPABILITY.fullmatch(part.strip()))]
    if len(matches) < len(parts):
        raise WrongKind("a version range such as '>=8.0' or '>=8.0,<10'")
    return tuple((match[1], (int(match[2]), int(match[3] or 0))) for match in matches)


@dataclass(frozen=True)
class _DeviceKeys:
    type: tuple[str, ...] = key(many(_device_type), default=(), required=True, label="device type")
    capability: tuple = key(_capability, default=())


def _device(reader: KernelReader, node: Node, what: str) -> Device | None:
    keys = reader.section(_DeviceKeys, node if node.is_mapping else Node(node.mark, {"type": node}), what)
    capability = node.get("capability")
    if capability is not None and keys.type and keys.type != ("cuda",):
        listing = ", ".join(keys.type)
        reader.problems.add(capability.mark, f"capability is of cuda devices, but the device type is {listing}")
    capability_text = "" if capability is None else str(capability.plain())
    return Device(keys.type, keys.capability, capability_text) if keys.type else None


# how it is called


@dataclass(frozen=True)
class _ConstantKeys:
    constant: Node | None = key(any_node, required=True)


def _args(reader: KernelReader, node: Node, what: str) -> tuple[KernelArgument, ...]:
    """Return a mapping from the kernel's parameters, or a list by position."""
    if node.is_list:
        return tuple(KernelArgument(None, _argument(reader, item, what)) for item in node.value)
    arguments = []
    for name, mark, item in pairs(node, "a mapping from the kernel's parameters to arguments, or a list"):
        if not NAME.fullmatch(name):
            reader.problems.add(mark, f"{what} names {name!r}, which is no parameter's name")
        arguments.append(KernelArgument(name, _argument(reader, item, what)))
    return tuple(arguments)


def _argument(reader: KernelReader, node: Node, what: str) -> Argument | Constant:
    """Return an argument, a number, or {constant: …} for text."""
    if node.is_mapping:
        keys = reader.section(_ConstantKeys, node, what)
        return Constant(None if keys.constant is None else keys.constant.plain())
    if not isinstance(node.value, str):
        return Constant(node.plain())
    return reader.read(_argument_view, node, what) or Argument(node.value)


def _argument_view(reader: KernelReader, node: Node, what: str) -> Argument:
    """Return a value that may be passed to a kernel, or a view of it."""
    is_name = NAME.fullmatch(node.value) or "." not in node.value
    view = Argument(reader.torch_name(node.value)) if is_name else parse_view(node.value)
    choices = (*reader.arguments, *reader.more)
    for name in (view.name, *view.names) if reader.signature is not None else ():
        if name not in choices:
            near = _near_or_all(name, choices)
            constant = f"; a text is written {{constant: {node.value}}}" if is_name else ""
            problem = f"{what} gives {name!r}, not an argument of {reader.op}{near}{constant}"
            reader.problems.add(node.mark, problem)
    if view.index is not None:
        reader.problems.add(node.mark, f"{what} gives {node.value!r}, but a list is given whole")
    return view


def _near_or_all(name: str, choices: Sequence[str]) -> str:
    """Return the value that a name may mean, or else all values, those of several results as one."""
    if near := did_you_mean(name, choices):
        return near
    if name.startswith("grad") and "grad_output" in choices:
        return "; did you mean 'grad_output'?"
    counted = [each for each in choices if _OF_SEVERAL.fullmatch(each)] if "output" in choices else []
    several = " (grad_output_0, output_0, ... of several results)" if counted else ""
    return f"; arguments: {', '.join(each for each in choices if each not in counted)}{several}"


def _result_view(reader: KernelReader, node: Node, what: str) -> Argument:
    """Return the place of one of the operator's results or gradients in the kernel's return value."""
    view = parse_view(text(reader, node, what))
    if view.name != RESULT:
        problem = f"{what} is {node.value!r}, but must begin with {RESULT}, what the kernel returns"
        reader.problems.add(node.mark, problem)
    unknown = [name for name in view.names if name not in (RESULT, *reader.arguments)]
    if unknown and reader.signature is not None:
        near = did_you_mean(unknown[0], (RESULT, *reader.arguments)) or f"; arguments: {', '.join(reader.arguments)}"
        reader.problems.add(node.mark, f"{what} speaks of {unknown[0]!r}, not an argument of {reader.op}{near}")
    return view


def _out(reader: KernelReader, node: Node, what: str) -> str | int:
    value = node.value
    if (type(value) is int and 0 <= value < 64) or (isinstance(value, str) and NAME.fullmatch(value)):
        return value
    raise WrongKind("the name or the position of the kernel's out parameter")


def _tensor(reader: KernelReader, node: Node, what: str) -> str:
    """Return a tensor argument, or another value that may be passed to a backward."""
    name = text(reader, node, what)
    if name not in reader.more:
        reader.check_argument(name, node.mark, what)
    return name


def _by_tensor(read: Reading) -> Reading:
    """Return a reading of one value for all tensor arguments, or of a mapping by argument."""

    def by_tensor(reader: KernelReader, node: Node, what: str) -> dict[str, Any]:
        if not node.is_mapping:
            return dict.fromkeys(reader.inputs, reader.read(read, node, what))
        for name, mark in node.keys.items():
            reader.check_argument(name, mark, what)
        return {name: reader.read(read, item, what) for name, item in node.value.items()}

    return by_tensor


def _order(reader: KernelReader, node: Node, what: str) -> DimOrder:
    if isinstance(node.value, str) and node.value in ORDERS:
        return ORDERS[node.value]
    near = did_you_mean(node.value, ORDERS) if isinstance(node.value, str) else ""
    raise WrongKind(f"{' or '.join(ORDERS)}{near}")


def _alignment(reader: KernelReader, node: Node, what: str) -> int:
    if type(node.value) is int and 1 <= node.value <= 4096 and node.value & (node.value - 1) == 0:
        return node.value
    raise WrongKind("a power of two of at most 4096, in bytes")


# gradients and tolerances


def _saves(reader: KernelReader, node: Node, what: str) -> dict[str, SavedTensor]:
    saves = {}
    existing = (*reader.arguments, *result_names(reader.signature))
    for name, mark, item in pairs(node, 'a mapping from names to [dtype, shape], such as {rstd: [float32, "[...]"]}'):
        if not NAME.fullmatch(name) or name in existing:
            problem = "is taken" if name in existing else "is no name"
            reader.problems.add(mark, f"{what} names {name!r}, which {problem}")
        else:
            saves[name] = reader.read(_saved_tensor, item, f"{what} of {name}")
    return {name: saved for name, saved in saves.items() if saved is not None}


def _saved_tensor(reader: KernelReader, node: Node, what: str) -> SavedTensor | None:
    if not (node.is_list and len(node.value) == 2):
        raise WrongKind('[dtype, shape], such as [float32, "[..., H]"]')
    alias = reader.read(dtype_or_alias, node.value[0], what)
    pattern = reader.read(_shape, node.value[1], f"shape of {what.removeprefix('saves of ')}")
    return None if alias is None or pattern is None else SavedTensor(alias, pattern)


@dataclass(frozen=True)
class _GradKeys:
    """The keys of a backward kernel; the fields of a Grad."""

    kernel_name: str | None = key(function_name, required=True, label="grad's kernel_name")
    args: tuple[KernelArgument, ...] | None = key(_args)
    out: tuple[str | int, ...] = key(many(_out), default=())
    result: tuple[Argument, ...] = key(many(_result_view), default=())
    returns: tuple[str, ...] | None = key(many(_tensor))
    forward: str | None = key(function_name, label="grad's forward")
    saves: Mapping[str, SavedTensor] | None = key(_saves)
    mutates: tuple[str, ...] = key(many(_tensor), default=())


def _grad(reader: KernelReader, node: Node, what: str) -> Grad:
    value = node.value
    if node.is_mapping:
        return _backward(reader, node, what)
    if not isinstance(value, str):
        raise WrongKind("none, composite, autograd, or the name of a backward kernel")
    if value == "composite" and reader.kind == "func" and not reader.has_reference:
        raise InvalidText(f"grad: composite derives from a reference, but {reader.op} has none; add reference:")
    if value in _GRADS:
        return Grad(value)
    if near := did_you_mean(value, _GRADS):
        raise InvalidText(f"unknown grad {value!r}{near}")
    return Grad("kernel", function_name(reader, node, what), returns=reader.inputs)


def _backward(reader: KernelReader, node: Node, what: str) -> Grad:
    saves, forward = node.get("saves"), node.get("forward")
    names = saves.value if saves is not None and saves.is_mapping else ()
    keys = dataclasses.replace(reader, more=(*result_names(reader.signature), *names)).section(_GradKeys, node, what)
    returns = reader.inputs if keys.returns is None else keys.returns
    if forward is not None and saves is None:
        problem = "grad has a forward, but saves nothing; say in saves what it returns beyond"
        reader.problems.add(forward.mark, problem)
    count, what = len(returns) if reader.signature else None, f"gradients that it returns: {', '.join(returns)}"
    for name, problem in _result_problems(node, keys, count, what):
        reader.problems.add(node.place(name), problem)
    return Grad("kernel", **{**vars(keys), "returns": returns, "saves": keys.saves or {}})


def result_names(signature: Signature | None) -> tuple[str, ...]:
    """Return the values of the results that a backward may take: `grad_output` and `output`; numbered if there are
    several or their number is not known."""
    count = signature.returns if signature else None
    single = ("grad_output", "output") if count in (None, 1) else ()
    indices = () if count == 1 else range(count if count is not None else _MAX_RESULTS)
    return (*single, *(f"{name}_{i}" for i in indices for name in ("grad_output", "output")))


def _tolerance(reader: KernelReader, node: Node, what: str) -> dict[torch.dtype, tuple[float, float]]:
    tolerances = {}
    for name, mark, item in pairs(node, "a mapping from dtypes to [rtol, atol]"):
        tolerances[reader.read(dtype, Node(mark, name), what)] = reader.read(_limits, item, f"{what} of {name}")
    return tolerances


def _limits(reader: KernelReader, node: Node, what: str) -> tuple[float, ...]:
    if not (node.is_list and len(node.value) == 2):
        raise WrongKind("[rtol, atol]")
    return reader.each(number, node, what)


# a kernel


@dataclass(frozen=True)
class KernelKeys:
    """The keys of a kernel."""

    name: str | None = key(text)
    kernel_name: str | None = key(function_name, required=True, dialects=BOTH)
    priority: int | None = key(whole)
    device: Device | None = key(_device)
    arg_meta: Mapping[str | int, Meta] | None = key(_arg_meta, dialects=BOTH)
    shape: Mapping[str, ShapePattern | None] | None = key(_shapes)
    where: tuple[Where, ...] = key(many(_condition), default=())
    faster: tuple[Where, ...] = key(many(_condition), default=())
    args: tuple[KernelArgument, ...] | None = key(_args)
    out: tuple[str | int, ...] = key(many(_out), default=())
    result: tuple[Argument, ...] = key(many(_result_view), default=())
    layout: Mapping[str, DimOrder] | None = key(_by_tensor(_order))
    align: Mapping[str, int] | None = key(_by_tensor(_alignment))
    grad: Grad = key(_grad, default=Grad())
    tolerance: Mapping[torch.dtype, tuple[float, float]] | None = key(_tolerance)
    mutates: tuple[str, ...] = key(many(_tensor), default=())
    assumes: str | None = key(function_name)
    samples: str | None = key(function_name)
    type_alias: Node | None = key(any_node, dialects=BOTH)  # both are read before the other keys, which use them
    dim_order_alias: Node | None = key(any_node, dialects=BOTH)


# fields that an entry takes over unchanged
_SAME = "kernel_name device where faster args out result grad mutates assumes samples".split()


def read_kernel(reader: KernelReader, node: Node, index: int, fn: Callable | None = None) -> KernelEntry | None:
    """Return one entry of `kernels`; None if reading could not go on (all problems were reported)."""
    own = dataclasses.replace(reader, aliases=reader.aliases.with_own(reader, node))
    optional = ("kernel_name",) if fn else ()
    keys = own.read(lambda *args: own.section(KernelKeys, node, args[-1], optional=optional), node, f"kernels[{index}]")
    if keys is None:
        return None
    entry = _entry(own, keys, node, fn)
    checks = (
        _result_problems(node, keys, own.returns, "operator's results"),
        _saving_problems(node, entry),
        _out_problems(own, node, entry),
    )
    for name, problem in chain(*checks):
        own.problems.add(node.place(name), problem)
    _check_conditions(own, node, keys)
    _check_saves(own, node, entry)
    return _with_outs(own, entry)


def _entry(reader: KernelReader, keys: KernelKeys, node: Node, fn: Callable | None) -> KernelEntry:
    metas = {name: each for name, each in (keys.arg_meta or {}).items() if isinstance(name, str)}
    results = {place: each.dtype for place, each in (keys.arg_meta or {}).items() if isinstance(place, int)}
    orders = {name: each.order for name, each in metas.items() if each.order is not None}
    layout, align = keys.layout or {}, keys.align or {}
    same = {name: each for name, each in vars(keys).items() if name in _SAME}
    return KernelEntry(
        **same,
        op=reader.op,
        name=str(keys.name or keys.kernel_name or getattr(fn, "__name__", "?")),
        fn=fn,
        op_kind=reader.kind,
        library=reader.library.name,
        priority=reader.library.priority if keys.priority is None else keys.priority,
        dtypes={name: each.dtype for name, each in metas.items() if each.dtype is not None},
        orders=orders,
        optional=frozenset(_optional(reader, metas, node.get("shape"))),
        returns={place: each for place, each in results.items() if each is not None},
        shape={name: each for name, each in (keys.shape or {}).items() if each is not None},
        tolerance=keys.tolerance or {},
        layout={name: Layout(layout.get(name), align.get(name)) for name in dict.fromkeys((*layout, *align))},
        keyed=reader.dialect == EXECUTORCH and bool(orders),
        mark=node.mark,
    )


def _optional(reader: KernelReader, metas: Mapping[str, Meta], shape: Node | None) -> Iterator[str]:
    """Yield the constrained arguments that may be None: those with a `?`, or an optional type in the schema of an
    ExecuTorch file."""
    for name, each in metas.items():
        parameter = reader.signature.by_name.get(name) if reader.signature else None
        if each.optional or (reader.dialect == EXECUTORCH and parameter is not None and parameter.optional):
            yield name
    for name, item in shape.value.items() if shape is not None and shape.is_mapping else ():
        if isinstance(item.value, str) and item.value.strip().endswith("?"):
            yield name


def _with_outs(reader: KernelReader, entry: KernelEntry) -> KernelEntry:
    """Return the entry with the out parameters of an out-variant, which are not among the constrained arguments."""
    outs = reader.outs
    if not outs or entry.out:
        return entry
    if entry.args is None:
        return dataclasses.replace(entry, out=outs)
    out_arguments = [
        argument for argument in entry.args if isinstance(argument.value, Argument) and argument.value.name in outs
    ]
    args = tuple(argument for argument in entry.args if argument not in out_arguments)
    return dataclasses.replace(
        entry, out=tuple(argument.parameter for argument in out_arguments if argument.parameter), args=args
    )


# checks of several keys, each problem located at its key


def _result_problems(node: Node, keys: Any, count: int | None, what: str) -> Iterator[tuple[str, str]]:
    if keys.result and count is not None and len(keys.result) != count:
        yield "result", f"result has {len(keys.result)} entries, but must have {count}, for the {what}"
    if keys.result and node.get("out") is not None:
        yield "result", "result goes with what a kernel returns, out with what it writes; one of them is meant"
    if len(set(keys.out)) < len(keys.out):
        yield "out", f"out names a parameter twice: {', '.join(map(str, keys.out))}"


def _saving_problems(node: Node, entry: KernelEntry) -> Iterator[tuple[str, str]]:
    if entry.assumes is not None and entry.grad.kind == "kernel":
        does_not = "a backward kernel does not know what ran"
        yield "assumes", f"assumes goes with grad: none, composite or autograd; {does_not}"
    if entry.grad.saves and node.get("result") is not None:
        returns = "returns its results and then what is saved"
        yield "result", f"a kernel that saves {returns}: result does not go with saves"


def _out_problems(reader: KernelReader, node: Node, entry: KernelEntry) -> Iterator[tuple[str, str]]:
    """Yield the problems of the out parameters, and the arguments that are never passed to the kernel."""
    if reader.signature is None:
        return
    complete, returns = _with_outs(reader, entry), reader.returns
    if entry.args is not None and not entry.out and len(complete.out) < min(len(reader.outs), returns or 1):
        yield "args", f"args does not say where {', '.join(reader.outs)} goes; use out:"
    if entry.out and returns is not None and len(entry.out) != returns:
        yield "out", f"out names {len(entry.out)} parameters, but {reader.op} has {returns} results"
    if complete.out and entry.grad.kind == "autograd":
        no_graph = "one that writes to out has no graph"
        yield "grad", f"grad: autograd is of kernels that return their result; {no_graph}"
    used = {argument.value.name for argument in entry.args or () if isinstance(argument.value, Argument)}
    if entry.args is None or not used <= reader.signature.by_name.keys():  # a misspelt name, which was reported
        return
    used |= {name for condition in entry.where for name in condition.names}
    for parameter in reader.signature.parameters:
        if parameter.default is REQUIRED and not (parameter.out or parameter.rest or parameter.name in used):
            advice = "pass it, or say in where what it must be"
            yield "args", f"args leaves out {parameter.name!r}, which has no default: {advice}"


def _check_conditions(reader: KernelReader, node: Node, keys: KernelKeys) -> None:
    """Check that conditions use existing arguments and dims only."""
    patterns = [pattern for pattern in (keys.shape or {}).values() if pattern is not None]
    is_read = len(patterns) == len(keys.shape or ()) and (node.get("shape") is None or keys.shape is not None)
    if reader.signature is None or not is_read:
        return  # the dims of a pattern that could not be read are not known
    dims = {name for pattern in patterns for name in pattern.names}
    values = {p.name for p in reader.signature.parameters if p.kind in ("other", "any", "tensors")} | dims
    tensors = {p.name for p in reader.signature.parameters if p.kind == "tensor"}
    for name in ("where", "faster"):
        by_text = {each.text: each for each in getattr(keys, name)}
        conditions = node.get(name)
        for item in conditions.items if conditions else ():
            condition = by_text.get(str(item.value).strip())
            for problem in condition.name_problems(values, tensors) if condition is not None else ():
                reader.problems.add(item.mark, problem)


def _check_saves(reader: KernelReader, node: Node, entry: KernelEntry) -> None:
    """Check that the dtypes and shapes of a forward's saved values refer to arguments."""
    dims = {dim for each in entry.shape.values() for dim in each.names}
    has_rest = any(each.rest is not None for each in entry.shape.values())
    for name, saved in entry.grad.saves.items():
        dtype_node, shape_node = node.value["grad"].value["saves"].value[name].value
        alias, pattern = saved.dtype, saved.shape
        if len(alias.dtypes) > 1 and all(alias.name != each.name for each in entry.dtypes.values()):
            problem = f"no argument has the type alias {alias.name}, which allows several"
            reader.problems.add(dtype_node.mark, f"saves of {name}: {problem}")
        unknown = [dim for dim in pattern.names if dim not in dims]
        unknown += ["..."] if pattern.rest is not None and not has_rest else []
        unknown += ["_"] if any(dim.any for dim in (*pattern.first, *(pattern.rest or ()))) else []
        if unknown:
            choices = ", ".join(sorted(dims)) or "none"
            problem = f"the shape of no argument says what {', '.join(unknown)} is; known: {choices}"
            reader.problems.add(shape_node.mark, f"saves of {name}: {problem}")
