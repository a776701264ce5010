"""Requested kernels and layers that are not used: one warning each, with the reason."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.capture.handles import handle_of


def silu(input: torch.Tensor) -> torch.Tensor:
    return input * torch.sigmoid(input)


def kernel(name: str, **options: Any) -> Any:
    how = {"dtypes": [torch.float32], "device": "cpu", "name": name, **options}
    return forge.kernel(F.silu, silu, **how)


def told(function: Any, *inputs: torch.Tensor) -> list[str]:
    """Return forge's warnings of several calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(*inputs)
    return [str(each.message) for each in caught if str(each.message).startswith("forge: ")]


def program(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) + 1


def test_a_kernel_without_a_gradient_says_in_training_that_it_is_not_used() -> None:
    jitted = forge.jit(program, kernels=[kernel("no_gradient")])
    assert told(jitted, torch.ones(2)) == []
    (message,) = told(jitted, torch.ones(2, requires_grad=True))
    assert message == (
        "forge: program: kernel no_gradient is not used for torch.nn.functional.silu: the implementation has no "
        "gradient, and one is needed"
    )


def test_a_kernel_with_a_gradient_is_used_without_a_word() -> None:
    jitted = forge.jit(program, kernels=[kernel("differentiable", grad="composite")])
    assert told(jitted, torch.ones(2, requires_grad=True)) == []
    assert "differentiable" in {row.executor for row in forge.explain(jitted).rows}


def test_a_kernel_that_takes_no_call_is_told_with_the_reason() -> None:
    wanted = (
        "forge: program: no kernel of of_doubles is used: of_doubles declined torch.nn.functional.silu: dtype float32"
    )
    (message,) = told(forge.jit(program, kernels=[kernel("of_doubles", dtypes=[torch.float64])]), torch.ones(2))
    assert message.startswith(wanted)
    (message,) = told(forge.jit(torch.sin, kernels=[kernel("of_silu")]), torch.ones(2))
    assert message == "forge: sin: no kernel of of_silu is used: nothing calls torch.nn.functional.silu"


def test_a_rejected_kernel_gives_one_warning_at_the_users_line() -> None:
    wrong = forge.kernel(F.silu, lambda input: input, dtypes=[torch.float32], name="of_wrong_values")
    jitted = forge.jit(program, kernels=[wrong])
    with pytest.warns(
        UserWarning, match=r"forge: kernel of_wrong_values of torch.nn.functional.silu is not used: "
    ) as of:
        jitted(torch.ones(2))
        jitted(torch.ones(2, 2))
    assert [each.filename for each in of if str(each.message).startswith("forge: ")] == [__file__]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allow_imports": ["einops"]}, ["allow_imports=['einops'] has no effect without kernels= or layers="]),
        ({"layers": {}}, ["layers={} names no layer"]),
        ({"allow_imports": ["einops"], "kernels": [kernel("einops_user")]}, []),
        ({}, []),
    ],
)
def test_an_option_without_effect_is_told(options: dict, expected: list[str]) -> None:
    assert told(forge.jit(program, **options), torch.ones(2)) == [f"forge: program: {each}" for each in expected]


class RMSNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


MODEL = nn.Sequential(RMSNorm(), nn.Tanh())
TYPO = "no module is a 'RMSNrm', for which layers= names a layer; did you mean 'RMSNorm'?"
OTHER = "no module is a 'Attention', for which layers= names a layer; they are RMSNorm, Sequential, Tanh"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"RMSNrm": Doubled}, [TYPO]),
        ({"RMSNrm": Doubled, "Attention": Doubled, "RMSNorm": Doubled}, [TYPO, OTHER]),
        ({RMSNorm: Doubled}, []),
        ({nn.GELU: Doubled}, ["no module is a 'GELU', for which"]),
    ],
)
def test_a_name_of_layers_that_no_module_has_is_told_with_the_close_ones(layers: dict, expected: list[str]) -> None:
    for target, name in ((MODEL, "Sequential"), (lambda x: MODEL(x), "<lambda>")):
        messages = told(forge.jit(target, layers=layers), torch.ones(2))
        assert len(messages) == len(expected)
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(f"forge: {name}: {start}")


class NoBackward(Doubled):
    has_backward = False


class OfTwo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Stateful(Doubled):
    def __init__(self) -> None:
        super().__init__()


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (NoBackward, "has has_backward = False, and a gradient is needed"),
        (OfTwo, "its forward takes (x: torch.Tensor, y: torch.Tensor), and that of the module (x: torch.Tensor)"),
        (Stateful, "it has a constructor of its own, and a layer has no state"),
    ],
)
def test_a_layer_that_does_not_fit_is_told_once_for_a_class(layer: type, reason: str) -> None:
    model = nn.Sequential(RMSNorm(), nn.Tanh(), RMSNorm())
    (message,) = told(forge.jit(model, layers={"RMSNorm": layer}), torch.ones(2, requires_grad=True))
    assert message.startswith("forge: Sequential: the layer for 0 (RMSNorm) is not used: ")
    assert message.endswith(reason)


def test_a_layer_without_a_backward_is_used_in_inference_without_a_word() -> None:
    jitted = forge.jit(MODEL, layers={"RMSNorm": NoBackward})
    assert told(jitted, torch.ones(2)) == []
    (use,) = [use for compiled in handle_of(jitted).reports for use in compiled.layers]
    assert use.how


def test_a_layer_that_is_wrong_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forge.jit(MODEL, layers={"RMSNorm": Halved})(torch.ones(2))
    assert len([each for each in caught if "RMSNorm" in str(each.message) or "Halved" in str(each.message)]) == 1


class _Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def _inside(**options: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(forge.jit(_Inner(), **options)))


@pytest.mark.parametrize(
    ("target", "outer", "expected"),
    [
        (
            lambda: _inside(executors=["torch"]),
            {},
            ["executors= of the inner forge.jit of '1.0' has no effect: give it to"],
        ),
        (
            lambda: _inside(numerics="eager", memory="speed"),
            {},
            ["memory= and numerics= of the inner forge.jit"],
        ),
        (lambda: _inside(memory="speed"), {"memory": "speed"}, []),
        (_inside, {"memory": "speed"}, []),
        (lambda: forge.jit(_Inner(), memory="speed"), {}, ["memory= of the inner forge.jit has no effect: give it"]),
        (
            lambda: forge.jit(torch.tanh, memory="speed"),
            {},
            ["memory= of the inner forge.jit has no effect: give it to"],
        ),
    ],
)
def test_options_of_an_inner_forge_jit_are_told(target: Any, outer: dict, expected: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forge.jit(target(), **outer)(torch.ones(2, 2))
    messages = [str(each.message) for each in caught if "inner forge.jit" in str(each.message)]
    assert len(messages) == len(expected) and all(map(str.__contains__, messages, expected)), messages
