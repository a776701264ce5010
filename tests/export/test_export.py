"""Exporting and loading by forge.export and forge.load: arguments, results, state and refusals, in both file forms."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import forge
from forge import EntryPoint, ExportError
from forge.aot.weights import WeightReader, WeightWriter
from forge.quantize import Int8WeightOnly
from forge.testing.process_group import group_of_one
from tests.export.support import Mlp, members_of

torch.manual_seed(0)


class Nested(nn.Module):
    """A module that takes and returns nests, numbers and constants, writes to a buffer, and has parts under other
    modes."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(3))
        self.ones = torch.ones(8)

    def forward(self, x, scale=2, *, given=None):
        self.calls.add_(1)
        with torch.no_grad():
            y = self.linear(x) * scale
        if self.draws:
            y = y + torch.rand(()) * 0
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(y)
        parts = (x.shape[0], y[0], 3, self.ones)
        return {"y": y.relu(), "parts": parts}, [given["a"].sum(), torch.cat([x, x]) + given["b"]], self.calls + 1


def saved(tmp_path: Path, *args: Any, **kwargs: Any) -> Any:
    """Return the program after it was exported, saved and loaded."""
    path = tmp_path / "model.pt2"
    forge.export(*args, **kwargs).save(path)
    return forge.load(path)


def form_of(exported: forge.Exported, name: str = "model") -> str:
    return str(exported).split(f"{name}: ", 1)[1].partition(";")[0]


def nested_inputs(batch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.randn(batch, 8), {"a": torch.randn(3), "b": torch.randn(2 * batch, 8)}


@pytest.fixture(scope="module", params=["AOTInductor package", "functions of forge"])
def nested(tmp_path_factory, request):
    """Return a module and its export with a batch of any size up to 64, in each form: random numbers need forge's."""
    model = Nested(request.param == "functions of forge")
    x, given = nested_inputs(4)
    batch = Dim("batch", min=1, max=64)
    shapes = {"x": {0: batch}, "scale": None, "given": {"a": None, "b": {0: 2 * batch}}}
    exported = forge.export(model, (x,), {"scale": 2, "given": given}, dynamic_shapes=shapes)
    assert form_of(exported).startswith(request.param)
    path = tmp_path_factory.mktemp("nested") / "model.pt2"
    exported.save(path)
    return model, path


@pytest.fixture(scope="module")
def exported_mlp():
    """Return a module and its export with a batch of any size, as a package."""
    model = Mlp()
    return model, forge.export(model, (torch.randn(4, 8),), dynamic_shapes={"x": {0: Dim("batch", max=64)}})


@pytest.fixture(scope="module")
def mlp(exported_mlp, tmp_path_factory):
    """Return the module and the file of its package."""
    model, exported = exported_mlp
    path = tmp_path_factory.mktemp("mlp") / "model.pt2"
    exported.save(path)
    return model, path


def test_package_equals_eager_for_each_batch(mlp):
    model, path = mlp
    loaded = forge.load(path)
    for batch in (1, 4, 7):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.slow
def test_nested_arguments_and_results_equal_eager_for_each_batch(nested):
    model, path = nested
    loaded = forge.load(path)
    for batch in (4, 1, 5):
        x, given = nested_inputs(batch)
        torch.testing.assert_close(loaded(x, scale=2, given=given), model(x, given=given))


def test_buffers_that_a_program_writes_to_are_of_each_loaded_program(nested):
    path = nested[1]
    first, second = forge.load(path), forge.load(path)
    x, given = nested_inputs(2)
    given = {"scale": 2, "given": given}
    counts = [loaded(x, **given)[2][0].item() for loaded in (first, first, second)]
    assert counts == [counts[0], counts[0] + 1, counts[0]]


def test_arguments_may_be_given_by_position_or_by_name(nested, mlp):
    _, path = nested
    x, given = nested_inputs(2)
    first, second = forge.load(path), forge.load(path)
    torch.testing.assert_close(first(given=given, scale=2, x=x), second(x, 2, given=given))
    y = torch.randn(3, 8)
    torch.testing.assert_close(forge.load(mlp[1])(x=y), mlp[0](y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, given: ((x.double(),), given), "x has dtype float64, but must have float32"),
        (lambda x, given: ((x[:, :4],), given), "x: dim 1 is 4, but must be 8"),
        (lambda x, given: ((x[0],), given), "x has 1 dims, but must have 2"),
        (lambda x, given: ((3,), given), "x is a int, but must be a tensor"),
        (
            lambda x, given: ((x,), {**given, "b": given["b"][1:]}),
            "given_b: dim 0 is 7, but must be 8, which is 2*batch",
        ),
        (lambda x, given: ((x,), {"a": x}), "given has the keys ['a'], but must have ['a', 'b']"),
        (lambda x, given: ((x,), [x]), "given is a list of 1, but must be a dict"),
        (lambda x, given: ((x, x), given), "the call gives"),
        (
            lambda x, given: ((torch.randn(65, 8),), {**given, "b": torch.randn(130, 8)}),
            "x: dim 0 is 65, but must be at",
        ),
    ],
)
def test_call_that_does_not_fit_is_an_error_that_names_the_argument(nested, change, message):
    args, given = change(*nested_inputs(4))
    with pytest.raises(ExportError) as error:
        forge.load(nested[1])(*args, scale=2, given=given)
    assert message in str(error.value)


def test_constant_argument_must_be_the_one_of_the_export(nested):
    x, given = nested_inputs(4)
    with pytest.raises(ExportError, match="scale is 3, but the program was exported with 2"):
        forge.load(nested[1])(x, scale=3, given=given)


def test_inputs_of_other_strides_are_copied(mlp):
    model, path = mlp
    x = torch.randn(8, 5).t()
    torch.testing.assert_close(forge.load(path)(x), model(x))


def test_results_have_no_gradients(mlp, nested):
    x, given = nested_inputs(3)
    x.requires_grad_()
    assert not forge.load(mlp[1])(x).requires_grad
    assert not forge.load(nested[1])(x, scale=2, given=given)[0]["y"].requires_grad
    assert torch.is_grad_enabled()


def test_program_and_its_executors_can_be_read(mlp):
    loaded = forge.load(mlp[1])
    assert "def computation" in loaded.program()
    assert "x: float32[batch, 8] cpu\n  0 ≤ batch ≤ 64" in str(loaded) and "inductor" in str(loaded)


@pytest.mark.slow
def test_exported_program_of_torch_is_taken(tmp_path):
    model, x = Mlp(), torch.randn(4, 8)
    decomposed = torch.export.export(Nested(False), (x,), {"given": nested_inputs(4)[1]}).run_decompositions()
    loaded = saved(tmp_path, torch.export.export(model, (x,)))
    torch.testing.assert_close(loaded(x), model(x))
    other = saved(tmp_path, decomposed)
    given = nested_inputs(4)[1]
    torch.testing.assert_close(other(x, given=given)[1][0], given["a"].sum())


class Cell(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class Step(nn.Module):
    def forward(self, x: torch.Tensor, cell: Cell, lists: list[torch.Tensor]) -> tuple[Cell, list[torch.Tensor]]:
        return Cell(cell.h + x, cell.c * x), [lists[1], lists[0] + 1]


@pytest.mark.slow
def test_named_tuples_are_taken_and_become_records(tmp_path):
    x = torch.randn(3)
    loaded = saved(tmp_path, Step(), (x, Cell(x, x), [x, x]))
    cell, (first, second) = loaded(x, Cell(x, x + 1), [x, x + 2])
    torch.testing.assert_close((cell.h, cell["c"]), (x + x, (x + 1) * x))
    torch.testing.assert_close((first, second), (x + 2, x + 1))


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y


def test_inputs_that_a_program_writes_to_are_written(tmp_path):
    loaded = saved(tmp_path, Writes(), (torch.ones(2, 3), torch.ones(2, 3)))
    x = torch.ones(2, 3)
    torch.testing.assert_close(loaded(x, torch.ones(2, 3)), torch.full((2, 3), 3.0))
    torch.testing.assert_close(x, torch.full((2, 3), 2.0))
    with pytest.raises(ExportError, match=r"x has the strides \(1, 2\), but must have \(3, 1\): the program writes"):
        loaded(torch.ones(3, 2).t(), torch.ones(2, 3))


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return torch.nn.functional.dropout(x + noise, 0.5, training=True) * torch.rand(x.shape[-1])


def test_random_numbers_are_those_of_eager(tmp_path):
    model, x = Draws(), torch.randn(4, 8)
    loaded = saved(tmp_path, model, (x,))
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(loaded(x), expected)


@torch.library.custom_op("forge_export_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self.linear(x).relu() + 1).tanh() * 3


@pytest.fixture
def opaque(tmp_path):
    model = Opaque()
    exported = forge.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: Dim("batch")},))
    exported.save(tmp_path / "opaque.pt2")
    return model, exported, tmp_path / "opaque.pt2"


def test_operators_of_libraries_are_called(opaque):
    model, exported, path = opaque
    assert "is no operator of torch's" in form_of(exported)
    x = torch.randn(3, 8)
    torch.testing.assert_close(forge.load(path)(x), model(x))


def run(script: str, *arguments: str) -> str:
    """Return the output of a script in a separate process without the model's source."""
    environment = textwrap.dedent(
        """
        import sys
        sys.modules["transformers"] = sys.modules["tests"] = None
        import torch
        import forge
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", environment + textwrap.dedent(script), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_file_that_calls_a_library_which_is_not_imported_is_an_error(opaque):
    script = """
        try:
            forge.load(sys.argv[1])
        except forge.ExportError as error:
            print(error)
    """
    assert "forge_export_test" in run(script, str(opaque[2]))


def test_file_runs_in_a_process_without_the_models_source_or_dynamo(mlp, nested, tmp_path):
    x, given = nested_inputs(3)
    torch.save((x, given), tmp_path / "inputs")
    script = """
        x, given = torch.load(sys.argv[3])
        results = forge.load(sys.argv[1])(x), forge.load(sys.argv[2])(x, scale=2, given=given)[1]
        torch.save(results, sys.argv[4])
        from torch._dynamo.utils import counters
        assert not counters, counters
    """
    run(script, str(mlp[1]), str(nested[1]), str(tmp_path / "inputs"), str(tmp_path / "results"))
    first, second = torch.load(tmp_path / "results")
    torch.testing.assert_close(first, mlp[0](x))
    torch.testing.assert_close(second, nested[0](x, given=given)[1])


class Decoder(nn.Module):
    """A decoder of one attention layer, whose cache is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)
        self.register_buffer("cache", torch.zeros(8, 16))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        self.cache.index_copy_(0, at, x)
        return self.head(torch.softmax(x @ self.cache.t(), -1) @ self.cache)


class Scorer(nn.Module):
    """A module that shares the decoder's weights, and writes to nothing."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.head(self.decoder.embedding(tokens)).log_softmax(-1)


@pytest.mark.slow
def test_entry_points_share_weights_and_the_buffers_that_they_write_to(tmp_path):
    decoder = Decoder()
    eager = Decoder()
    eager.load_state_dict(decoder.state_dict())
    prompt, places = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 2])
    exported = forge.export(
        {
            "prefill": EntryPoint(decoder, (prompt, places), None, ({0: Dim("length", max=8)},) * 2),
            "decode": EntryPoint(decoder, (prompt[:1], places[:1])),
            "score": (Scorer(decoder), (prompt,)),
        }
    )
    path = tmp_path / "decoder.pt2"
    exported.save(path)
    # the export leaves the model and torch's modes as they were
    torch.testing.assert_close(dict(decoder.state_dict()), dict(eager.state_dict()))
    assert torch.is_grad_enabled() and all(parameter.requires_grad for parameter in decoder.parameters())
    assert {form_of(exported, name) for name in ("prefill", "decode", "score")} == {"AOTInductor package"}
    loaded = forge.load(path)
    torch.testing.assert_close(loaded.prefill(prompt, places), eager(prompt, places))
    token, place = torch.tensor([7]), torch.tensor([3])
    torch.testing.assert_close(loaded.decode(token, place), eager(token, place))
    torch.testing.assert_close(loaded.entry_points["score"](prompt), Scorer(eager)(prompt))
    with pytest.raises(ExportError, match="several entry points: call one of prefill, decode, score"):
        loaded(prompt)
    weights = sum(value.numel() * 4 for value in decoder.state_dict().values())
    held = next(len(content) for name, content in members_of(path).items() if name.endswith(".safetensors"))
    assert weights <= held < weights + 2000


def guards(condition):
    """Return a transform that makes the program depend on a condition on its batch."""

    def transform(trace):
        assert bool(condition(trace.inputs[-1].shape[0]))
        return trace

    return transform


def test_sizes_that_a_program_was_not_compiled_for_are_refused(tmp_path):
    shapes = {"x": {0: Dim("batch", max=64)}}
    given = {
        "dynamic_shapes": shapes,
        "transforms": [guards(lambda batch: batch % 2 == 0), guards(lambda batch: batch > 3)],
    }
    loaded = saved(tmp_path, model := Mlp(), (torch.randn(4, 8),), **given)
    torch.testing.assert_close(loaded(x := torch.randn(6, 8)), model(x))
    for batch in (2, 5):
        with pytest.raises(ExportError, match=f"batch is {batch}, but the program was exported for sizes with"):
            loaded(torch.randn(batch, 8))


@pytest.mark.slow
def test_transform_replaces_parameters_once_for_all_entry_points(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(3, 64)
    jitted = forge.jit(model, transforms=[Int8WeightOnly()])
    points = {"one": EntryPoint(model, (x[:1],)), "many": EntryPoint(model, (x,))}
    exported = forge.export(points, transforms=[Int8WeightOnly()])
    exported.save(tmp_path / "model.pt2")
    loaded = forge.load(tmp_path / "model.pt2")
    with torch.no_grad():
        torch.testing.assert_close(loaded.many(x), jitted(x))
        torch.testing.assert_close(loaded.one(x[:1]), jitted(x[:1]))
    assert all(isinstance(each, nn.Linear) and each.weight.dtype == torch.float32 for each in (model[0], model[2]))


def test_transform_of_parameters_needs_a_module():
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(ExportError, match="needs a module"):
        forge.export(program, transforms=[Int8WeightOnly()])


class _Unproven(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if (x.shape[0] ** 2) % 5 == 1 else x - 1


@pytest.mark.slow
def test_condition_on_sizes_that_torch_cannot_prove_is_checked_by_the_call(tmp_path):
    model = _Unproven()
    with pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: Dim("n", min=2, max=64)},))
    exported = forge.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: Dim("n", min=2, max=64)},))
    exported.save(tmp_path / "model.pt2")
    loaded = forge.load(tmp_path / "model.pt2")
    for rows in (4, 9, 11):
        x = torch.randn(rows, 8)
        assert torch.equal(loaded(x), model(x))
    with pytest.raises(ExportError, match="7"):
        loaded(torch.randn(7, 8))


def test_size_that_is_compiled_as_a_number_is_an_error():
    shapes = {"x": {0: Dim("batch", max=64)}}
    with pytest.raises(ExportError, match="x: dim 0 may differ, but the program is for 4 alone"):
        forge.export(Mlp(), (torch.randn(4, 8),), dynamic_shapes=shapes, transforms=[guards(lambda batch: batch == 4)])


def test_weights_are_those_of_the_time_of_the_export(tmp_path):
    model, x = Opaque(), torch.randn(4, 8)
    exported, expected = forge.export(model, (x,)), model(x)
    with torch.no_grad():
        model.linear.weight.zero_()
    exported.save(tmp_path / "model.pt2")
    torch.testing.assert_close(forge.load(tmp_path / "model.pt2")(x), expected)


@pytest.mark.parametrize("strides", [(0, 1), (1, 4), (16, 2)], ids=["expanded", "transposed", "with gaps"])
def test_weights_keep_their_strides(strides):
    tensor = torch.arange(64.0).as_strided((4, 4), strides, 3)
    writer = WeightWriter()
    described = writer.add("w", tensor)
    (held,) = writer.members().values()
    found = WeightReader(torch.frombuffer(bytearray(held), dtype=torch.uint8)).get(described, torch.device("cpu"))
    assert torch.equal(found, tensor) and found.stride() == strides


class Rounds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.exp() * 1.1 + x) / 3 - x).sigmoid()


@pytest.mark.slow
def test_numerics_of_eager_are_those_of_eager(tmp_path):
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert torch.equal(saved(tmp_path, Rounds(), (x,), numerics="eager")(x), Rounds()(x))
    assert not torch.equal(saved(tmp_path, Rounds(), (x,))(x), Rounds()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forge.export(lambda x: x, (torch.ones(2),)), "the model is a function, but must be a torch.nn.Module"),
        (lambda: forge.export(nn.ReLU(), torch.ones(2)), "args is a Tensor, but must be a tuple of the arguments"),
        (lambda: forge.export(Branches(), (torch.ones(2),)), "torch.export cannot take the model"),
        (lambda: forge.export({"a b": EntryPoint(Mlp(), (torch.ones(2, 8),))}), "entry point 'a b' must have an ident"),
    ],
)
def test_export_of_what_it_cannot_take_is_one_error(make, message):
    with pytest.raises(ExportError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/model.pt2", "missing/model.pt2 is in a folder that does not exist"),
        ("model.pt", "model.pt must end with .pt2"),
    ],
)
def test_path_where_no_file_can_be_saved_is_one_error(exported_mlp, path, message):
    with pytest.raises(ExportError, match=message):
        exported_mlp[1].save(path)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class _Reduces(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.up, self.group = nn.Linear(3, 4), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced = torch.ops._c10d_functional.all_reduce(self.up(x), "sum", self.group)
        return torch.ops._c10d_functional.wait_tensor(reduced)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_model_of_several_processes_is_refused() -> None:
    group = group_of_one()
    with pytest.raises(ExportError, match=r"calls _c10d_functional\.all_reduce\.default, but a file is for one"):
        forge.export(_Reduces(group), (torch.ones(2, 3),))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_distributed_parameters_are_refused(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Linear(3, 4)
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
        with pytest.raises(ExportError, match="parameter weight is a DTensor, but a file is for one process"):
            forge.export(model, (torch.ones(2, 3),))
    finally:
        torch.distributed.destroy_process_group()
