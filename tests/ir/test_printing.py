"""Printing: every kind of literal round-trips, a printed trace runs, and the text is readable."""

import gc
import math
import operator
from typing import Any

import pytest
import torch

import forge
from forge import prims, torchlang
from forge.api.functional import Direct
from forge.executors import OperatorExecutor, claim, resolve_executors
from forge.ir import BoundSymbol, NumberProxy, Symbol, TensorProxy, Trace
from forge.ir.printing import Writer, printed_object, qualified_name, symbolic_expression

CPU = torch.device("cpu")
LITERALS = [
    0,
    -1,
    True,
    None,
    "it's",
    b"bytes",
    1.5,
    -0.0,
    1e-300,
    math.inf,
    -math.inf,
    2 + 3j,
    complex(math.inf, -0.0),
    Ellipsis,
    slice(1, None, 2),
    slice(None, -1),
    (1,),
    (),
    [],
    (1, [2, (3,)], {"key": slice(0, 1)}),
    torch.float32,
    torch.bool,
    torch.device("cpu"),
    torch.device("cuda", 1),
    torch.strided,
    torch.channels_last,
    torch.preserve_format,
]


def evaluated(writer: Writer, value: Any) -> Any:
    text = writer.value(value)
    return eval(text, {"forge": forge, **writer.globals})


@pytest.mark.parametrize("flat", [True, False], ids=["runs", "shown"])
@pytest.mark.parametrize("value", LITERALS, ids=repr)
def test_a_literal_comes_back(value: Any, flat: bool) -> None:
    back = evaluated(Writer(flat=flat), value)
    assert type(back) is type(value) and back == value
    assert repr(back) == repr(value)  # -0.0 is not 0.0


@pytest.mark.parametrize("flat", [True, False], ids=["runs", "shown"])
def test_nan_comes_back(flat: bool) -> None:
    back = evaluated(Writer(flat=flat), math.nan)
    assert isinstance(back, float) and math.isnan(back)


def test_functions_are_found_where_torch_has_them() -> None:
    assert qualified_name(torch.exp) == "torch.exp"
    assert qualified_name(torch.Tensor.add_) == "torch.Tensor.add_"
    assert qualified_name(torch.nn.functional.silu) == "torch.nn.functional.silu"
    assert qualified_name(torch._C._nn.gelu) == "torch.nn.functional.gelu"
    assert qualified_name(torch.ops.aten.add.Tensor) == "torch.ops.aten.add.Tensor"
    assert qualified_name(operator.add) == "operator.add"
    assert qualified_name(lambda: None) is None


def test_an_object_without_a_literal_is_held_while_its_trace_lives() -> None:
    marker = object()
    trace = Trace()
    x = trace.add_input(TensorProxy("x", (2,), torch.float32, CPU))
    trace.output = x
    trace.bound_symbols.append(BoundSymbol(prims.neg, (x, marker), {}, None))
    text = str(trace)
    assert str(trace) == text  # it has the same number each time
    number = int(text.split("printed_object(")[1].split(")")[0])
    assert printed_object(number) is marker
    del trace
    gc.collect()
    with pytest.raises(KeyError, match="of a printed trace is gone"):
        printed_object(number)


def test_a_function_without_a_global_name_is_told_with_its_place() -> None:
    def scale(x: Any) -> Any:
        return x * 2

    mine = OperatorExecutor("mine")
    mine.register_implementation(torch.tanh, scale)
    jitted = forge.jit(lambda x: torch.tanh(x) + 1, executors=[mine, "torch"], cache=False)
    jitted(torch.ones(2))
    (line,) = [line for line in str(forge.last_traces(jitted)[-1]).splitlines() if "printed_object(" in line]
    assert line.endswith(f"  # {__name__}:{scale.__qualname__}")


def test_a_tensor_constant_is_part_of_the_printed_trace() -> None:
    constant = torch.arange(3.0)
    trace = Trace()
    x = trace.add_input(TensorProxy("x", (3,), torch.float32, CPU))
    from forge.ir import recording

    with recording(trace, torchlang.language):
        trace.output = x + trace.add_constant(constant)
    claimed, _ = claim(trace, resolve_executors(["torch"]))
    scope: dict[str, Any] = {}
    exec(str(claimed), scope)
    assert torch.equal(scope["computation"](torch.ones(3)), constant + 1)
    assert torch.equal(claimed.python_callable()(torch.ones(3)), constant + 1)


class Shapes:
    """A source of symbolic lengths as Dynamo makes them."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()

    def length(self, hint: int, name: str) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource

        return self.env.create_symintnode(self.env.create_symbol(hint, ConstantSource(name)), hint=hint)


def test_a_symbolic_number_is_an_expression_over_its_symbols() -> None:
    shapes = Shapes()
    a, b = shapes.length(5, "a"), shapes.length(7, "b")
    names = {str(a.node.expr): 5, str(b.node.expr): 7}
    scope = {"math": math, "torch": torch} | names
    for number, value in ((a, 5), (a * 2 + b, 17), (a // 2, 2), (b % 4, 3), (torch.sym_max(a, b), 7), (a - b, -2)):
        assert eval(symbolic_expression(number), scope) == value
        assert eval(Writer(flat=True).value([number, (number,)]), scope) == [value, (value,)]


def test_a_trace_over_symbolic_lengths_runs_for_other_lengths() -> None:
    a = Shapes().length(5, "a")
    trace = Trace()
    trace.add_input(NumberProxy(str(a.node.expr), a))
    trace.names.add(str(a.node.expr))
    trace.output = (a * 2, [a])
    scope: dict[str, Any] = {}
    exec(str(trace), scope)
    assert scope["computation"](5) == (10, [5])
    assert trace.python_callable()(6) == (12, [6])


def test_a_symbolic_operand_of_an_infix_operator_stands_in_parentheses() -> None:
    """x / 4*s0 would divide by 4 alone."""
    a = Shapes().length(5, "a")
    symbol = Symbol("div", "test.div", meta=lambda x, y: x, op=torch.div)
    x = TensorProxy("x", (), torch.float32, torch.device("cpu"))
    out = TensorProxy("out", (), torch.float32, torch.device("cpu"))
    assert Writer(flat=True).call(BoundSymbol(symbol, (x, a * 4), {}, out)) == f"out = x / (4*{a.node.expr})"


def _operator(output: Any, function: Any) -> BoundSymbol:
    symbol = Symbol("make", "test.make", meta=lambda *args: output, op=function)
    return BoundSymbol(symbol, (), {}, output)


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "runs"])
def test_nested_and_partly_unused_outputs_are_unpacked(shown: bool) -> None:
    trace = Trace()
    a, b, c = (trace.tensor((), torch.float32, CPU) for _ in range(3))
    trace.bound_symbols.append(_operator((a, None, [b, (c,)], ()), lambda: (1, None, [2, (3,)], ())))
    trace.output = {"first": a, "rest": [b, c]}
    scope: dict[str, Any] = {}
    if shown:
        exec(str(trace), scope)
    function = scope["computation"] if shown else trace.python_callable()
    assert function() == {"first": 1, "rest": [2, 3]}


def test_one_output_in_a_tuple_is_unpacked() -> None:
    trace = Trace()
    a = trace.tensor((), torch.float32, CPU)
    trace.bound_symbols.append(_operator((a,), lambda: (1,)))
    trace.output = (a,)
    assert trace.python_callable()() == (1,)


def test_a_boxed_trace_empties_its_list() -> None:
    trace = Trace()
    x = trace.add_input(TensorProxy("x", (2,), torch.float32, CPU))
    trace.boxed, trace.output = True, (x,)
    boxed = [torch.ones(2)]
    (result,) = trace.python_callable()(boxed)
    assert boxed == [] and torch.equal(result, torch.ones(2))
    assert "boxed.clear()" in str(trace)


def test_an_unclaimed_trace_does_not_compile() -> None:
    trace = forge.trace(torch.exp, torch.ones(2))
    with pytest.raises(AssertionError, match=r"torch\.exp was not claimed"):
        trace.python_callable()


def test_the_text_names_metadata_sources_and_decompositions() -> None:
    inputs = torch.ones(2, 3), torch.ones(3, 4)
    _, compiled = Direct(lambda x, w: torch.exp2(x @ w), ["torch"]).compile(inputs, {})
    recorded, final = compiled.traces[0], compiled.traces[-1]
    assert str(recorded).splitlines()[0] == "# computation, recorded: 2 calls"
    assert "def computation(x, w):  # x: f32[2, 3] cpu, w: f32[3, 4] cpu" in str(recorded)
    assert "    t0 = x @ w  # f32[2, 4]" in str(final)
    assert "= torch.exp2(t0)" in str(final)
    assert "#   " not in str(recorded)
    deep = recorded.show(3)
    assert "    #   t1 = clang.exp2(t0)" in deep and "    #     t1 = prims.exp2(t0)" in deep


def test_names_that_the_text_uses_itself_are_not_given_to_values() -> None:
    trace = Trace()
    assert trace.fresh_name("torch") != "torch" and trace.fresh_name("lambda") != "lambda"
    inputs = torch.ones(2), torch.full((2,), 3.0)
    _, compiled = Direct(lambda torch, float: torch * math.inf + float, ["torch"]).compile(inputs, {})
    scope: dict[str, Any] = {}
    exec(str(compiled.traces[-1]), scope)
    assert torch.equal(scope["computation"](*inputs), inputs[0] * math.inf + inputs[1])


def test_what_generated_code_refers_to_is_not_hidden_by_a_users_name() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        call_relu, object, operator = x + 1, x * 2, x[0]
        return torch.relu(call_relu) + object[1] + operator

    x = torch.tensor([-3.0, 4.0])
    jitted = forge.jit(function)
    assert torch.equal(jitted(x), function(x))
    scope: dict[str, Any] = {}
    exec(str(forge.last_traces(jitted)[-1]), scope)
    assert torch.equal(scope["computation"](x)[0], function(x))


def test_infix_operators_and_methods_read_as_in_python() -> None:
    _, compiled = Direct(lambda x, y: (x + y * 2, x.transpose(0, 1)), ["torch"]).compile(
        (torch.ones(2, 2), torch.ones(2, 2)), {}
    )
    text = str(compiled.traces[-1])
    assert "y * 2" in text and "x + t" in text
