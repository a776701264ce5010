"""The report of forge.explain on a program, and the callables it accepts."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import forge
from forge.debug.report import text

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(x))


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_operation_is_told_with_its_module_its_result_and_the_users_line() -> None:
    jitted = forge.jit(Blocks(2))
    jitted(X)
    rows = [row for row in forge.explain(jitted).rows if row.phase == "forward"]
    linear, relu, add = rows[:3]
    assert (linear.operation, linear.module) == ("torch.nn.functional.linear", "layers.0.up")
    assert linear.results == relu.results == add.results == ("f32[2, 4]",)
    assert relu.module == add.module == "layers.0" and rows[-1].module == "layers.1"
    assert relu.source.endswith("return x + torch.relu(self.up(x))") and relu.source.startswith("test_explain.py:")


def test_a_module_of_torchs_alone_has_paths_and_no_lines_of_forges() -> None:
    jitted = forge.jit(nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU())))
    jitted(X)
    forward = [row for row in forge.explain(jitted).rows if row.phase == "forward"]
    assert [(row.module, row.source) for row in forward] == [("0", None), ("1.0", None)]


def test_a_program_from_disk_tells_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    model = Blocks(1)
    first, again = forge.jit(model), forge.jit(model)
    first(X), again(X)
    told = forge.explain(again)
    assert told.cached == 1 and told.rows == forge.explain(first).rows and told.saved == forge.explain(first).saved


def test_what_is_saved_for_the_backward_is_told_in_bytes() -> None:
    jitted = forge.jit(lambda x, w: torch.relu(x @ w).exp().sum())
    jitted(torch.ones(8, 4), torch.ones(4, 16, requires_grad=True))
    told = forge.explain(jitted)
    own = [each for each in told.saved if each.own]
    assert [each.result for each in own] == ["f32[8, 16]"] * len(own) and own
    assert told.saved_bytes == 8 * 16 * 4 * len(own)
    assert [each.name for each in told.saved if not each.own] == ["x"]
    assert "saved for the backward" in str(told)


def test_a_saved_view_of_an_input_holds_no_memory() -> None:
    jitted = forge.jit(lambda x, w: (x @ w.t()).sum(), executors=["torch"])
    jitted(torch.ones(8, 4, requires_grad=True), torch.ones(16, 4))
    assert [(each.result, each.own) for each in forge.explain(jitted).saved] == [("f32[4, 16]", False)]


@pytest.mark.parametrize("count", [3, 5])
def test_a_call_that_fits_no_graph_is_one_recompile(count: int) -> None:
    jitted = forge.jit(lambda x: x * 2, dynamic=False)
    for length in range(count):
        jitted(torch.ones(length + 2))
    told = forge.explain(jitted)
    assert told.graphs == count and len(told.recompiles) == count - 1
    assert "tensor x size mismatch at index 0. expected 3, actual 4" in told.recompiles[1]
    assert "1 earlier graph" in told.recompiles[1]


class Counting(nn.Module):
    """A module that counts its calls, so that no graph fits the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_a_recompile_is_told_in_few_words_with_its_file_and_line() -> None:
    jitted = forge.jit(Counting())
    jitted(X), jitted(X), jitted(X)
    line = Counting.forward.__code__.co_firstlineno + 1
    assert forge.explain(jitted).recompiles == [
        f"module.calls == 0 (test_explain.py:{line})",
        f"module.calls == 1 (test_explain.py:{line}) (nor 1 earlier graph fitted)",
    ]


@pytest.mark.parametrize("dynamic", [None, True])
def test_calls_past_the_recompile_limit_are_told_once_and_warned_of(dynamic: bool | None) -> None:
    limit = torch._dynamo.config.recompile_limit
    net = Counting()
    jitted = forge.jit(net, dynamic=dynamic)
    for _ in range(limit):
        jitted(X)
    assert forge.explain(jitted).eager == []
    with pytest.warns(UserWarning, match="recompile limit") as warned:
        for _ in range(3):
            torch.testing.assert_close(jitted(X), X * net.calls)
    told = forge.explain(jitted)
    line = Counting.forward.__code__.co_firstlineno + 1
    assert told.eager == [
        f"calls run in eager: Dynamo's recompile limit ({limit}) is reached; the last guard that failed: "
        f"module.calls == {limit - 1} (test_explain.py:{line}); raise torch._dynamo.config.recompile_limit"
    ]
    assert [str(each.message) for each in warned] == [f"forge: Counting: {told.eager[0]}"]
    assert (told.graphs, len(told.recompiles)) == (limit, limit - 1)
    assert "run in eager: calls run in eager" in str(told)


def test_the_recompile_limit_is_that_of_each_jitted_module() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(kept_out(x.sin()))

        def rest(self, x: torch.Tensor) -> torch.Tensor:
            return x.cos() * 2

    layers = [forge.jit(Layer()) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    for layer in layers:
        layer(X)
    for layer in layers:  # they share the code behind the break
        told = forge.explain(layer)
        assert (told.graphs, told.eager, told.recompiles) == (2, [], [])


@pytest.mark.parametrize(
    ("given", "guard", "helps"),
    [
        ([(X, mode) for mode in "abc"], "mode == 'b'", False),
        ([(X.to(dtype), 1) for dtype in (torch.float32, torch.float64, torch.int32)], "dtype mismatch", False),
        ([(X, [1] * length) for length in (1, 2, 3)], "len(mode) == 2", False),
        ([(torch.randn(length, 3), 1) for length in (4, 5, 6)], "size mismatch", True),
        ([(X, number) for number in (3, 4, 5)], "mode == 4", True),
    ],
)
def test_symbols_are_advised_where_the_guard_is_of_a_size_or_a_number(given: list, guard: str, helps: bool) -> None:
    def function(x: torch.Tensor, mode: object) -> torch.Tensor:
        return x * (mode if isinstance(mode, int) else len(mode))

    def limits(dynamic: bool) -> list[str]:
        torch._dynamo.reset()
        jitted = forge.jit(function, dynamic=dynamic)
        for args in given:
            jitted(*args)
        return forge.explain(jitted).eager

    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (told,) = limits(dynamic=False)
        assert guard in told
        assert told.endswith(" or give forge.jit(dynamic=True)") is helps
        assert bool(limits(dynamic=True)) is not helps


def test_a_function_that_runs_in_eager_for_a_graph_break_in_a_loop_is_told() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = kept_out(x.sin())
        return x

    jitted = forge.jit(lambda x: loop(x.cos()))
    jitted(X)
    (reason,) = forge.explain(jitted).skipped
    assert "loop (test_explain.py:" in reason and "a graph break in a loop: Skip calling" in reason
    assert "no graph of: " in str(forge.explain(jitted))


def test_what_of_a_module_is_not_jitted_is_told() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(forge.jit(nn.Linear(4, 4)), nn.ReLU())
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.parts(x))

    told = forge.explain(Outer())
    name = Outer.forward.__qualname__
    assert told.outside == [f"forward ({name})", "parts.1 (ReLU)", "head (Linear)"]
    assert forge.explain(nn.Sequential(forge.jit(nn.Linear(4, 4)))).outside == []


class Skipped(nn.Module):
    """A module that Dynamo skips."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kept_out(x)


@torch.compiler.disable
def kept_out(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def skipped() -> tuple[nn.Module, tuple]:
    return Skipped(), (X,)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0])[0]


def packed() -> tuple[nn.Module, tuple]:
    return Packed(), (torch.ones(2, 3, 4), torch.tensor([3, 2]))


@pytest.mark.parametrize("make", [skipped, packed])
def test_where_nothing_is_compiled_one_warning_says_so_and_explain_says_why(make: Callable) -> None:
    model, inputs = make()
    jitted = forge.jit(model)
    assert "call the function first" in str(forge.explain(jitted))
    with pytest.warns(UserWarning, match=f"nothing of {type(model).__name__} was compiled, it runs in eager: "):
        jitted(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(*inputs)
    told = forge.explain(jitted)
    assert told.graphs == 0 and told.graph_breaks and "runs in eager" in str(told) and told.graph_breaks[0] in str(told)


def test_what_calls_nothing_of_torch_gets_no_warning() -> None:
    jitted = forge.jit(lambda x: x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(X)
    assert "calls nothing of torch" in str(forge.explain(jitted))


def test_a_module_around_jitted_ones_tells_of_them() -> None:
    blocks = Blocks(2)
    blocks.layers[0], blocks.layers[1] = forge.jit(blocks.layers[0]), forge.jit(blocks.layers[1])
    blocks(X)
    told = forge.explain(nn.Sequential(blocks))
    assert told.graphs == 2 and {row.graph for row in told.rows} == {0, 1}


def test_what_torch_compile_made_with_the_backend_tells_of_itself() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    module, function, own = torch.compile(Block(), backend="forge"), torch.compile(double, backend="forge"), Block()
    own.compile(backend="forge")
    module(X), function(X), own(X)
    assert "torch.relu" in [row.operation for row in forge.explain(module).rows]
    assert [row.operation for row in forge.explain(function).rows] == ["torch.mul"]
    assert forge.explain(own).graphs == 1
    assert str(forge.explain(module)).startswith("Block: 1 graph")


@torch._dynamo.disable
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Hidden(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hidden(x)


def test_what_torch_compile_gave_no_graph_of_tells_of_it_with_the_reasons_of_dynamo() -> None:
    module, own = torch.compile(Hidden(), backend="forge"), Hidden()
    own.compile(backend="forge")
    graphs = torch.compile(lambda x: x * 2, backend="forge")
    graphs(X), module(X), own(X)
    for each in (module, own):
        told = forge.explain(each)
        assert (told.name, told.graphs, told.rows) == ("Hidden", 0, [])
        assert str(told).startswith("Hidden: Dynamo gave forge no graph")
        assert any("torch.compiler.disable" in reason for reason in told.graph_breaks)
        assert "\ngraph breaks: " in str(told) and told.graph_breaks[0] in str(told)
    assert "graph" in forge.explain(nn.Sequential(module)).to_html()
    assert str(forge.explain(graphs)).startswith("<lambda>: 1 graph")


def test_what_torch_compile_gave_no_graph_of_yet_tells_of_a_later_one() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="forge")
    assert "it was not called yet" in str(forge.explain(compiled))
    compiled(X)
    assert str(forge.explain(compiled)).startswith("<lambda>: 1 graph")


def test_without_a_target_it_tells_of_the_process() -> None:
    jitted = forge.jit(lambda x: torch.expm1(x) * 3)
    jitted(X)
    assert "torch.expm1" in [row.operation for row in forge.explain().rows]


@pytest.mark.parametrize("other", [len, nn.Linear(4, 4), 3, torch.compile(lambda x: x, backend="eager")])
def test_what_was_never_jitted_is_a_type_error_of_one_line(other: object) -> None:
    with pytest.raises(TypeError, match=r"^[^\n]*not made by forge.jit[^\n]*$"):
        forge.explain(other)


def test_json_has_all_of_it(tmp_path) -> None:
    jitted = forge.jit(Blocks(1))
    jitted(X)
    told = forge.explain(jitted)
    found = json.loads(told.to_json(tmp_path / "report.json"))
    assert found == json.loads((tmp_path / "report.json").read_text())
    assert found["rows"][0]["module"] == "layers.0.up" and found["saved_bytes"] == told.saved_bytes


def test_layers_that_are_alike_are_one_in_the_text() -> None:
    jitted = forge.jit(Blocks(6))
    with torch.no_grad():
        jitted(torch.ones(8, 4))
    shown = str(forge.explain(jitted))
    assert shown.count("layers.{0..5}.up") == 1 and "layers.1" not in shown


def test_a_fusion_is_one_line_with_what_it_holds() -> None:
    jitted = forge.jit(lambda x: (x.exp() + 1).sin().sum(), executors=["inductor", "torch"])
    jitted(torch.ones(64, 64))
    told = forge.explain(jitted)
    ((_, _, name),) = told.regions
    (line,) = [line for line in str(told).splitlines() if name in line]
    assert f"{name}:" in line and "4 operations" in line and all(row.region == name for row in told.rows)


@pytest.mark.parametrize("width", [80, 120])
def test_the_source_has_the_number_of_the_line_whatever_is_cut_off(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WIDTH", width)
    body = "    def forward(self, x):\n        return self.projection_of_the_attention(x).relu().exp().sin().tanh()\n"
    file = tmp_path / "modeling_of_long_name.py"
    file.write_text("\n" * 380 + f"class Attending(Base):\n{body}")

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection_of_the_attention = nn.Linear(4, 4)

    scope = {"Base": Base}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    jitted = forge.jit(scope["Attending"](), executors=["torch"])  # a row for each call
    jitted(X)
    shown = [line for line in str(forge.explain(jitted)).splitlines() if " modeling_" in line]
    assert len(shown) >= 5 and all(re.search(r" modeling_[\w.]*…?:383( |$)", line) for line in shown)
    assert max(map(len, shown)) <= width


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, "model.py:123  h = x @ w"),
        (18, "model.py:123  h = x @ w"),
        (15, "model.py:123"),
        (12, "model.py:123"),
        (11, "model.…:123"),
        (5, "…:123"),
        (4, "123"),
    ],
)
def test_a_source_is_cut_down_to_its_line(width: int, shown: str) -> None:
    assert text._with_line("model.py:123  h = x @ w", width) == shown


@pytest.mark.parametrize("width", [60, 120])
def test_lines_of_tables_fit_whatever_names_are_long(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "WIDTH", width)

    def attention(a_tensor_of_a_long_name: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*[a_tensor_of_a_long_name] * 3, is_causal=True).relu()

    jitted = forge.jit(attention, executors=["torch"])  # no call is declined: reasons are not tables
    jitted(torch.ones(1, 2, 3, 4))
    _, *lines = str(forge.explain(jitted)).splitlines()
    assert max(map(len, lines)) <= width


class Chain(nn.Module):
    """A chain of layers in which one fusion between two products spans the end of a layer and the start of the next."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_are_alike_where_fusions_span_two_of_them() -> None:
    jitted = forge.jit(Chain(8), executors=["inductor", "torch"])
    with torch.no_grad():
        jitted(torch.ones(64, 64))
    shown = str(forge.explain(jitted))
    assert "layers.{0..7}.1" in shown or "layers.{0..6}.1" in shown or "layers.{1..7}.1" in shown
    assert "layers.3" not in shown and "layers.4" not in shown


def silu_by_kernel(name: str, **constraints: object) -> forge.Explanation:
    kernel = forge.kernel(
        "torch.nn.functional.silu", lambda input: input * torch.sigmoid(input), name=name, **constraints
    )
    jitted = forge.jit(lambda x: nn.functional.silu(x) + 1, kernels=[kernel])
    jitted(X)
    return forge.explain(jitted)


def test_a_required_kernel_that_runs_is_no_error() -> None:
    silu_by_kernel("required", dtypes=[torch.float32]).require("required")


@pytest.mark.filterwarnings("ignore:forge.*no kernel of")
def test_a_required_kernel_that_declines_is_an_error_with_its_reasons() -> None:
    wanted = (
        r"forge.explain\(\.\.\.\).require\('refusing'\): it runs no operation\n"
        r"  it declined torch.nn.functional.silu \(test_explain.py:\d+ .*\): dtype float32 not in .*float64"
    )
    with pytest.raises(forge.StrictError, match=wanted):
        silu_by_kernel("refusing", dtypes=[torch.float64]).require("refusing")


def test_a_required_name_that_nothing_asked_is_an_error_with_those_that_were() -> None:
    with pytest.raises(forge.StrictError, match=r"no operation was offered to it; asked were .*of_silu.*torch"):
        silu_by_kernel("of_silu", dtypes=[torch.float32]).require("of_sliu")
    with pytest.raises(forge.StrictError, match=r"nothing was compiled yet: call the function first"):
        forge.explain(forge.jit(Block())).require("torch")
