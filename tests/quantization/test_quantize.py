"""Quantization by forge.quantize: linear layers of a jitted module store their weights in 8 or 4 bits."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.capture.handles import handle_of
from forge.quantize import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly, Quantization
from forge.runtime.quantized_linear import QuantizedLinear

TRANSFORMS = {
    "int8": Int8WeightOnly(),
    "int8 in groups": Int8WeightOnly(16),
    "int4": Int4WeightOnly(16),
    "int4 symmetric": Int4WeightOnly(32, symmetric=True),
    "fp8": Float8WeightOnly(),
    "fp8 e5m2": Float8WeightOnly(torch.float8_e5m2),
}
# the largest relative error of a weight's values: half a step of 127, 15 and 7, and of 3 and 2 bits of mantissa
STEPS = {"int8": 255, "int8 in groups": 255, "int4": 29, "int4 symmetric": 14, "fp8": 16, "fp8 e5m2": 8}
EVERY = pytest.mark.parametrize("name", TRANSFORMS)


class Model(nn.Module):
    """A model whose embedding shares its weight with the last layer, with two layers between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows) % 24


def dequantized(jitted: nn.Module) -> Model:
    """Return the model in eager with the values of the quantized weights; its head has a separate weight."""
    model = Model()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.load_state_dict(forge.original_state_dict(jitted))
    return model


@EVERY
@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(2)
def test_results_are_those_of_the_dequantized_weights(name: str, dtype: torch.dtype) -> None:
    jitted = forge.jit(Model().to(dtype), transforms=[TRANSFORMS[name]], cache=False, fullgraph=True)
    exact = dequantized(jitted).double()
    for rows in (1, 3, 9):
        with torch.no_grad():
            actual, expected = jitted(tokens(rows)), exact(tokens(rows))
            eager = dequantized(jitted).to(dtype)(tokens(rows))
        error, eagers = ((each.double() - expected).abs().max() for each in (actual, eager))
        assert error <= 2 * eagers + 1e-6  # sums of other orders
    assert not forge.explain(jitted).opaque_calls


@EVERY
def test_values_are_the_weights_to_half_a_step(name: str) -> None:
    weight = torch.randn(8, 64)
    scheme = TRANSFORMS[name].scheme
    error = (scheme.dequantize(scheme.quantize(weight), torch.float32) - weight).abs()
    groups = weight.view(8, -1, scheme.group_size or 64)
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).reshape_as(weight)
    bound = largest if scheme.dtype.is_floating_point is False else weight.abs() + 1e-3
    assert (error <= bound / STEPS[name] * 2.05).all()
    assert error.max() > 0


@EVERY
def test_a_weight_of_zeros_stays(name: str) -> None:
    scheme = TRANSFORMS[name].scheme
    assert not scheme.dequantize(scheme.quantize(torch.zeros(4, 64)), torch.float32).any()


def test_few_rows_are_multiplied_in_one_region_as_they_are_stored() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    jitted = forge.jit(model, transforms=[Int4WeightOnly(32)], cache=False)
    with torch.no_grad():
        jitted(torch.randn(1, 64))
    assert len(forge.last_traces(jitted)[-1].bound_symbols) == 1
    assert len(forge.explain(jitted).rows) == 3
    with torch.no_grad():
        jitted(torch.randn(9, 64))
    assert "torch.nn.functional.linear" in [row.operation for row in forge.explain(jitted).rows]


def test_a_layer_alone_is_a_region() -> None:
    jitted = forge.jit(nn.Linear(64, 96), transforms=[Int8WeightOnly()], cache=False)
    with torch.no_grad():
        jitted(torch.randn(1, 64))
    assert [row.executor for row in forge.explain(jitted).rows] == ["inductor"]


def test_values_are_rounded_under_eager_numerics() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 96, dtype=dtype)
        jitted = forge.jit(layer, transforms=[Int8WeightOnly()], numerics="eager", cache=False)
        with torch.no_grad():
            jitted(torch.randn(1, 64, dtype=dtype))
        assert [row.executor for row in forge.explain(jitted).rows] == ["torch"]


def test_weights_of_many_rows_are_dequantized_one_after_the_other() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    jitted = forge.jit(nn.Sequential(*layers), transforms=[Int8WeightOnly()], cache=False)
    with torch.no_grad():
        jitted(torch.randn(64, 64))
    names = [bound.symbol.name for bound in forge.last_traces(jitted)[-1].bound_symbols]
    calls = [name for name in names if name == "linear" or name.startswith("fusion")]
    assert [name == "linear" for name in calls] == [False, True] * 6


@EVERY
def test_gradients_of_the_input_and_the_bias_are_those_of_the_dequantized_weights(name: str) -> None:
    jitted = forge.jit(Model(), transforms=[TRANSFORMS[name]])
    eager = dequantized(jitted)
    for model in (jitted, eager):
        model(tokens(9)).pow(2).sum().backward()
    torch.testing.assert_close(jitted.embed.weight.grad, eager.embed.weight.grad)
    torch.testing.assert_close(jitted.up.bias.grad, eager.up.bias.grad)
    assert jitted.up.weight.grad is None


def test_a_backward_saves_no_dequantized_weight() -> None:
    jitted = forge.jit(Model(), transforms=[Int8WeightOnly()])
    jitted(tokens(9)).sum().backward()
    saved = [each.metadata for each in handle_of(jitted).latest.saved]
    assert any(each.startswith("i8[96, 64]") for each in saved)
    assert not any(each.startswith(("f32[96, 64]", "f32[64, 96]")) for each in saved)


def test_the_users_module_stays_and_shares_what_is_not_quantized() -> None:
    model = Model()
    before = {name: (id(each), each.detach().clone()) for name, each in model.named_parameters()}
    jitted = forge.jit(model, transforms=[Int8WeightOnly()])
    assert isinstance(jitted, Model)
    for name, each in model.named_parameters():
        assert id(each) == before[name][0]
        torch.testing.assert_close(each, before[name][1], rtol=0, atol=0)
    assert jitted.embed.weight is model.embed.weight
    assert jitted.up.bias is model.up.bias
    assert type(model.up) is nn.Linear
    assert isinstance(jitted.up, nn.Linear)


def test_the_embedding_of_a_tied_head_stays() -> None:
    jitted = forge.jit(Model(), transforms=[Int8WeightOnly()])
    assert jitted.embed.weight.dtype == torch.float32
    assert jitted.head.weight.dtype == torch.int8


def test_a_layer_that_is_at_two_places_is_quantized_once() -> None:
    layer = nn.Linear(64, 64)
    jitted = forge.jit(nn.Sequential(layer, nn.ReLU(), layer), transforms=[Int8WeightOnly()])
    assert jitted[0] is jitted[2]
    assert isinstance(jitted[0], QuantizedLinear)


def test_a_linear_layer_itself_is_quantized() -> None:
    layer = nn.Linear(64, 24)
    jitted = forge.jit(layer, transforms=[Int8WeightOnly()])
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert (jitted(x) - layer(x)).abs().max() < 0.05
    assert set(forge.original_state_dict(jitted)) == {"weight", "bias"}


# the state_dict


@EVERY
def test_a_state_dict_of_either_form_is_loaded(name: str) -> None:
    model, other = Model(), Model()
    with torch.no_grad():
        other.up.weight.mul_(0.5)
    jitted, wanted = (forge.jit(each, transforms=[TRANSFORMS[name]]) for each in (model, other))
    assert "up.scale" in jitted.state_dict()
    for state_dict in (other.state_dict(), wanted.state_dict()):
        jitted.load_state_dict(forge.jit(model, transforms=[TRANSFORMS[name]]).state_dict())
        jitted.load_state_dict(state_dict)
        with torch.no_grad():
            torch.testing.assert_close(jitted(tokens(9)), wanted(tokens(9)))


def test_the_original_form_goes_back_to_the_original_module() -> None:
    model = Model()
    state_dict = forge.original_state_dict(forge.jit(model, transforms=[Int8WeightOnly()]))
    assert {name: (x.shape, x.dtype) for name, x in state_dict.items()} == {
        name: (x.shape, x.dtype) for name, x in model.state_dict().items()
    }
    Model().load_state_dict(state_dict)


def test_a_checkpoint_of_a_model_that_holds_a_jitted_one_is_loaded() -> None:
    whole, plain = (nn.ModuleDict({"inner": each}) for each in (Model(), Model()))
    whole["inner"] = forge.jit(whole["inner"], transforms=[Int8WeightOnly()])
    whole.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*inner\.up\.bias"):
        whole.load_state_dict({name: x for name, x in plain.state_dict().items() if name != "inner.up.bias"})


def test_a_quantized_checkpoint_is_loaded_into_a_model_without_memory() -> None:
    state_dict = forge.jit(Model(), transforms=[Int8WeightOnly()]).state_dict()
    with torch.device("meta"):
        empty = Model()
    jitted = forge.jit(empty, transforms=[Int8WeightOnly()])
    jitted.load_state_dict(state_dict, assign=True)
    wanted = forge.jit(Model(), transforms=[Int8WeightOnly()])
    with torch.no_grad():
        torch.testing.assert_close(jitted(tokens(9)), wanted(tokens(9)))


# copies, conversions, other options


def _pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@EVERY
@pytest.mark.parametrize("copied", [_pickled, _saved, copy.deepcopy, copy.copy])
def test_copies_are_quantized_and_load_both_forms(name: str, copied: Any) -> None:
    jitted = forge.jit(Model(), transforms=[TRANSFORMS[name]])
    other = copied(jitted)
    with torch.no_grad():
        torch.testing.assert_close(other(tokens(9)), jitted(tokens(9)), rtol=0, atol=0)
    assert other.up.weight.dtype == jitted.up.weight.dtype
    assert other.state_dict().keys() == jitted.state_dict().keys()
    assert set(forge.original_state_dict(other)) == set(Model().state_dict())
    other.load_state_dict(Model().state_dict())


@EVERY
def test_conversions_leave_the_stored_weight(name: str) -> None:
    jitted = forge.jit(Model(), transforms=[TRANSFORMS[name]])
    before = [None if each is None else each.clone() for each in jitted.up.stored]
    jitted.to(torch.bfloat16).double().float()
    for one, other in zip(jitted.up.stored, before, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one.float(), other.float()))


@EVERY
def test_freezing_leaves_the_stored_weight(name: str) -> None:
    frozen = forge.jit(Model(), transforms=[TRANSFORMS[name]], freeze=True)
    with torch.no_grad():
        for rows in (1, 9):
            torch.testing.assert_close(frozen(tokens(rows)), dequantized(frozen)(tokens(rows)))
    folded = [
        tensor for each in handle_of(frozen).folded_weights() for s in each._states.values() for tensor in s.values
    ]
    assert all(each.shape != (96, 64) for each in folded)


@pytest.mark.parametrize("options", [{"numerics": "eager"}, {"check": "eager"}, {"executors": ["torch"]}])
def test_other_options_compose(options: dict[str, Any]) -> None:
    jitted = forge.jit(Model(), transforms=[Int4WeightOnly(16)], **options)
    with torch.no_grad():
        for rows in (1, 9):
            torch.testing.assert_close(jitted(tokens(rows)), dequantized(jitted)(tokens(rows)))


def test_a_program_of_quantized_weights_is_read_from_the_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    for was_there in (False, True):
        jitted = forge.jit(Model(), transforms=[Int8WeightOnly()])
        with torch.no_grad():
            jitted(tokens(1))
        assert ("1 from disk" in str(forge.explain(jitted))) is was_there


def test_autocast_computes_in_its_dtype() -> None:
    jitted = forge.jit(Model(), transforms=[Int8WeightOnly()])
    for rows in (1, 9):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            actual, expected = jitted(tokens(rows)), dequantized(jitted)(tokens(rows))
        assert actual.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_two_transforms_quantize_different_layers() -> None:
    only = [Int4WeightOnly(16, filter_fn=lambda module, name: name == "up"), Int8WeightOnly()]
    jitted = forge.jit(Model(), transforms=only)
    assert jitted.up.weight.dtype == torch.uint8
    assert jitted.down.weight.dtype == torch.int8
    with torch.no_grad():
        torch.testing.assert_close(jitted(tokens(9)), dequantized(jitted)(tokens(9)))


# layers that are not quantized


def test_a_filter_chooses_layers() -> None:
    seen = []
    transform = Int8WeightOnly(filter_fn=lambda module, name: seen.append(name) or name != "head")
    jitted = forge.jit(Model(), transforms=[transform])
    assert seen == ["up", "down", "head"]
    assert type(jitted.head) is nn.Linear
    assert jitted.head.weight is jitted.embed.weight


class Special(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model[1:]


@pytest.mark.parametrize(
    ("model", "transform", "reason"),
    [
        (Special(8, 8), Int8WeightOnly(), "its class is Special, and not torch.nn.Linear"),
        (nn.Linear(24, 8), Int4WeightOnly(16), "rows of 24 elements are no multiple of the group size 16"),
        (nn.Linear(8, 8).double(), Int8WeightOnly(), "the weight is torch.float64"),
        (nn.Linear(8, 0), Int8WeightOnly(), "the weight has no elements"),
        (nn.LazyLinear(8), Int8WeightOnly(), "its class is LazyLinear"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), Int8WeightOnly(), "its class is ParametrizedLinear"),
        (nn.TransformerEncoderLayer(8, 2, 8), Int8WeightOnly(), "TransformerEncoderLayer reads its weight itself"),
        (nn.ReLU(), Int8WeightOnly(), "has no torch.nn.Linear that filter_fn takes"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, (nn.Module, Quantization)) else each,
)
def test_a_module_without_a_layer_to_quantize_is_an_error(
    model: nn.Module, transform: Quantization, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"quantized no layer of(?s:.*){reason}"):
        forge.jit(model, transforms=[transform])


def test_layers_that_cannot_be_quantized_stay() -> None:
    model = nn.Sequential(nn.Linear(24, 32), Special(32, 32), nn.Linear(32, 8))
    jitted = forge.jit(model, transforms=[Int4WeightOnly(32)])
    x = torch.randn(4, 24)
    assert [type(each) for each in jitted] == [nn.Linear, Special, QuantizedLinear]
    with torch.no_grad():
        assert (jitted(x) - model(x)).abs().max() < 0.5


def test_trained_layers_of_a_frozen_model_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    jitted = forge.jit(model, transforms=[Int8WeightOnly()])
    assert isinstance(jitted[0], QuantizedLinear)
    assert type(jitted[1]) is nn.Linear


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Int8WeightOnly(0), ValueError, "group_size is 0, but must be a positive number"),
        (lambda: Int8WeightOnly("8"), TypeError, "group_size is '8', but must be a positive number"),
        (lambda: Int4WeightOnly(7), ValueError, "group_size is 7, but must be an even number"),
        (lambda: Int4WeightOnly(symmetric=1), TypeError, "symmetric is 1, but must be True or False"),
        (lambda: Float8WeightOnly(torch.int8), ValueError, "weight_dtype is torch.int8, but must be one of"),
        (lambda: Int8WeightOnly(filter_fn="head"), TypeError, "filter_fn is 'head', but must be a function"),
    ],
)
def test_wrong_options_are_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_exported_program_calls_the_operators() -> None:
    jitted = forge.jit(Model(), transforms=[Int8WeightOnly()])
    exported = torch.export.export(jitted, (tokens(9),))
    assert "forge.linear_int8" in str(exported.graph)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(tokens(9)), jitted(tokens(9)))


def test_a_bias_of_another_dtype_is_torchs_error() -> None:
    jitted = forge.jit(nn.Linear(64, 32), transforms=[Int8WeightOnly()])
    with pytest.raises(RuntimeError, match="dtype"):
        jitted(torch.randn(9, 64).bfloat16())
