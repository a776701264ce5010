"""forge from scratch: a small forge in one file, with torch alone. `python docs/from_scratch.py` runs it.

It has the shape of the real one, in the order in which one understands it: programs (1), capture (2), meaning in terms
of primitives (3), transforms (4), gradients (5), executors (6), the bridge to torch's autograd (7). Most names are
those of the real one, and each part says where its grown-up form is. Left out: Dynamo (capture here calls the
function with stand-ins), changes in place, type promotion, symbolic shapes, calls with several outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

# 1. Programs (forge/ir) -----------------------------------------------------------------------------------------------
#
# A program is a list of calls: no branches, no loops, every value has a name. That is enough, because we watch one run
# of a Python function: by the time we see the calls, its branches were taken and its loops unrolled.
#
# A program calls *symbols*. A *prim* is a symbol with a `meta`: a function from the shapes of its inputs to the shape
# of its output. A *composite* is a symbol with a `body`: a function that calls other symbols. Once an executor took a
# call over (part 6), its symbol has an `op`: the Python function that really runs.


@dataclass(frozen=True)
class Symbol:
    """Something a program can call. Calling it records the call."""

    id: str
    meta: Callable | None = None
    body: Callable | None = None
    op: Callable | None = None

    def __call__(self, *args: Any) -> Any:
        if self.meta is not None:
            return record(BoundSymbol(self, args, self.meta(*args)))
        with collecting() as calls, set_language(clang):  # bodies are written in the core language (part 3)
            output = self.body(*args)
        return record(BoundSymbol(self, args, output, calls))


@dataclass(frozen=True)
class BoundSymbol:
    """One call: what is called, with what, giving what. `subsymbols` are the calls that a composite's body made: a call
    is there at every level at once, as `gelu(x)` and as the `erf` and `mul` that it consists of."""

    symbol: Symbol
    args: tuple
    output: Any
    subsymbols: Sequence["BoundSymbol"] = ()

    @property
    def inputs(self) -> list[str]:
        return [x.name for x in tensors(self.args)]


# While we watch, a *proxy* stands where a tensor will be: a name and a shape (every tensor here is float32; the real
# proxy has a dtype and a device too). torch's own protocol hands us every torch function that is called on it.


@dataclass(eq=False)
class TensorProxy:
    """Stands for a tensor."""

    name: str
    shape: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: None = None) -> Any:
        return torch_symbols[function](*args)

    def __getattr__(self, method: str) -> Callable:  # proxy.mean()
        return lambda *args: state.language[method](self, *args)

    def __add__(self, other: Any) -> "TensorProxy":
        return state.language["add"](self, other)

    def __sub__(self, other: Any) -> "TensorProxy":
        return state.language["sub"](self, other)

    def __mul__(self, other: Any) -> "TensorProxy":
        return state.language["mul"](self, other)


# The meaning of `a + b` depends on who writes it. A user means torch.add, which we want to see in the program as it was
# written; the body of a composite means the core language's addition. A *language* is a table from names to symbols,
# and one of them is current.

clang: dict[str, Symbol] = {}  # the core language
torchlang: dict[str, Symbol] = {}  # torch's
torch_symbols: dict[Callable, Symbol] = {}  # the symbol of each torch function
state = SimpleNamespace(calls=None, language=clang, rule=None, names=0)


@contextmanager
def set_language(language: dict[str, Symbol]) -> Iterator[None]:
    before, state.language = state.language, language
    yield
    state.language = before


@contextmanager
def collecting() -> Iterator[list[BoundSymbol]]:
    """Calls made inside are recorded in the list that it yields."""
    before, state.calls = state.calls, []
    yield state.calls
    state.calls = before


def record(bound: BoundSymbol) -> Any:
    state.calls.append(bound)
    return bound.output


def new_tensor(shape: Sequence[int]) -> TensorProxy:
    state.names += 1
    return TensorProxy(f"t{state.names}", tuple(shape))


def tensors(value: Any) -> list[TensorProxy]:
    """The proxies in a nest of tuples."""
    if isinstance(value, tuple):
        return [x for item in value for x in tensors(item)]
    return [value] if isinstance(value, TensorProxy) else []


# A *trace* is the whole program. Printed it is Python, and once every call is an executor's it is Python that runs.


@dataclass(frozen=True)
class Trace:
    """A program: inputs, calls, output."""

    name: str
    inputs: Sequence[TensorProxy]
    calls: Sequence[BoundSymbol]
    output: Any

    def __str__(self) -> str:
        lines = [f"def {self.name}({', '.join(x.name for x in self.inputs)}):"]
        for bound in self.calls:
            call = f"{bound.symbol.id}({', '.join(map(show, bound.args))})"
            lines.append(f"    {show(bound.output)} = {call}  # {list(bound.output.shape)}")
        return "\n".join([*lines, f"    return {show(self.output)}"])

    def python_callable(self) -> Callable:
        """The function that the text defines."""
        scope = {bound.symbol.id: bound.symbol.op for bound in self.calls}
        exec(str(self), scope)
        return scope[self.name]


def show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value))}{',' * (len(value) == 1)})"
    return value.name if isinstance(value, TensorProxy) else repr(value)


# 2. Capture (forge/capture)  ------------------------------------------------------------------------------------------
#
# Call the function with proxies and write down what it calls: that is all. The real forge.trace does this; the real
# forge.jit lets torch.compile's Dynamo read the bytecode instead, which sees modules, guards what it assumed and breaks
# the graph where it must. Both end at one door: a torch function applied to proxies.


def trace(function: Callable, *shapes: tuple[int, ...]) -> Trace:
    """The program that `function` runs on tensors of these shapes."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    inputs = [TensorProxy(name, shape) for name, shape in zip(names, shapes, strict=True)]
    with collecting() as calls, set_language(torchlang):
        output = function(*inputs)
    return Trace("computation", inputs, calls, output)


# 3. Meaning: torchlang -> clang -> prims (forge/torchlang, forge/clang, forge/prims) ----------------------------------
#
# Torch has two thousand functions. An algorithm that works on programs (a derivative, a fusion) must not need to know
# them all, so each is defined by a body in terms of fewer, down to the prims. A prim does one thing: the elementwise
# ones insist on equal shapes. Broadcasting is the business of *clang*, the language between.


def elementwise_meta(*operands: Any) -> TensorProxy:
    shapes = {x.shape for x in tensors(operands)}
    if len(shapes) != 1:
        raise ValueError(f"an elementwise prim got the shapes {sorted(shapes)}, but wants one; clang broadcasts")
    return new_tensor(shapes.pop())


_METAS = {
    **dict.fromkeys(("add", "mul", "exp", "erf"), elementwise_meta),
    **dict.fromkeys(("broadcast", "reshape"), lambda x, shape: new_tensor(shape)),
    "sum": lambda x, dims: new_tensor([1 if dim in dims else n for dim, n in enumerate(x.shape)]),
    "transpose": lambda x: new_tensor(x.shape[::-1]),
    "matmul": lambda a, b: new_tensor((a.shape[0], b.shape[1])),
}
prims = SimpleNamespace(**{name: Symbol(f"prims.{name}", meta=meta) for name, meta in _METAS.items()})


def same_shape(*operands: Any) -> list[Any]:
    """The operands with every tensor broadcast to one shape."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors(operands)))
    return [prims.broadcast(x, shape) if tensors(x) and x.shape != shape else x for x in operands]


clang["add"] = Symbol("clang.add", body=lambda a, b: prims.add(*same_shape(a, b)))
clang["mul"] = Symbol("clang.mul", body=lambda a, b: prims.mul(*same_shape(a, b)))


# *torchlang* says what torch's functions mean. One decorator takes every spelling of a function; the first one names
# the symbol, and is what runs the call when it is claimed whole (part 6). In a body, operators are clang's.


def torchsymbol(*functions: Callable) -> Callable[[Callable], Symbol]:
    def decorate(body: Callable) -> Symbol:
        name = functions[0].__name__
        symbol = torchlang[name] = Symbol(f"torch.{name}", body=body)
        torch_symbols.update(dict.fromkeys(functions, symbol))
        return symbol

    return decorate


torchsymbol(torch.add, torch.Tensor.add)(lambda input, other: input + other)
torchsymbol(torch.mul, torch.Tensor.mul)(lambda input, other: input * other)
torchsymbol(torch.sub, torch.Tensor.sub)(lambda input, other: input + other * -1.0)
torchsymbol(torch.exp, torch.Tensor.exp)(prims.exp)
gelu = torchsymbol(F.gelu)(lambda input: input * (prims.erf(input * 0.5**0.5) + 1.0) * 0.5)
linear = torchsymbol(F.linear)(lambda input, weight, bias: prims.matmul(input, prims.transpose(weight)) + bias)


@torchsymbol(torch.mean, torch.Tensor.mean)
def mean(input: TensorProxy) -> TensorProxy:
    total = prims.reshape(prims.sum(input, tuple(range(len(input.shape)))), ())
    return total * (1 / math.prod(input.shape))


# 4. Transforms (forge/transforms) -------------------------------------------------------------------------------------
#
# A transform is a function from traces to traces; it changes nothing, it makes new ones. Programs without branches make
# them short: dead code elimination is one walk backwards, common subexpression elimination one walk forwards.


def live_calls(calls: Sequence[BoundSymbol], needed: set[str]) -> list[BoundSymbol]:
    """The calls that the `needed` names depend on."""
    kept: list[BoundSymbol] = []
    for bound in reversed(calls):
        if bound.output.name in needed:
            kept.append(bound)
            needed = needed | set(bound.inputs)
    return kept[::-1]


def dce(trace: Trace) -> Trace:
    """The trace without calls whose results nobody reads."""
    return replace(trace, calls=live_calls(trace.calls, {x.name for x in tensors(trace.output)}))


def cse(trace: Trace) -> Trace:
    """The trace with each value computed once."""
    seen: dict[tuple, TensorProxy] = {}
    renamed: dict[str, TensorProxy] = {}
    calls = []
    for bound in trace.calls:
        bound = substitute(bound, renamed)
        first = seen.setdefault((bound.symbol.id, show(bound.args)), bound.output)
        if first is bound.output:
            calls.append(bound)
        else:
            renamed[bound.output.name] = first
    return replace(trace, calls=calls, output=rename(trace.output, renamed))


def rename(value: Any, names: dict[str, TensorProxy]) -> Any:
    if isinstance(value, tuple):
        return tuple(rename(item, names) for item in value)
    return names.get(value.name, value) if isinstance(value, TensorProxy) else value


def substitute(bound: BoundSymbol, names: dict[str, TensorProxy]) -> BoundSymbol:
    """The call with other values in place of those in `names`, inside it too."""
    inside = [substitute(sub, names) for sub in bound.subsymbols]
    return replace(bound, args=rename(bound.args, names), subsymbols=inside)


# 5. Gradients (forge/ir/grad_rules.py, forge/transforms/grad.py) ------------------------------------------------------
#
# A gradient rule is one function that runs the forward and interleaves the backward: `get_grad(out)` asks for the
# gradient of a value, which is not there yet (we get a stand-in), `put_grad(x, g)` gives one. Everything between the
# two is recorded. A rule of a composite is an optimization: without one, the rules of what its body calls do.

grad_rules: dict[str, Callable] = {}


def register_grad(symbol: Symbol) -> Callable[[Callable], Callable]:
    return lambda rule: grad_rules.setdefault(symbol.id, rule)


@dataclass
class RuleRun:
    """One run of a rule: the gradients it asked for and gave, and the calls between, which belong to the backward."""

    active: set[str]  # the values through which gradients flow
    gets: list[tuple[TensorProxy, TensorProxy]] = field(default_factory=list)
    puts: list[tuple[TensorProxy, TensorProxy]] = field(default_factory=list)
    calls: list[BoundSymbol] = field(default_factory=list)


def get_grad(output: TensorProxy) -> TensorProxy:
    state.rule.gets.append((output, new_tensor(output.shape)))
    return state.rule.gets[-1][1]


def put_grad(argument: Any, gradient: TensorProxy) -> None:
    if isinstance(argument, TensorProxy) and argument.name in state.rule.active:
        state.rule.puts.append((argument, gradient))


@register_grad(prims.add)
def add_grad(a: Any, b: Any) -> TensorProxy:
    out = prims.add(a, b)
    g = get_grad(out)
    put_grad(a, g)
    put_grad(b, g)
    return out


@register_grad(prims.mul)
def mul_grad(a: Any, b: Any) -> TensorProxy:
    out = prims.mul(a, b)
    g = get_grad(out)
    put_grad(a, g * b)
    put_grad(b, g * a)
    return out


@register_grad(prims.exp)
def exp_grad(x: TensorProxy) -> TensorProxy:
    out = prims.exp(x)
    put_grad(x, get_grad(out) * out)
    return out


@register_grad(prims.erf)
def erf_grad(x: TensorProxy) -> TensorProxy:
    out = prims.erf(x)
    put_grad(x, get_grad(out) * prims.exp(x * x * -1.0) * (2 / math.sqrt(math.pi)))
    return out


@register_grad(prims.broadcast)
def broadcast_grad(x: TensorProxy, shape: tuple) -> TensorProxy:
    out = prims.broadcast(x, shape)
    put_grad(x, get_grad(out))  # the backward sums it to x's shape
    return out


@register_grad(prims.reshape)
def reshape_grad(x: TensorProxy, shape: tuple) -> TensorProxy:
    out = prims.reshape(x, shape)
    put_grad(x, prims.reshape(get_grad(out), x.shape))
    return out


@register_grad(prims.sum)
def sum_grad(x: TensorProxy, dims: tuple) -> TensorProxy:
    out = prims.sum(x, dims)
    put_grad(x, prims.broadcast(get_grad(out), x.shape))
    return out


@register_grad(linear)  # of a composite: it keeps F.linear one call, and saves its operands as they are
def linear_grad(input: TensorProxy, weight: TensorProxy, bias: TensorProxy) -> TensorProxy:
    out = linear(input, weight, bias)
    g = get_grad(out)
    put_grad(bias, g)
    put_grad(input, prims.matmul(g, weight))
    put_grad(weight, prims.matmul(prims.transpose(g), input))
    return out


# The transform runs the rules in order, which gives the forward and a list of RuleRuns; then it strings the second
# halves together in reverse order, each stand-in replaced by the gradient that has arrived by then. That is all of
# reverse-mode differentiation. `executor_rule` lets an executor bring a rule of its own (part 6).


def differentiate(bound: BoundSymbol, active: set[str], runs: list[RuleRun], executor_rule: Callable) -> list:
    """The forward calls that stand for `bound`, whose output keeps its name."""
    if active.isdisjoint(bound.inputs):
        return [bound]
    rule = executor_rule(bound) or grad_rules.get(bound.symbol.id)
    if rule is None:
        if not bound.subsymbols:
            raise NotImplementedError(f"{bound.symbol.id} has no gradient rule")
        inside = [call for sub in bound.subsymbols for call in differentiate(sub, active, runs, executor_rule)]
        return [replace(bound, subsymbols=inside)]
    state.rule = RuleRun(active)
    with collecting() as calls, set_language(clang):
        output = rule(*bound.args)
    output.name = bound.output.name
    forward = live_calls(calls, {output.name})
    state.rule.calls = [call for call in calls if call not in forward]
    runs.append(state.rule)
    active.add(output.name)
    return forward


def backward(runs: list[RuleRun], output: TensorProxy, wanted: Sequence[TensorProxy | None]) -> Trace:
    """From the gradient of `output` to the gradients of `wanted`."""
    seed = TensorProxy("g", output.shape)
    gradients = {output.name: seed}
    with collecting() as calls, set_language(clang):
        for run in reversed(runs):
            arrived = {stand_in.name: gradients.get(out.name) for out, stand_in in run.gets}
            if None in arrived.values():
                continue  # nothing that is wanted depends on it
            for call in run.calls:
                record(substitute(call, arrived))
            for argument, gradient in run.puts:
                gradient = fit(arrived.get(gradient.name, gradient), argument.shape)
                known = gradients.get(argument.name)
                gradients[argument.name] = gradient if known is None else known + gradient
    return Trace("backward", [seed], calls, tuple(x and gradients.get(x.name) for x in wanted))


def fit(gradient: TensorProxy, shape: tuple[int, ...]) -> TensorProxy:
    """The gradient summed over what broadcasting expanded."""
    extra = len(gradient.shape) - len(shape)
    dims = tuple(dim for dim, n in enumerate(gradient.shape) if dim < extra or shape[dim - extra] != n)
    return prims.reshape(prims.sum(gradient, dims), shape) if dims else gradient


# The forward saves the values that the backward reads, and nothing else. A composite stays one call in the forward
# unless the backward reads a value from inside it; then its calls take its place.


def split(forward: Trace, backward: Trace) -> tuple[Trace, Trace]:
    """A forward that returns (output, what the backward reads), and a backward that is given it."""
    made = {bound.output.name for bound in backward.calls} | {x.name for x in backward.inputs}
    read = [x for bound in backward.calls for x in tensors(bound.args)]
    saved = {x.name: x for x in read if x.name not in made}
    calls = unfold(forward.calls, set(saved))
    saves = dce(Trace("forward", forward.inputs, calls, (forward.output, tuple(saved.values()))))
    return saves, replace(backward, inputs=[*saved.values(), *backward.inputs])


def unfold(calls: Sequence[BoundSymbol], needed: set[str]) -> list[BoundSymbol]:
    flat: list[BoundSymbol] = []
    for bound in calls:
        inside = unfold(bound.subsymbols, needed)
        shows = any(call.output.name in needed - {bound.output.name} for call in inside)
        flat += inside if shows else [bound]
    return flat


# 6. Executors (forge/executors) ---------------------------------------------------------------------------------------
#
# Who runs a call? An executor is a table from symbols to functions. Executors are asked in order, and for every call at
# the highest level first: whoever has a whole `gelu` gets it, and only if nobody does are its parts offered. A checker
# looks at the arguments and accepts (None) or declines with a reason.


def accept(*args: Any) -> None:
    """The checker that always says yes."""


class Executor:
    """A table from symbols to implementations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.table: dict[str, SimpleNamespace] = {}

    def register(
        self, symbol: Symbol, op: Callable, checker: Callable | None = None, grad: Callable | None = None
    ) -> None:
        op = Symbol(f"{self.name}_{symbol.id.rpartition('.')[2]}", op=op)
        self.table[symbol.id] = SimpleNamespace(op=op, checker=checker or accept, grad_transform=grad)


def choose(bound: BoundSymbol, executors: Sequence[Executor]) -> tuple[SimpleNamespace | None, list[str]]:
    """The first implementation that accepts the call, and why those before it did not."""
    reasons = []
    for executor in executors:
        found = executor.table.get(bound.symbol.id)
        reason = found.checker(*bound.args) if found else "does not have it"
        if reason is None:
            return found, reasons
        reasons.append(f"{executor.name}: {reason}")
    return None, reasons


def claim(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """The trace with every call an executor's."""
    return replace(trace, calls=[call for bound in trace.calls for call in claimed(bound, executors)])


def claimed(bound: BoundSymbol, executors: Sequence[Executor]) -> list[BoundSymbol]:
    if bound.symbol.op is not None:
        return [bound]  # an executor's gradient rule called its operator
    chosen, reasons = choose(bound, executors)
    if chosen is not None:
        return [replace(bound, symbol=chosen.op, subsymbols=(bound,))]
    if not bound.subsymbols:
        raise NotImplementedError(f"no executor claims {bound.symbol.id}: {reasons}")
    return [call for sub in bound.subsymbols for call in claimed(sub, executors)]


# The torch executor runs torchlang's symbols by the functions they stand for, so that eager's own kernels are used, and
# prims (in which gradients end) by a table. For gelu's gradient torch has a kernel, so it brings a rule: it saves x
# alone, where the rules of the decomposition would save two more.

torchex = Executor("torch")
for _function, _symbol in reversed(torch_symbols.items()):
    torchex.register(_symbol, _function)
for _name in ("add", "mul", "exp", "erf", "reshape", "matmul"):
    torchex.register(getattr(prims, _name), getattr(torch, _name))
torchex.register(prims.broadcast, torch.broadcast_to)
torchex.register(prims.transpose, torch.t)
torchex.register(prims.sum, lambda x, dims: torch.sum(x, dims, keepdim=True))

gelu_backward = Symbol("torch_gelu_backward", meta=elementwise_meta, op=torch.ops.aten.gelu_backward)


def gelu_grad(input: TensorProxy) -> TensorProxy:
    out = gelu(input)
    put_grad(input, gelu_backward(get_grad(out), input))
    return out


torchex.register(gelu, F.gelu, grad=gelu_grad)

# 7. The bridge (forge/api/jit.py, forge/compiler/pipeline.py, forge/runtime/autograd.py) --------------
#
# All together: trace, transform, differentiate, split, claim, compile. In training the two functions become one
# torch.autograd.Function, so that torch's autograd, optimizers and hooks see an ordinary differentiable call.


def jit(function: Callable, executors: Sequence[Executor] = (torchex,)) -> Callable:
    """`function`, compiled for each new set of shapes. `.traces` are the stages of the last compilation."""
    compiled: dict[tuple, Callable] = {}

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        key = tuple((tuple(x.shape), torch.is_grad_enabled() and x.requires_grad) for x in inputs)
        if key not in compiled:
            compiled[key], run.traces = compile_program(function, key, executors)
        return compiled[key](*inputs)

    return run


def compile_program(function: Callable, key: tuple, executors: Sequence[Executor]) -> tuple[Callable, list[Trace]]:
    recorded = trace(function, *(shape for shape, _ in key))
    program = cse(dce(recorded))
    wanted = [x if requires_grad else None for x, (_, requires_grad) in zip(program.inputs, key, strict=True)]
    if not any(wanted):
        runs = claim(program, executors)
        return runs.python_callable(), [recorded, program, runs]
    forward, back = differentiated(program, wanted, executors)
    runs, runs_back = claim(forward, executors), claim(back, executors)
    region = bridge(runs.python_callable(), runs_back.python_callable())
    return region, [recorded, program, forward, back, runs, runs_back]


def differentiated(program: Trace, wanted: Sequence, executors: Sequence[Executor]) -> tuple[Trace, Trace]:
    def executor_rule(bound: BoundSymbol) -> Callable | None:
        chosen, _ = choose(bound, executors)
        return chosen and chosen.grad_transform

    active = {x.name for x in wanted if x is not None}
    runs: list[RuleRun] = []
    calls = [call for bound in program.calls for call in differentiate(bound, active, runs, executor_rule)]
    back = dce(cse(backward(runs, program.output, wanted)))
    return split(replace(program, calls=calls), back)


def bridge(run_forward: Callable, run_backward: Callable) -> Callable:
    """One differentiable call. Without `once_differentiable` a second derivative would be silently wrong."""

    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            output, saved = run_forward(*inputs)
            ctx.save_for_backward(*saved)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
            return run_backward(*ctx.saved_tensors, gradient)

    return Region.apply


# 8. In use ------------------------------------------------------------------------------------------------------------


def loss(x, w1, b1, w2, b2, target):
    """A network of two layers, with one computation too many and one twice."""
    y = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    torch.exp(y)
    return ((y - target) * (y - target)).mean()


def main() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 8), torch.randn(4, 2)
    weights = [torch.randn(shape, requires_grad=True) for shape in ((16, 8), (16,), (2, 16), (2,))]
    jitted = jit(loss)
    actual, expected = jitted(x, *weights, target), loss(x, *weights, target)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, weights), torch.autograd.grad(expected, weights))
    for stage in jitted.traces:
        print(stage, end="\n\n")
    recorded, simplified, forward, _, runs, _ = jitted.traces
    assert len(simplified.calls) == len(recorded.calls) - 2, "exp is dead, and y - target is computed once"
    assert len(forward.output[1]) == 5, "the backward reads y - target, gelu's input and output, w2, and x"
    assert "torch_gelu(" in str(runs), "gelu is claimed whole"

    with torch.no_grad():
        torch.testing.assert_close(jitted(x, *weights, target), expected)
    assert len(jitted.traces) == 3, "without gradients there is one function"

    # an executor of one's own: it takes gelu where the last dim is even, and torch the rest
    shapes = []
    mine = Executor("mine")
    mine.register(gelu, lambda x: shapes.append(x.shape) or F.gelu(x), lambda x: "odd" if x.shape[-1] % 2 else None)
    jitted = jit(lambda x: F.gelu(x), executors=(mine, torchex))
    for x in (torch.randn(3, 4), torch.randn(3, 5)):
        torch.testing.assert_close(jitted(x), F.gelu(x))
    assert shapes == [(3, 4)]


if __name__ == "__main__":
    main()
