"""Reading one kernel of an operator's entry."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forge.hub.manifest.aliases import Aliases, read_aliases, read_dtype, read_dtype_or_alias, read_meta
from forge.hub.manifest.errors import Mark, did_you_mean
from forge.hub.manifest.fields import NAME, Fields, Reader, constant, shown
from forge.hub.manifest.layout import ORDERS
from forge.hub.manifest.model import (
    REQUIRED,
    Argument,
    Constant,
    Device,
    DtypeAlias,
    Given,
    Grad,
    KernelEntry,
    Layout,
    OrderAlias,
    Saved,
    Signature,
)
from forge.hub.manifest.parse import ListNode, MappingNode, Node, ScalarNode
from forge.hub.manifest.shapes import NotAPattern, ShapePattern, make_shape, parse_shape
from forge.hub.manifest.views import RESULT, NotAView, Viewed, parse_view
from forge.hub.manifest.where import NotAllowed, Where, parse_where

KEYS = (
    "name",
    "kernel_name",
    "priority",
    "device",
    "arg_meta",
    "shape",
    "where",
    "faster",
    "args",
    "out",
    "result",
    "layout",
    "align",
    "grad",
    "tolerance",
    "mutates",
    "assumes",
    "samples",
    "type_alias",
    "dim_order_alias",
)
EXECUTORCH_KEYS = ("arg_meta", "kernel_name", "type_alias", "dim_order_alias")

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = rf"{_IDENTIFIER}(?:\.{_IDENTIFIER})*"
KERNEL_NAME = re.compile(
    rf"(?:{_DOTTED}|{_IDENTIFIER}(?:::{_IDENTIFIER})+(?:\.{_IDENTIFIER})?"
    rf"|python:\.*(?:{_DOTTED})?:{_DOTTED}|hub:[\w.-]+/[\w.-]+(?:@[\w./-]+)?:{_DOTTED})"
)
KERNEL_NAME_FORMS = "'function', 'ns::name', 'python:module:function' or 'hub:org/repo:function'"

_CAPABILITY = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d{1,3})(?:\.(\d{1,2}))?")
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "meta")
MAX_RESULTS = 16
GRADS = ("none", "composite", "autograd")
_RESULT = re.compile(r"__ret_(\d{1,2})")


Dtypes = Mapping[str, DtypeAlias]


@dataclass(frozen=True)
class Op:
    """What a kernel's entry is read against; `signature` is None while it is not known."""

    name: str
    kind: str
    signature: Signature | None
    aliases: Aliases
    library: str
    priority: int
    executorch: bool
    has_reference: bool


def read_kernel(reader: Reader, node: Node, index: int, op: Op, fn: Callable | None = None) -> KernelEntry | None:
    """One entry of `kernels`; None when it was too wrong to go on (all that is wrong was reported)."""
    where = f"kernels[{index}]"
    hint = "; begin the file with forge_kernels: 1 to use it" if op.executorch else ""
    fields = reader.fields(
        node,
        where,
        EXECUTORCH_KEYS if op.executorch else KEYS,
        required=() if fn else ("kernel_name",),
        hint=hint if _has_forge_key(node) else "",
    )
    if fields is None:
        return None
    own = read_aliases(reader, fields.get("type_alias"), fields.get("dim_order_alias"))
    return _Kernel(reader, fields, dataclasses.replace(op, aliases=op.aliases.with_own(own)), fn).read()


def result_names(signature: Signature | None) -> tuple[str, ...]:
    """What a backward may be given of the results: `grad_output` and `output`; numbered, where there are several or
    their number is not known."""
    count = signature.returns if signature else None
    single = ("grad_output", "output") if count in (None, 1) else ()
    numbered = () if count == 1 else range(count if count is not None else MAX_RESULTS)
    return (*single, *(f"{name}_{i}" for i in numbered for name in ("grad_output", "output")))


def _has_forge_key(node: Node) -> bool:
    forges = set(KEYS) - set(EXECUTORCH_KEYS)
    return isinstance(node, MappingNode) and any(name in forges for name, _, _ in node.items)


def _condition(key: str, text: str) -> Where:
    try:
        return parse_where(text)
    except NotAllowed as error:
        raise NotAllowed(key + str(error).removeprefix("where")) from None


class _Kernel:
    """Reads the fields of one kernel."""

    def __init__(self, reader: Reader, fields: Fields, op: Op, fn: Callable | None) -> None:
        self.reader = reader
        self.fields = fields
        self.op = op
        self.fn = fn
        self.signature = op.signature

    def read(self) -> KernelEntry:
        fields, reader = self.fields, self.reader
        kernel_name = self._kernel_name(fields.get("kernel_name"), "kernel_name")
        name = reader.text(fields.get("name"), "name") or kernel_name or getattr(self.fn, "__name__", "?")
        priority = reader.integer(fields.get("priority"), "priority")
        dtypes, orders, optional, returns = self._arg_meta()
        shape, optional_shapes = self._shape()
        args, out = self._call(fields, {}), self._out(fields)
        result = self._result_views(fields, self.signature.returns if self.signature else None, "operator's results")
        entry = KernelEntry(
            op=self.op.name,
            name=name,
            kernel_name=kernel_name,
            fn=self.fn,
            op_kind=self.op.kind,
            library=self.op.library,
            priority=self.op.priority if priority is None else priority,
            device=self._device(),
            dtypes=dtypes,
            orders=orders,
            optional=frozenset(optional | optional_shapes),
            returns=returns,
            shape=shape,
            where=self._conditions("where"),
            faster=self._conditions("faster"),
            grad=self._grad(shape, dtypes),
            tolerance=self._tolerance(),
            args=args,
            out=out,
            result=result,
            layout=self._layout(),
            mutates=self._mutates(fields, ()),
            assumes=self._kernel_name(fields.get("assumes"), "assumes"),
            samples=self._kernel_name(fields.get("samples"), "samples"),
            keyed=self.op.executorch and bool(orders),
            mark=fields.mark,
        )
        self._check_names(entry)
        if entry.assumes is not None and entry.grad.kind == "kernel":
            text = "assumes goes with grad: none, composite or autograd; a backward kernel does not know what ran"
            self.problem(fields.mark_of("assumes"), text)
        return self._with_outs(entry)

    def _mutates(self, fields: Fields, others: Iterable[str]) -> tuple[str, ...]:
        """Tensor arguments, or of a backward `others` that it is called with."""
        found = []
        for node in self.reader.one_or_more(fields.get("mutates")):
            name = self.reader.text(node, "mutates")
            if name is not None and (name in others or self._known_argument(name, node.mark, "mutates")):
                found.append(name)
        return tuple(found)

    def problem(self, mark: Mark, text: str) -> None:
        self.reader.problems.add(mark, text)

    def _kernel_name(self, node: Node | None, what: str) -> str | None:
        return self.reader.matching(node, what, KERNEL_NAME, KERNEL_NAME_FORMS)

    # arguments

    def _known_argument(self, name: str, mark: Mark, what: str, *, tensor: bool = True) -> bool:
        """Whether the operator has this argument (and it may be a tensor); reported when not."""
        if self.signature is None:
            return True
        parameter = self.signature.by_name.get(name)
        if parameter is not None and (parameter.may_be_tensor or not tensor):
            return True
        names = self.signature.tensors if tensor else tuple(self.signature.by_name)
        kind = "a tensor argument" if parameter is not None else "an argument"
        listed = f"{'tensor ' if tensor else ''}arguments: {', '.join(names) or 'none'}"
        near = did_you_mean(name, names)
        self.problem(mark, f"{what} names {name!r}, not {kind} of {self.op.name}; {listed}{near}")
        return False

    def _arg_meta(self) -> tuple[dict[str, DtypeAlias], dict[str, OrderAlias], set[str], dict[int, DtypeAlias]]:
        dtypes: dict[str, DtypeAlias] = {}
        orders: dict[str, OrderAlias] = {}
        optional: set[str] = set()
        returns: dict[int, DtypeAlias] = {}
        node = self.fields.get("arg_meta")
        for name, mark, item in self.reader.pairs(
            node, "arg_meta", "null or a mapping from arguments to [dtype, order]"
        ):
            meta = read_meta(self.reader, name, item, self.op.aliases)
            result = _RESULT.fullmatch(name)
            if result is not None:
                self._result(int(result[1]), mark, name)
                if meta.dtype is not None:
                    returns[int(result[1])] = meta.dtype
                continue
            self._known_argument(name, mark, "arg_meta")
            if meta.dtype is not None:
                dtypes[name] = meta.dtype
            if meta.order is not None:
                orders[name] = meta.order
            if meta.optional or (self.op.executorch and self._may_be_none(name)):
                optional.add(name)
        return dtypes, orders, optional, returns

    def _may_be_none(self, name: str) -> bool:
        parameter = self.signature.by_name.get(name) if self.signature else None
        return parameter is not None and parameter.optional

    def _result(self, position: int, mark: Mark, name: str) -> None:
        count = self.signature.returns if self.signature else None
        if count is not None and position >= count:
            self.problem(mark, f"arg_meta names {name!r}, but {self.op.name} has {count} results")

    def _shape(self) -> tuple[dict[str, ShapePattern], set[str]]:
        patterns: dict[str, ShapePattern] = {}
        optional: set[str] = set()
        for name, mark, node in self.reader.pairs(
            self.fields.get("shape"), "shape", 'a mapping from arguments to patterns such as "[..., H]"'
        ):
            self._known_argument(name, mark, "shape")
            pattern, may_be_none = self._pattern(node, name)
            if pattern is not None:
                patterns[name] = pattern
            if may_be_none:
                optional.add(name)
        return patterns, optional

    def _pattern(self, node: Node, name: str) -> tuple[ShapePattern | None, bool]:
        try:
            if isinstance(node, ListNode) and all(isinstance(item, ScalarNode) for item in node.items):
                return self._no_clash(make_shape([str(constant(item)) for item in node.items]), node.mark), False
            text = self.reader.text(node, f"shape of {name}")
            if text is None:
                return None, False
            return self._no_clash(parse_shape(text.strip().removesuffix("?")), node.mark), text.strip().endswith("?")
        except NotAPattern as error:
            self.problem(node.mark, str(error))
            return None, False

    def _no_clash(self, pattern: ShapePattern, mark: Mark) -> ShapePattern:
        """A dim may not have an argument's name: a where expression could mean either."""
        for name in pattern.names:
            if self.signature is not None and name in self.signature.by_name:
                self.problem(mark, f"shape {pattern}: the dim {name!r} has the name of an argument; rename the dim")
        return pattern

    def _conditions(self, key: str) -> tuple[Where, ...]:
        found = []
        for node in self.reader.one_or_more(self.fields.get(key)):
            text = self.reader.text(node, key)
            if text is not None:
                found.append(self.reader.converted(node, partial(_condition, key), text, NotAllowed))
        return tuple(condition for condition in found if condition is not None)

    def _check_names(self, entry: KernelEntry) -> None:
        """That conditions speak of arguments and dims that there are."""
        if self.signature is None:
            return
        dims = {name for pattern in entry.shape.values() for name in pattern.names}
        values = {p.name for p in self.signature.parameters if p.kind in ("other", "any", "tensors")} | dims
        tensors = {p.name for p in self.signature.parameters if p.kind == "tensor"}
        broken = "shape" in self.fields.by_name and len(entry.shape) < len(
            getattr(self.fields.get("shape"), "items", ())
        )
        if broken:  # the dims of a pattern that could not be read are not known
            return
        nodes = [node for key in ("where", "faster") for node in self.reader.one_or_more(self.fields.get(key))]
        marks = {constant(node): node.mark for node in nodes if isinstance(node, ScalarNode)}
        for key, conditions in (("where", entry.where), ("faster", entry.faster)):
            for condition in conditions:
                written = (at for text, at in marks.items() if str(text).strip() == condition.text)
                mark = next(written, self.fields.mark)
                for text in condition.misused(values, tensors):
                    self.problem(mark, key + text.removeprefix("where"))

    # where it runs

    def _device(self) -> Device | None:
        node = self.fields.get("device")
        if node is None:
            return None
        if not isinstance(node, MappingNode):
            types = self._device_types(node)
            return Device(types) if types else None
        fields = self.reader.fields(node, "device", ("type", "capability"), required=("type",))
        types = self._device_types(fields.get("type"))
        capability = fields.get("capability")
        if capability is None:
            return Device(types) if types else None
        if types and types != ("cuda",) and set(types) <= set(_DEVICES):
            self.problem(capability.mark, f"capability is of cuda devices, but the device type is {', '.join(types)}")
        limits = self._capability(capability)
        return Device(types, limits, str(constant(capability))) if types and limits else None

    def _device_types(self, node: Node | None) -> tuple[str, ...]:
        types = self.reader.texts(node, "device type")
        for item in self.reader.one_or_more(node):
            name = constant(item)
            if isinstance(name, str) and name not in _DEVICES:
                near = did_you_mean(name, _DEVICES) or f"; known: {', '.join(_DEVICES)}"
                self.problem(item.mark, f"unknown device type {name!r}{near}")
        return types

    def _capability(self, node: Node) -> tuple[tuple[str, tuple[int, int]], ...]:
        text = self.reader.text(node, "capability")
        if text is None:
            return ()
        matches = [_CAPABILITY.fullmatch(part.strip()) for part in text.split(",")]
        if None in matches:
            self.reader.no(node, "capability", "a version range such as '>=8.0' or '>=8.0,<10'")
            return ()
        return tuple((match[1], (int(match[2]), int(match[3] or 0))) for match in matches)

    # how it is called

    def _call(self, fields: Fields, extra: Iterable[str]) -> tuple[Given, ...] | None:
        """`args`: a mapping from the kernel's parameters, or a list by position."""
        node = fields.get("args")
        if node is None:
            return None
        if isinstance(node, ListNode):
            return tuple(Given(None, self._given(item, extra)) for item in node.items)
        wanted = "a mapping from the kernel's parameters to arguments, or a list"
        return tuple(
            Given(self._parameter(name, mark), self._given(item, extra))
            for name, mark, item in self.reader.pairs(node, "args", wanted)
        )

    def _parameter(self, name: str, mark: Mark) -> str:
        if not NAME.fullmatch(name):
            self.problem(mark, f"args names {name!r}, which is no parameter's name")
        return name

    def _given(self, node: Node, extra: Iterable[str]) -> Argument | Constant:
        """An argument's name, a number, or {constant: …} for text."""
        if isinstance(node, MappingNode):
            fields = self.reader.fields(node, "args", ("constant",), required=("constant",))
            value = fields.get("constant")
            return Constant(None if value is None else constant(value))
        if not (isinstance(node, ScalarNode) and isinstance(node.value, str)):
            return Constant(constant(node))
        return self._view(node, (*(self.signature.by_name if self.signature else ()), *extra))

    def _view(self, node: ScalarNode, known: Iterable[str]) -> Argument:
        """One of the known names, or a view of it."""
        is_name = NAME.fullmatch(node.value) or "." not in node.value
        view = Argument(node.value) if is_name else self.reader.converted(node, parse_view, node.value, NotAView)
        if view is None:
            return Argument(node.value)
        names = view.names if isinstance(view, Viewed) else ()
        for name in (view.name, *names) if self.signature is not None else ():
            if name not in known:
                near = did_you_mean(name, known) or f"; arguments: {', '.join(known)}"
                text = f"; a text is written {{constant: {node.value}}}" if is_name else ""
                self.problem(node.mark, f"args gives {name!r}, not an argument of {self.op.name}{near}{text}")
        if isinstance(view, Viewed) and view.index is not None:
            self.problem(node.mark, f"args gives {node.value!r}, but a list is given whole")
        return view

    def _result_views(self, fields: Fields, count: int | None, what: str) -> tuple[Argument, ...]:
        """`result`: where, in what the kernel returns, the operator's results or gradients are."""
        found = []
        known = (RESULT, *(self.signature.by_name if self.signature else ()))
        for node in self.reader.one_or_more(fields.get("result")):
            text = self.reader.text(node, "result")
            view = None if text is None else self.reader.converted(node, parse_view, text, NotAView)
            if view is None:
                continue
            if view.name != RESULT:
                self.problem(node.mark, f"result is {text!r}, but must begin with {RESULT}, what the kernel returns")
            unknown = [name for name in getattr(view, "names", ()) if name not in known]
            if unknown and self.signature is not None:
                near = did_you_mean(unknown[0], known) or f"; arguments: {', '.join(known[1:])}"
                self.problem(node.mark, f"result speaks of {unknown[0]!r}, not an argument of {self.op.name}{near}")
            found.append(view)
        mark = fields.mark_of("result")
        if found and count is not None and len(found) != count:
            self.problem(mark, f"result has {len(found)} entries, but must have {count}, for the {what}")
        if found and fields.get("out") is not None:
            self.problem(mark, "result goes with what a kernel returns, out with what it writes; one of them is meant")
        return tuple(found)

    def _out(self, fields: Fields) -> tuple[str | int, ...]:
        found: list[str | int] = []
        for node in self.reader.one_or_more(fields.get("out")):
            value = constant(node)
            position = type(value) is int and 0 <= value < 64
            if position or (isinstance(value, str) and NAME.fullmatch(value)):
                found.append(value)
            else:
                self.reader.no(node, "out", "the name or the position of the kernel's out parameter")
        if len(set(found)) < len(found):
            self.problem(fields.mark_of("out"), f"out names a parameter twice: {', '.join(map(str, found))}")
        return tuple(found)

    def _with_outs(self, entry: KernelEntry) -> KernelEntry:
        """The entry with the out parameters of an out-variant, and all its arguments accounted for."""
        if self.signature is None:
            return entry
        outs = [p.name for p in self.signature.parameters if p.out]
        out, args = entry.out, entry.args
        if outs and not out:
            named = [given for given in args or () if isinstance(given.value, Argument) and given.value.name in outs]
            out = tuple(given.parameter for given in named if given.parameter) if args is not None else tuple(outs)
            args = tuple(given for given in args if given not in named) if args is not None else None
            if len(out) < min(len(outs), self.signature.returns or 1):
                self.problem(self.fields.mark_of("args"), f"args does not say where {', '.join(outs)} goes; use out:")
        returns = self.signature.returns
        if entry.out and returns is not None and len(entry.out) != returns:
            self.problem(
                self.fields.mark_of("out"),
                f"out names {len(entry.out)} parameters, but {self.op.name} has {returns} results",
            )
        if out and entry.grad.kind == "autograd":
            text = "grad: autograd is of kernels that return their result; one that writes to out has no graph"
            self.problem(self.fields.mark_of("grad"), text)
        self._check_left_out(entry)
        return dataclasses.replace(entry, out=out, args=args)

    def _check_left_out(self, entry: KernelEntry) -> None:
        """An argument that the kernel never sees must have a default, or a condition."""
        if entry.args is None:
            return
        used = {given.value.name for given in entry.args if isinstance(given.value, Argument)}
        if not used <= self.signature.by_name.keys():  # a misspelt one, which was reported
            return
        used |= {name for condition in entry.where for name in condition.names}
        for parameter in self.signature.parameters:
            if (
                parameter.default is REQUIRED
                and not parameter.out
                and not parameter.rest
                and parameter.name not in used
            ):
                self.problem(
                    self.fields.mark_of("args"),
                    f"args leaves out {parameter.name!r}, which has no default: "
                    "pass it, or say in where what it must be",
                )

    def _layout(self) -> dict[str, Layout]:
        orders = dict(self._by_argument("layout", self._order))
        aligns = dict(self._by_argument("align", self._align))
        return {name: Layout(orders.get(name), aligns.get(name)) for name in dict.fromkeys((*orders, *aligns))}

    def _by_argument(self, key: str, read: Callable[[Node], Any]) -> Iterator[tuple[str, Any]]:
        """A value for every tensor argument, or a mapping by argument."""
        node = self.fields.get(key)
        if node is None:
            return
        if not isinstance(node, MappingNode):
            value = read(node)
            names = self.signature.tensors if self.signature else ()
            if value is not None:
                yield from ((name, value) for name in names if not self.signature.by_name[name].out)
            return
        for name, mark, item in node.items:
            value = read(item)
            if self._known_argument(name, mark, key) and value is not None:
                yield name, value

    def _order(self, node: Node) -> Any:
        value = constant(node)
        if isinstance(value, str) and value in ORDERS:
            return ORDERS[value]
        near = did_you_mean(value, ORDERS) if isinstance(value, str) else ""
        self.problem(node.mark, f"layout is {shown(node)}, but must be {' or '.join(ORDERS)}{near}")
        return None

    def _align(self, node: Node) -> int | None:
        value = constant(node)
        if type(value) is int and 1 <= value <= 4096 and value & (value - 1) == 0:
            return value
        self.reader.no(node, "align", "a power of two of at most 4096, in bytes")
        return None

    # gradients and tolerances

    def _grad(self, shapes: Mapping[str, ShapePattern], dtypes: Dtypes) -> Grad:
        node = self.fields.get("grad")
        if node is None:
            return Grad()
        if isinstance(node, MappingNode):
            return self._backward(node, shapes, dtypes)
        value = constant(node)
        if value in GRADS:
            if value == "composite" and self.op.kind == "func" and not self.op.has_reference:
                self.problem(
                    node.mark, f"grad: composite derives from a reference, but {self.op.name} has none; add reference:"
                )
            return Grad(value)
        if not isinstance(value, str):
            self.reader.no(node, "grad", "none, composite, autograd, or the name of a backward kernel")
            return Grad()
        near = did_you_mean(value, GRADS)
        if near:
            self.problem(node.mark, f"unknown grad {value!r}{near}")
            return Grad()
        return Grad("kernel", self._kernel_name(node, "grad"), returns=self._tensors())

    def _backward(self, node: MappingNode, shapes: Mapping[str, ShapePattern], dtypes: Dtypes) -> Grad:
        known = ("kernel_name", "args", "out", "result", "returns", "forward", "saves", "mutates")
        fields = self.reader.fields(node, "grad", known, required=("kernel_name",))
        returns = []
        for item in self.reader.one_or_more(fields.get("returns")):
            name = self.reader.text(item, "returns")
            if name is not None and self._known_argument(name, item.mark, "returns"):
                returns.append(name)
        saves = self._saves(fields, shapes, dtypes)
        given = tuple(returns) if fields.get("returns") is not None else self._tensors()
        forward = fields.get("forward")
        if saves and self.fields.get("result") is not None:
            text = "a kernel that saves returns its results and then what is saved: result does not go with saves"
            self.problem(self.fields.mark_of("result"), text)
        if forward is not None and fields.get("saves") is None:
            self.problem(forward.mark, "grad has a forward, but saves nothing; say in saves what it returns beyond")
        return Grad(
            "kernel",
            self._kernel_name(fields.get("kernel_name"), "grad's kernel_name"),
            self._call(fields, (*result_names(self.signature), *saves)),
            self._out(fields),
            given,
            self._kernel_name(forward, "grad's forward"),
            saves,
            self._mutates(fields, (*result_names(self.signature), *saves)),
            self._result_views(
                fields, len(given) if self.signature else None, f"gradients that it returns: {', '.join(given)}"
            ),
        )

    def _tensors(self) -> tuple[str, ...]:
        """The arguments that a backward gives gradients of where it does not say."""
        names = self.signature.tensors if self.signature else ()
        return tuple(name for name in names if not self.signature.by_name[name].out)

    def _saves(self, fields: Fields, shapes: Mapping[str, ShapePattern], dtypes: Dtypes) -> dict[str, Saved]:
        found = {}
        wanted = 'a mapping from names to [dtype, shape], such as {rstd: [float32, "[...]"]}'
        taken = (*(self.signature.by_name if self.signature else ()), *result_names(self.signature))
        for name, mark, node in self.reader.pairs(fields.get("saves"), "saves", wanted):
            items = node.items if isinstance(node, ListNode) else ()
            if not NAME.fullmatch(name) or name in taken:
                self.problem(mark, f"saves names {name!r}, which {'is taken' if name in taken else 'is no name'}")
            elif len(items) != 2:
                self.reader.no(node, f"saves of {name}", '[dtype, shape], such as [float32, "[..., H]"]')
            else:
                dtype = self._saved_dtype(items[0], name, dtypes)
                shape = self._saved_shape(items[1], name, shapes)
                if dtype is not None and shape is not None:
                    found[name] = Saved(dtype, shape)
        return found

    def _saved_dtype(self, node: Node, name: str, dtypes: Dtypes) -> DtypeAlias | None:
        alias, _ = read_dtype_or_alias(self.reader, f"saves of {name}", node, self.op.aliases)
        if alias is None or len(alias.dtypes) == 1 or any(alias.name == each.name for each in dtypes.values()):
            return alias
        self.problem(node.mark, f"saves of {name}: no argument has the type alias {alias.name}, which allows several")
        return None

    def _saved_shape(self, node: Node, name: str, shapes: Mapping[str, ShapePattern]) -> ShapePattern | None:
        pattern, _ = self._pattern(node, name)
        if pattern is None:
            return None
        dims = {dim for each in shapes.values() for dim in each.names}
        unknown = [dim for dim in pattern.names if dim not in dims]
        if pattern.rest is not None and all(each.rest is None for each in shapes.values()):
            unknown.append("...")
        unknown += ["_"] if any(dim.any for dim in (*pattern.first, *(pattern.rest or ()))) else []
        if unknown:
            self.problem(
                node.mark,
                f"saves of {name}: the shape of no argument says what {', '.join(unknown)} is; "
                f"known: {', '.join(sorted(dims)) or 'none'}",
            )
        return None if unknown else pattern

    def _tolerance(self) -> dict[torch.dtype, tuple[float, float]]:
        found = {}
        wanted = "a mapping from dtypes to [rtol, atol]"
        for name, mark, node in self.reader.pairs(self.fields.get("tolerance"), "tolerance", wanted):
            dtype = read_dtype(self.reader, ScalarNode(mark, name), "tolerance")
            items = node.items if isinstance(node, ListNode) else ()
            if len(items) != 2:
                self.reader.no(node, f"tolerance of {name}", "[rtol, atol]")
                continue
            limits = tuple(self.reader.number(item, f"tolerance of {name}") for item in items)
            if dtype is not None and None not in limits:
                found[dtype] = limits
        return found
