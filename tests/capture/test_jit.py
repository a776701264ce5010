"""The options, errors and reports of forge.jit; opaque calls; graphs that run in eager."""

import inspect
import random
import traceback
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge
from forge import torchlang
from forge.executors import OperatorExecutor
from forge.executors.executor import Executor
from forge.ir import Trace
from tests.unknown_operator import rounded


def test_unknown_option_names_the_near_one():
    with pytest.raises(TypeError, match="unknown option 'executer'; did you mean 'executors'"):
        forge.jit(lambda x: x, executer=["torch"])


FLAGS = {"cache": "/tmp/mine", "freeze": 1, "strict": "no"}


@pytest.mark.parametrize(("name", "given"), [*FLAGS.items(), ("fullgraph", "x")])
def test_what_is_on_or_off_is_a_bool(name, given):
    for more in ({}, {"check": "eager"}):
        with pytest.raises(TypeError, match=f"^forge.jit: {name} is {given!r}, but must be True or False$"):
            forge.jit(lambda x: x, **{name: given}, **more)


def test_cuda_graphs_are_on_off_or_automatic():
    with pytest.raises(TypeError, match=r"^forge.jit: cuda_graphs is 'yes', but must be True, False or 'auto'$"):
        forge.jit(lambda x: x, cuda_graphs="yes")
    with pytest.raises(TypeError, match=r"^forge.jit: cuda_graphs is 1, but must be"):
        forge.jit(lambda x: x, cuda_graphs=1)
    forge.jit(lambda x: x, cuda_graphs="".join(["au", "to"]))


def test_dynamic_is_a_bool_or_none():
    with pytest.raises(TypeError, match=r"^forge.jit: dynamic is 'yes', but must be True, False or None$"):
        forge.jit(dynamic="yes")


@pytest.mark.parametrize(("name", "given"), FLAGS.items())
def test_what_is_on_or_off_is_a_bool_for_torch_compile(name, given):
    compiled = torch.compile(lambda x: x * 2, backend="forge", options={name: given})
    with pytest.raises(Exception, match=f"TypeError: forge.jit: {name} is {given!r}, but must be True or False"):
        compiled(torch.ones(2))


def test_a_copy_is_jitted_with_every_option():
    again, _ = forge.jit(nn.Linear(2, 2)).__reduce_ex__(2)
    options = [each for each in inspect.signature(forge.jit).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert list(again.keywords) == [each.name for each in options]


def test_unknown_executor_names_the_near_one():
    with pytest.raises(ValueError, match="unknown executor 'trch'; did you mean 'torch'"):
        forge.jit(lambda x: x, executors=["trch"])


def test_executors_must_be_a_list():
    with pytest.raises(TypeError, match="executors is 'torch', but must be a list"):
        forge.jit(lambda x: x, executors="torch")


def test_a_target_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="3 is not a function or a module"):
        forge.jit(3)


def test_jit_is_a_decorator_with_and_without_options():
    @forge.jit
    def plain(x):
        return x + 1

    @forge.jit(strict=True)
    def strict(x):
        return x + 2

    assert plain(torch.zeros(1)).item() == 1 and strict(torch.zeros(1)).item() == 2
    assert plain.__name__ == "plain"


def test_an_executor_object_comes_first():
    mine = OperatorExecutor("mine")
    from forge import torchlang

    seen = []

    def my_tanh(input):
        seen.append(input.shape)
        return torch.tanh(input)

    mine.register_implementation(torchlang.find(torch.tanh), my_tanh)
    jitted = forge.jit(lambda x: torch.tanh(x) + 1, executors=[mine, "torch"])
    jitted(torch.ones(3))
    assert seen == [torch.Size([3])]
    assert [row.executor for row in forge.explain(jitted).rows] == ["mine", "torch"]


def test_a_users_transform_runs_before_claiming():
    def sin_to_cos(trace: Trace) -> Trace:
        sin, cos = torchlang.find(torch.sin), torchlang.find(torch.cos)
        calls = [
            bound.replace(symbol=cos, subsymbols=()) if bound.symbol is sin else bound for bound in trace.bound_symbols
        ]
        return trace.derive("sin to cos", calls)

    jitted = forge.jit(lambda x: torch.sin(x), transforms=[sin_to_cos])
    x = torch.ones(3)
    torch.testing.assert_close(jitted(x), torch.cos(x))
    assert "sin to cos" in [trace.stage for trace in forge.last_traces(jitted)]


@pytest.mark.parametrize("executors", [["torch"], ["torch-prims"], ["inductor", "torch"]])
def test_a_call_whose_symbol_a_transform_changed_is_the_new_one_for_every_executor(executors):
    def gelu_to_relu(trace: Trace) -> Trace:
        gelu, relu = torchlang.find(torch.nn.functional.gelu), torchlang.find(torch.relu)
        calls = [bound.replace(symbol=relu) if bound.symbol is gelu else bound for bound in trace.bound_symbols]
        return trace.derive("gelu to relu", calls)

    x = torch.randn(64, 64, requires_grad=True)
    jitted = forge.jit(lambda x: torch.nn.functional.gelu(x) * 2, transforms=[gelu_to_relu], executors=executors)
    out = jitted(x)
    torch.testing.assert_close(out, torch.relu(x) * 2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, (x > 0) * 2.0)


def test_a_call_that_a_transform_gave_other_arguments_consists_of_these():
    def doubled(trace: Trace) -> Trace:
        calls = [
            bound.replace(args=(bound.args[0], 4)) if bound.symbol is torchlang.find(torch.mul) else bound
            for bound in trace.bound_symbols
        ]
        return trace.derive("doubled", calls)

    jitted = forge.jit(lambda x: x * 2, transforms=[doubled], executors=["torch-prims"])
    torch.testing.assert_close(jitted(torch.ones(3)), torch.full((3,), 4.0))


def test_a_transform_whose_call_gives_something_else_is_named():
    def summed(trace: Trace) -> Trace:
        calls = [bound.replace(symbol=torchlang.find(torch.sum)) for bound in trace.bound_symbols]
        return trace.derive("summed", calls)

    told = r"transform summed: the call .*torch.sum.* gives f32\[\], and its output says f32\[3\]"
    with pytest.raises(ValueError, match=told):
        forge.jit(lambda x: torch.relu(x), transforms=[summed])(torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": abs}, "transforms is <built-in function abs>, but must be a list of functions"),
        ({"transforms": [3]}, "a transform is 3, but must be a function"),
        ({"executors": "torch"}, r"executors is 'torch', but must be a list of names or executors: \['torch'\]"),
        ({"executors": [Executor("mine")]}, "must be a name, an OperatorExecutor or a FusionExecutor"),
        ({"kernels": "org/name@v1"}, "^forge.jit: kernels is 'org/name@v1', but must be a list"),
        ({"allow_imports": "einops"}, "allow_imports is 'einops', but must be a list"),
    ],
)
def test_one_thing_where_a_list_is_wanted_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        forge.jit(lambda x: x, **options)


def test_what_nobody_claims_says_what_to_add():
    mine = OperatorExecutor("mine")
    with pytest.raises(Exception, match=r'no executor claims prims.permute.*; add "torch" to executors'):
        forge.jit(lambda x: x.permute(1, 0), executors=[mine])(torch.ones(2, 3))


class Unfit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 5), torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.down(self.up(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_shapes_that_do_not_fit_raise_torchs_error_with_the_users_line_and_no_log(fullgraph, capfd):
    with pytest.raises(RuntimeError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        forge.jit(Unfit(), fullgraph=fullgraph)(torch.ones(2, 4))
    told = "".join(traceback.format_exception(caught.value))
    assert "return self.down(self.up(x))" in told
    assert any(shapes in told for shapes in ("[2, 5] X [6, 2]", "2x5 and 6x2"))
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""


def test_a_transform_that_returns_no_trace_is_named():
    with pytest.raises(Exception, match="returned NoneType, but must return a Trace"):
        forge.jit(lambda x: x + 1, transforms=[lambda trace: None])(torch.ones(1))


def test_an_opaque_call_runs_forward_and_backward_and_is_reported():
    def f(x):
        return (rounded(x * 2) * x).sum()

    x = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
    jitted = forge.jit(f)
    jitted(x).backward()
    expected = torch.autograd.grad(f(x), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert forge.explain(jitted).opaque_calls == ["torch.ops.forge_test.rounded.default"]


def test_an_opaque_call_runs_its_forward_once_and_keeps_its_graph():
    calls = []

    @torch.library.custom_op("forge_test::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x / 2

    halve.register_fake(lambda x: torch.empty_like(x))
    halve.register_autograd(lambda ctx, g: g / 2)
    x = torch.ones(3, requires_grad=True)
    y = forge.jit(lambda x: halve(x) * 3)(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))


def test_an_opaque_mutation_is_seen():
    @torch.library.custom_op("forge_test::bump", mutates_args=("x",))
    def bump(x: torch.Tensor) -> None:
        x.add_(1)

    def f(x):
        y = x * 2
        bump(y)
        return y + 0

    torch.testing.assert_close(forge.jit(f)(torch.ones(3)), torch.full((3,), 3.0))


@pytest.fixture
def overloads():
    """Define torch.ops.forge_overloads.f with overloads for a tensor, a tensor and a number, and one that writes to its
    argument."""

    def scale(x, s, negate=False):
        return x * (-s if negate else s)

    with torch.library._scoped_library("forge_overloads", "DEF") as library:
        for schema, function in {
            "f(Tensor x) -> Tensor": lambda x: x * 2,
            "f.scale(Tensor x, float s, *, bool negate=False) -> Tensor": scale,
            "f.into(Tensor(a!) x, Tensor y) -> ()": lambda x, y: x.add_(y).numel() and None,
        }.items():
            library.define(schema)
            name = schema.partition("(")[0]
            library.impl(name, function, "CompositeExplicitAutograd")
            fake = (lambda x, y: None) if "into" in name else lambda x, *args, **kwargs: torch.empty_like(x)
            torch.library.register_fake(f"forge_overloads::{name}", fake, lib=library)
        yield torch.ops.forge_overloads.f


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_of_several_overloads_is_of_the_one_that_torch_chooses(overloads, dynamic):
    def f(x, s):
        y = x + 0
        overloads(y, x)  # writes to y
        return overloads(y), overloads(x, s), overloads(x, x.shape[0], negate=True), overloads.scale(y, 2.0)

    jitted = forge.jit(f, dynamic=dynamic)
    x = torch.randn(3)
    torch.testing.assert_close(jitted(x, 3.0), f(x, 3.0))
    names = {"scale": 3, "default": 1, "into": 1}
    told = " ".join(row.operation for row in forge.explain(jitted).rows)
    assert {name: told.count(f"forge_overloads.f.{name}") for name in names} == names


def test_a_kernel_takes_the_overload_that_it_implements(overloads):
    jitted = forge.jit(
        lambda x: overloads(x) + overloads(x, 3.0),
        kernels=[forge.kernel("forge_overloads::f.scale", lambda x, s, negate: x * s, name="scaled", grad="none")],
    )
    x = torch.randn(3)
    torch.testing.assert_close(jitted(x), x * 5)
    assert forge.explain(jitted).executors["scaled"] == 1


@torch.library.custom_op("forge_jit::own", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return x * 2


own.register_fake(torch.empty_like)


def test_strict_says_of_a_users_own_operator_how_to_tell_forge_of_it():
    with pytest.raises(
        forge.StrictError, match=r"does not have .*forge_jit\.own.*; say .*docs/how-to/custom-operators\.md"
    ) as raised:
        forge.jit(lambda x: own(x), strict=True)(torch.ones(2))
    assert "@torchsymbol" not in str(raised.value)


def test_where_there_is_nothing_to_jit_or_nobody_to_run_it_jit_says_so():
    with pytest.raises(TypeError, match=r"forge\.jit: None is not a function or a module"):
        forge.jit(None)
    with pytest.raises(ValueError, match=r'executors is empty; executors=\["torch"\] runs all by torch alone'):
        forge.jit(torch.sin, executors=[])
    with pytest.raises(ValueError, match="executors is empty"):
        forge.jit(executors=[])(torch.sin)
    x = torch.ones(2)
    torch.testing.assert_close(forge.jit()(torch.sin)(x), x.sin())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"backend": "inductor"}, "'backend' is an option of torch.compile; executors="),
        ({"options": {}}, "'options' is an option of torch.compile; they are arguments"),
        ({"disable": True}, "'disable' is an option of torch.compile"),
        ({"fullgrph": True}, "unknown option 'fullgrph'; did you mean 'fullgraph'"),
    ],
)
def test_an_option_of_torch_compile_is_told_by_its_name_here(option, told):
    with pytest.raises(TypeError, match=f"forge.jit: {told}"):
        forge.jit(torch.sin, **option)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [("kernels", "forge.use_kernels gives"), ("layers", "forge.use_kernels"), ("dynamic", "give it to torch.compile")],
)
def test_an_option_that_the_backend_does_not_take_is_told_with_the_remedy(option, remedy):
    compiled = torch.compile(torch.sin, backend="forge", options={option: []})
    with pytest.raises(Exception, match=f"forge: '{option}' is an option of forge.jit; {remedy}"):
        compiled(torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [forge.last_traces, forge.last_backward_traces, forge.refold, forge.finish_compiling, forge.bisect],
)
def test_what_forge_jit_did_not_make_is_refused_in_the_name_of_the_function(function):
    with pytest.raises(TypeError, match=rf"forge\.{function.__name__}: 3 was not made by forge.jit"):
        function(3)
    with pytest.raises(TypeError, match=r"forge\.repro: 3 was not made by forge.jit"):
        forge.repro(3, "repro.py")


def test_strict_refuses_an_opaque_call_by_name():
    def quantized(x):
        return torch._fake_quantize_learnable_per_tensor_affine(x, torch.ones(1), torch.zeros(1), -8, 7)

    with pytest.raises(Exception, match=r"torchlang does not have torch\._fake_quantize\w+; add a @torchsymbol"):
        forge.jit(quantized, strict=True)(torch.eye(2))


NOT_COMPILED = {
    "parts at indices": (
        lambda x: torch.tensor_split(x, x.flatten()[:1].long()),
        "torch.tensor_split is depends on the values",
    ),
    "memory": (lambda x: x.clone().set_(torch.zeros(3)), "torch.Tensor.set_ may change its arguments"),
    "a nested region": (
        lambda x: checkpoint(lambda y: y.clone().set_(torch.zeros(3)), x, use_reentrant=False),
        "torch.Tensor.set_ may change its arguments",
    ),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
@pytest.mark.parametrize("through_torch", [False, True])
def test_fullgraph_refuses_what_would_run_in_eager(name, through_torch):
    function, reason = NOT_COMPILED[name]
    told = (
        rf"fullgraph=True: forge cannot compile .*{reason}.* \(test_jit.py:\d+  .*lambda x.*\); .*leave out fullgraph"
    )
    if through_torch:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=told):
            torch.compile(function, backend="forge", fullgraph=True)(torch.randn(3))
    else:
        jitted = forge.jit(function, fullgraph=True)
        for _ in range(2):  # it stays refused
            with pytest.raises(NotImplementedError, match=told):
                jitted(torch.randn(3))


def test_what_runs_in_eager_without_fullgraph_is_told_with_its_line():
    with pytest.warns(UserWarning, match=r"a graph runs in eager: torch.Tensor.set_ .* \(test_jit.py:\d+  .*set_"):
        forge.jit(NOT_COMPILED["memory"][0])(torch.randn(3))


def test_fullgraph_refuses_a_graph_break():
    def f(x):
        y = x * 2
        print(end="")
        return y

    with pytest.raises(Exception, match="print"):
        forge.jit(f, fullgraph=True)(torch.ones(1))


def test_graph_breaks_and_recompiles_are_told_with_reasons():
    def f(x):
        return x + 1 if x.sum() > 0 else x - 1

    jitted = forge.jit(f)
    jitted(torch.ones(2))
    jitted(torch.ones(3))
    told = forge.explain(jitted)
    assert told.graphs > 2 and any("Data-dependent" in reason for reason in told.graph_breaks)
    assert any("size mismatch" in reason for reason in told.recompiles)
    assert "graph breaks: Data-dependent" in str(told)


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_shapes_serve_a_second_shape(dynamic):
    def f(x, w):
        return torch.relu(x @ w).view(-1).sum() * x.size(0)

    jitted = forge.jit(f, dynamic=dynamic, fullgraph=True)
    for rows in (3, 5, 7):
        x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
        jitted(x, w).backward()
        got, x.grad = x.grad, None
        f(x, w).backward()
        torch.testing.assert_close(got, x.grad)
    assert forge.explain(jitted).graphs == (1 if dynamic else 2)


def test_dynamic_false_recompiles_for_each_shape():
    jitted = forge.jit(lambda x: x * 2, dynamic=False)
    for rows in (3, 4, 5):
        jitted(torch.ones(rows))
    assert forge.explain(jitted).graphs == 3


def test_as_a_backend_of_torch_compile():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    compiled = torch.compile(net, backend="forge")
    x = torch.ones(2, 4)
    torch.testing.assert_close(compiled(x), net(x))
    compiled(x).sum().backward()
    assert net[0].weight.grad is not None


def test_reports_refuse_what_was_not_jitted():
    with pytest.raises(TypeError, match=r"was not made by forge\.jit"):
        forge.explain(lambda x: x)


def test_force_eager_stance_is_obeyed():
    jitted = forge.jit(lambda x: x * 2)
    jitted(torch.ones(2))
    with torch.compiler.set_stance("force_eager"):
        jitted(torch.ones(3))
    assert forge.explain(jitted).graphs == 1


def test_bad_input_raises_torchs_own_exception_types():
    jitted = forge.jit(lambda a, b: a @ b)
    with pytest.raises(Exception, match=r"size|shape") as caught:
        jitted(torch.ones(2, 3), torch.ones(2, 3))
    assert "forge" not in type(caught.value).__module__


def test_two_sizes_with_one_symbol():
    def f(x, n, m):
        return x.view(n, m) * 2

    jitted = forge.jit(f, dynamic=True)
    for size in (4, 6):
        x = torch.arange(float(size * size))
        torch.testing.assert_close(jitted(x, size, size), f(x, size, size))


def test_zero_dim_cpu_tensors_go_with_any_device():
    x, scale = torch.ones(2, 3, device="meta"), torch.tensor(2.0)
    trace = forge.trace(lambda x, scale: torch.where(x > 0, scale, x / scale), x, scale)
    assert trace.output.device.type == "meta"


def test_numbers_of_numpy_are_drawn_from_its_own_generator() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.from_numpy(numpy.random.rand(4)) < 0.5
        return nn.functional.dropout(x * kept), torch.randperm(4)

    drawn = []
    for each in (function, forge.jit(function)):
        numpy.random.seed(0)
        torch.manual_seed(0)
        drawn.append(([each(torch.ones(4)) for _ in range(3)], numpy.random.rand(), torch.rand(1)))
    torch.testing.assert_close(drawn[1], drawn[0], rtol=0, atol=0)


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, float]:
        own = random.Random(1)
        return x * self.generator.random() + 1, self.generator.randint(0, 99), own.random()


def test_numbers_of_a_models_own_generator_are_drawn_at_every_call() -> None:
    drawn = []
    for jit in (False, True):
        model = Augmented()
        run = forge.jit(model) if jit else model
        drawn.append(([run(torch.ones(2)) for _ in range(3)], model.generator.random()))
    torch.testing.assert_close(drawn[1], drawn[0])
