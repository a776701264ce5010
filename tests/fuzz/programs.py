"""Random programs as source text: steps over a pool of tensors that run in eager as they are added."""

import itertools
import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.operations import Slot, operations

LARGEST = 1e3  # the bound of values: the squares of larger ones overflow float16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SHAPES = (
    ("B", "L"), ("B", "L", 4), ("L",), ("B", 3), (4, 4), (), ("L", "B"), (3, "L", 1), ("B", 1), (2, 3, "L"), (4,),
    ("B", 2, "L", 4), (1, "L"), (3, 4),
)  # fmt: skip
SIZES = ((2, 3), (5, 3), (2, 7), (4, 6), (1, 3), (3, 1), (3, 3), (2, 8), (6, 16))


@dataclass(frozen=True)
class Input:
    """An argument of a program; B and L in `source` are lengths that change between calls."""

    name: str
    source: str
    requires_grad: bool


@dataclass(frozen=True)
class Line:
    """A line of a program. target: the variable that it binds, "" for a write. writes: the variable it changes."""

    source: str
    target: str = ""
    writes: str = ""


@dataclass(frozen=True)
class Program:
    """A program f(inputs) that is called once with each of the lengths; its caller runs `after` before the backward.

    used: the results that are in the loss.
    """

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    used: tuple[int, ...]
    after: tuple[str, ...] = ()

    def source(self) -> str:
        """Return the source of f."""
        return self.function([line.source for line in self.lines])

    def is_dead(self, place: int) -> bool:
        """Return whether the variable that this line binds or changes affects no result, input or other line."""
        dead = self.lines[place].target or self.lines[place].writes
        if not dead or dead in self.results or any(dead == each.name for each in self.inputs):
            return False
        after = range(place + 1, len(self.lines))
        return all(self.is_dead(i) for i in after if re.search(rf"\b{dead}\b", self.lines[i].source))

    def function(self, lines: list[str]) -> str:
        """Return the source of f with the given lines as its body."""
        names = ", ".join(each.name for each in self.inputs)
        body = [*itertools.chain(*(line.split("\n") for line in lines)), f"return [{', '.join(self.results)}]"]
        return "\n".join([f"def f({names}):", *(f"    {line}" for line in body)]) + "\n"

    def maker(self) -> str:
        """Return the source of a function that makes the inputs for lengths B and L."""
        lines = ["def make(B, L):", "    torch.manual_seed(0)"]
        for each in self.inputs:
            lines.append(
                f"    {each.name} = {f'({each.source}).requires_grad_()' if each.requires_grad else each.source}"
            )
        return "\n".join([*lines, f"    return [{', '.join(each.name for each in self.inputs)}]"]) + "\n"

    def calls(self) -> str:
        """Return the source of a function that calls f and its backward, like the comparison."""
        names = ", ".join(each.name for each in self.inputs)
        lines = ["def call(f, inputs):", f"    {names}{',' if len(self.inputs) == 1 else ''} = inputs"]
        lines += ["    out = f(*inputs)"]
        for each in self.after:
            lines += [f"    {line}" for line in each.split("\n")]
        lines += [f"    used = [out[i] for i in {list(self.used)} if out[i].requires_grad]"]
        lines += ["    if used:"]
        lines += ["        sum((v * torch.cos(torch.arange(v.numel()).view(v.shape))).sum() for v in used).backward()"]
        return "\n".join([*lines, "    return [*out, *inputs, *(x.grad for x in inputs)]"]) + "\n"

    def script(self) -> str:
        """Return a program in plain torch that shows the difference."""
        return "\n".join(
            [
                "import torch\n\nimport forge\n\n",
                self.source() + "\n",
                self.maker() + "\n",
                self.calls() + "\n",
                "jitted = forge.jit(f)",
                f"for sizes in {list(self.sizes)}:",
                "    expected = actual = None",
                "    try:",
                "        expected = call(f, make(*sizes))",
                "    except Exception as error:",
                "        print(sizes, 'eager raises', repr(error)[:200])",
                "    try:",
                "        actual = call(jitted, make(*sizes))",
                "    except Exception as error:",
                "        print(sizes, 'forge raises', repr(error)[:1000])",
                "    for i, (a, e) in enumerate(zip(actual or [], expected or [])):",
                "        if a is not None and e is not None and a.shape == e.shape:",
                "            far = (a.detach().double() - e.detach().double()).abs()",
                "            print(sizes, i, a.dtype, e.dtype, a.stride(), e.stride(), far.sum().item())",
                "        else:",
                "            print(sizes, i, a, e)",
                "",
            ]
        )


# views and writes: templates of v (a tensor of the pool), w (another one), i and j (dims), n (a small number)

VIEWS = (
    "{v}.transpose({i}, {j})", "{v}.unsqueeze({i})", "{v}[1:]", "{v}[..., ::2]", "{v}.t()", "{v}.squeeze({i})",
    "{v}.view(-1)", "{v}.reshape(-1)", "{v}.flatten()", "{v}[0]", "{v}.select({i}, -1)", "{v}.detach()",
    "{v}.diagonal()", "{v}.narrow({i}, 0, 1)", "{v}.expand(2, *{v}.shape)", "{v}.unfold({i}, 2, 1)",
    "{v}.chunk(2, {i})[0]", "{v}.split(2, {i})[-1]", "{v}.unbind({i})[0]", "{v}.view_as({v})",
    "{v}.movedim({i}, {j})", "{v}.flip({i})", "{v}.contiguous()", "{v}.view({v}.shape[0], -1)", "{v}.expand_as({v})",
    "{v}.squeeze()", "{v}[:, None]", "{v}.as_strided((2,), (1,))", "{v}.clone()", "{v}.unflatten(-1, (2, -1))",
    "{v}[:-1]", "{v}.repeat(2, *[1] * {v}.ndim)", "{v}[..., -1]", "{v}.reshape({v}.numel())",
)  # fmt: skip
# none through v.data: a gradient reads the values before the write, eager's those after it
WRITES = (
    "{v}.mul_(2)", "{v}.add_({w})", "{v}.copy_({w})", "{v}.zero_()", "{v}.fill_({n})", "{v}.clamp_(-1, 1)",
    "{v}.masked_fill_({w}, {n})", "{v}[0] = {w}", "{v}[..., 0] = {n}", "{v}[1:] = {w}", "{v}[{w}] = {n}",
    "{v}.sub_({w})", "{v}.mul_({w})", "{v}.neg_()", "{v} += {w}", "{v}[..., ::2] *= 2", "{v}.copy_({v}.flip(0))",
    "{v}.t_()", "{v}.unsqueeze_(0)", "{v}.index_fill_({i}, torch.tensor([0]), {n})", "{v}.relu_()", "{v}.tanh_()",
    "{v}[{v} > 0] = {n}", "{v}[:, 0].add_(1)", "{v}.transpose({i}, {j}).mul_(0.5)", "{v}.diagonal().zero_()",
    "{v}.detach().mul_({n})", "torch.sin({w}, out={v})",
)  # fmt: skip
# the ops that programs are most often made of; the OpInfos' operations come in addition
COMMON = (
    "{v} + {w}", "{v} * {w}", "{v} - {w}", "{v} @ {w}", "torch.where({v} > 0, {v}, {w})",
    "torch.cat([{v}, {v}], {i})", "torch.stack([{v}, {w}])", "{v}.sum({i})", "{v}.mean({i}, keepdim=True)",
    "{v}.amax({i})", "{v}.sum()", "{v}.softmax({i})", "{v}.to(torch.bfloat16)", "{v}.to(torch.float16)",
    "{v}.to(torch.float32)", "{v} * {v}.shape[0]", "{v} / {v}.numel()", "{v}.clamp(-9, 9).to(torch.int64)",
    "{v} > {w}", "{v} == {w}", "{v}.to(torch.bool)", "{v}.cumsum({i})", "{v} * {n}", "torch.arange({v}.shape[0])",
    "torch.zeros_like({v})", "torch.full_like({v}, {n})", "{v}.new_ones({v}.shape[0], 2)",
    "torch.outer({v}.flatten()[:3], {w}.flatten()[:2])", "{v}.argmax({i})", "{v}.max({i})[0]", "{v}.any({i})",
    "{v}[{w}]", "{v}.var({i})", "{v}.prod({i})", "torch.ones({v}.shape[-1], {v}.shape[0])", "torch.tril({v})",
    "{v}.roll(1, {i})", "torch.nn.functional.pad({v}, (1, 1))", "{v}.gather({i}, {w})",
    "{v}.scatter_add({i}, {w}, {v})", "{v}.sigmoid()", "torch.nn.functional.layer_norm({v}, {v}.shape[-1:])",
    "torch.nn.functional.one_hot({v})", "torch.bmm({v}, {w})", "{v}.masked_fill({w}, {n})",
    "{v}.index_select({i}, {w})", "{v}.norm()", "{v}.relu()", "{v}.exp()", "{v}.sum(({i}, {j}))",
    "torch.einsum('...i,...i->...', {v}, {w})", "torch.maximum({v}, {w})", "{v}.to({w}.dtype)", "-{v}", "{v}.abs()",
    "torch.nn.functional.gelu({v})", "{v}.pow(2)", "{v}.float()",
    # counting indices, and those within bounds
    "{v}[torch.arange({v}.shape[0])]", "{v}[:, torch.arange(0, {v}.shape[1], 2)]", "{v}[torch.arange(1, {w}.shape[0])]",
    "{v}.index_select({i}, torch.arange({v}.shape[{i}]) + {n})", "{v}[torch.arange({v}.shape[0])[:, None] // 2]",
    "torch.nn.functional.embedding(torch.arange({v}.shape[0]).expand(2, -1), {v})", "{v}.gather({i}, {v}.argsort({i}))",
    "{v}[{w}.clamp(0, {v}.shape[0] - 1).long().reshape(-1)]", "{v}[({w}.long() % {v}.shape[0]).reshape(-1)]",
    "{v}.gather({i}, {w}.long().clamp(0, 1))", "{v}[{v}.argmax(0).reshape(-1)]",
    "{v}.take_along_dim({v}.sort({i})[1], {i})",
    # products before and after regions
    "torch.tanh({v} @ {w}) * {n}", "({v} @ {w}).relu() + ({v} @ {w}).mT", "({v} @ {v}.mT).softmax({i}) @ {v}",
)  # fmt: skip
AFTER = (
    "out[{k}].mul_(2)", "with torch.no_grad():\n    out[{k}].zero_()", "with torch.no_grad():\n    {x}.add_(1)",
    "out[{k}].detach().add_(1)", "out[{k}].add_(out[{l}])", "with torch.no_grad():\n    out[{k}].copy_(out[{l}])",
    "out[{k}].view(-1)[:1].neg_()",
)  # fmt: skip


@dataclass
class Builder:
    """A program that grows by one line at a time, run in eager with the first lengths; a line that raises is left
    out."""

    sizes: tuple[int, int]
    inputs: list[Input] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    pool: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_input(self, source: str, *, requires_grad: bool) -> str:
        name = f"x{len(self.inputs)}"
        value = _evaluate(source, {"torch": torch, "B": self.sizes[0], "L": self.sizes[1]})
        requires_grad = requires_grad and value.is_floating_point()
        self.inputs.append(Input(name, source, requires_grad))
        self.pool[name] = value.requires_grad_(requires_grad)
        return name

    def bind(self, source: str, *, no_grad: bool) -> None:
        """Add `vN = source`; results that have too many values, or are complex or too large, are rejected."""
        try:
            with torch.set_grad_enabled(not no_grad):
                value = _evaluate(source, {"torch": torch, **self.pool})
        except Exception:
            return
        if not _is_suitable(value):
            return
        name = f"v{len(self.lines)}"
        self.pool[name] = value
        line = f"{name} = {source}"
        self.lines.append(Line(f"with torch.no_grad():\n    {line}" if no_grad else line, target=name))

    def write(self, source: str, target: str, *, no_grad: bool) -> None:
        """Add a statement that changes `target`; its base and other views change with it."""
        before = {name: (value._version, value.detach().clone()) for name, value in self.pool.items()}
        scope = {"torch": torch, **self.pool}
        try:
            with torch.set_grad_enabled(not no_grad), warnings.catch_warnings():
                warnings.filterwarnings("error", message="An output with one or more elements was resized")
                exec(source, scope)
        except Exception:
            # a statement that raised may have written; then the builder's values are no longer the program's
            if any(value._version != before[name][0] for name, value in self.pool.items()):
                raise Unsuitable from None
            return
        if not all(_is_suitable(value) for value in self.pool.values()):
            raise Unsuitable
        self.pool = {name: scope[name] for name in self.pool}
        line = f"with torch.no_grad():\n    {source}" if no_grad else source
        self.lines.append(Line(line, writes=target))


class Unsuitable(Exception):
    """The error for a program whose values are too large, or that raised in the middle of a statement."""


def _evaluate(source: str, scope: dict[str, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(source, scope)


def _is_suitable(value: Any) -> bool:
    if (
        not isinstance(value, torch.Tensor)
        or value.dtype.is_complex
        or value.numel() > 4096
        or value.layout != torch.strided
    ):
        return False
    if value.dtype not in DTYPES:
        return False
    values = value.detach().double()
    return bool(values.isfinite().all()) and (value.numel() == 0 or values.abs().max().item() <= LARGEST)


def input_source(shape: tuple, dtype: torch.dtype, layout: int) -> str:
    """Return the source of a tensor: contiguous, transposed, every other element, or with an offset in its storage.

    It is not a view: for a leaf that is one, eager loses the gradient after a write to a view of it under no_grad.
    """
    lengths = list(shape)
    tail = ""
    if lengths and layout == 1:
        lengths.reverse()
        tail = f".permute({', '.join(map(str, reversed(range(len(lengths)))))}).detach()"
    elif lengths and layout == 2:
        lengths[-1] = f"2 * {lengths[-1]}"
        tail = "[..., ::2].detach()"
    elif lengths and layout == 3:
        lengths[0] = f"{lengths[0]} + 1"
        tail = "[1:].detach()"
    text = f"({', '.join(map(str, lengths))}{',' if len(lengths) == 1 else ''})"
    if dtype.is_floating_point:
        return f"torch.randn({text}).to({dtype}){tail}" if dtype != torch.float32 else f"torch.randn({text}){tail}"
    low, high = (0, 2) if dtype == torch.bool else (0, 3)
    return f"torch.randint({low}, {high}, {text}).to({dtype}){tail}"


Draws = tuple[int, int, int, int]


def build(inputs: list[Draws], steps: list[Draws], ends: list[Draws], sizes: list[int]) -> Program:
    """Return the program encoded by the numbers. Raises Unsuitable if there is none."""
    lengths = tuple(SIZES[each] for each in sizes)
    builder = Builder(lengths[0])
    for a, b, c, d in inputs:
        source = input_source(SHAPES[a % len(SHAPES)], DTYPES[b % len(DTYPES)], c % 4 if d % 3 == 0 else 0)
        builder.add_input(source, requires_grad=d % 4 != 1)
    for step in steps:
        _step(builder, step)
    names = list(builder.pool)
    results = list(dict.fromkeys(names[-1 - a % len(names)] for a, *_ in ends))
    used = tuple(i for i, (_, b, *_) in enumerate(ends[: len(results)]) if b % 4 != 1)
    after = [
        AFTER[d // 5 % len(AFTER)].format(k=c % len(results), l=b % len(results), x=f"x{b % len(builder.inputs)}")
        for _, b, c, d in ends
        if d % 5 == 1
    ]
    return Program(tuple(builder.inputs), tuple(builder.lines), tuple(results), lengths, used, tuple(after[:2]))


def _step(builder: Builder, step: Draws) -> None:
    kind, a, b, c = step
    names = list(builder.pool)
    v, w = names[-1 - b % len(names)], names[-1 - c % len(names)]
    dims = max(builder.pool[v].ndim, 1)
    values = {"v": v, "w": w, "i": c % dims, "j": (c // 3) % dims, "n": (0.5, 2, -1, 3)[c % 4]}
    no_grad = kind % 16 == 7
    if kind % 4 == 0:
        builder.bind(COMMON[a % len(COMMON)].format(**values), no_grad=no_grad)
    elif kind % 4 == 1:
        builder.bind(VIEWS[a % len(VIEWS)].format(**values), no_grad=no_grad)
    elif kind % 4 == 2:
        builder.write(WRITES[a % len(WRITES)].format(**values), v, no_grad=kind % 16 == 6)
    else:
        _operation(builder, a, b, c, no_grad=no_grad)


def _operation(builder: Builder, a: int, b: int, c: int, *, no_grad: bool) -> None:
    """Add a call of an OpInfo's operation; missing tensors become inputs."""
    call = operations()[a % len(operations())]
    count, filled = len(builder.inputs), []
    for position, slot in enumerate(call.slots):
        fitting = _fitting(builder, slot, by_shape=position > 0)
        if fitting and (position == 0 or (c + position) % 2):
            filled.append(fitting[(b + position) % len(fitting)])
        else:
            filled.append(builder.add_input(_slot_source(slot), requires_grad=(c + position) % 3 != 1))
    source, lines = call.source(filled), len(builder.lines)
    builder.bind(source, no_grad=no_grad)
    if len(builder.lines) == lines:
        builder.bind(f"{source}[{c % 2}]", no_grad=no_grad)
    if len(builder.lines) == lines:
        for each in builder.inputs[count:]:
            del builder.pool[each.name]
        del builder.inputs[count:]


def _fitting(builder: Builder, slot: Slot, *, by_shape: bool) -> list[str]:
    """Return the names of the tensors that may fill a slot: of its rank or shape, and in the domain."""
    if slot.values and by_shape:
        return []
    found = []
    for name, value in builder.pool.items():
        same = value.shape == slot.shape if by_shape else value.ndim == len(slot.shape)
        if (
            same
            and value.is_floating_point() == slot.dtype.is_floating_point
            and (slot.values == "" or value.dtype == slot.dtype)
        ):
            if value.numel() and not slot.values and math.isfinite(slot.low):
                narrow = slot.low > -2 or slot.high < 2
                if narrow and not _within(value, slot):
                    continue
            found.append(name)
    return found


def _within(value: torch.Tensor, slot: Slot) -> bool:
    try:
        return not (value.min().item() <= slot.low or value.max().item() >= slot.high)
    except RuntimeError:  # autograd refuses to read a view whose base was changed
        return False


def _slot_source(slot: Slot) -> str:
    shape = f"({', '.join(map(str, slot.shape))}{',' if len(slot.shape) == 1 else ''})"
    if slot.values:
        return slot.values
    return f"torch.rand({shape}) * {slot.high - slot.low} + {slot.low}"


@st.composite
def programs(draw: st.DrawFn) -> Program | None:
    """Draw a program of a few steps; None if it is not suitable."""
    number = st.integers(0, 1 << 14)
    draws = st.tuples(number, number, number, number)
    inputs = draw(st.lists(draws, min_size=1, max_size=3))
    steps = draw(st.lists(draws, min_size=1, max_size=12))
    ends = draw(st.lists(draws, min_size=1, max_size=4))
    sizes = draw(st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=3))
    try:
        return build(inputs, steps, ends, sizes)
    except Unsuitable:
        return None
