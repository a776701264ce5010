"""Transforms of forge.jit that replace parameters of the jitted module."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.ir import Trace
from forge.quantize import Int8WeightOnly


class Doubled(forge.ModuleTransform):
    """A transform that stores a layer's weight doubled, and halves its result."""

    def transform_module(self, module: nn.Module) -> nn.Module:
        module.weight = nn.Parameter(module.weight.detach() * 2)
        return module

    def transform_state_dict(self, state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return {name: x * 2 if name == "weight" else x for name, x in state_dict.items()}

    def reverse_transform_state_dict(self, state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return {name: x / 2 if name == "weight" else x for name, x in state_dict.items()}


class Halved(Doubled):
    """A transform of the module and of the program."""

    def transform_trace(self, trace: Trace) -> Trace:
        seen.append(trace.stage)
        return trace


seen: list[str] = []


def noted(trace: Trace) -> Trace:
    seen.append("function")
    return trace


def test_parameters_of_the_jitted_module_are_replaced_and_the_users_stay() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    jitted = forge.jit(model, transforms=[Doubled()])
    torch.testing.assert_close(jitted(x) - model.bias, 2 * (model(x) - model.bias))
    assert jitted.bias is model.bias


def test_transforms_of_modules_and_of_programs_compose_in_order() -> None:
    seen.clear()
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    jitted = forge.jit(model, transforms=[noted, Doubled(), Halved()], cache=False)
    torch.testing.assert_close(jitted(x) - model.bias, 4 * (model(x) - model.bias))
    assert seen == ["function", "recorded from Dynamo"]
    torch.testing.assert_close(forge.original_state_dict(jitted)["weight"], model.weight.detach())


def test_a_state_dict_is_brought_into_the_new_form_when_it_is_loaded() -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    jitted = forge.jit(model, transforms=[Doubled()])
    jitted.load_state_dict(other.state_dict())
    torch.testing.assert_close(jitted.weight, 2 * other.weight)
    torch.testing.assert_close(forge.original_state_dict(jitted), dict(other.state_dict()))


@pytest.mark.parametrize("copied", [lambda module: pickle.loads(pickle.dumps(module)), copy.deepcopy])
def test_a_copy_is_transformed_once(copied: Any) -> None:
    jitted = forge.jit(nn.Linear(4, 3), transforms=[Doubled()])
    other, x = copied(jitted), torch.randn(2, 4)
    torch.testing.assert_close(other(x), jitted(x))
    torch.testing.assert_close(other.weight, jitted.weight)
    torch.testing.assert_close(forge.original_state_dict(other), forge.original_state_dict(jitted))


def test_a_function_cannot_be_given_one() -> None:
    with pytest.raises(TypeError, match="needs a module that is not jitted yet; it was given <function"):
        forge.jit(lambda x: x, transforms=[Doubled()])
    with pytest.raises(TypeError, match="it was given a jitted Linear"):
        forge.jit(forge.jit(nn.Linear(4, 3)), transforms=[Doubled()])
    with pytest.raises(TypeError, match="original_state_dict: 3 is no module"):
        forge.original_state_dict(3)


def test_a_transform_must_return_a_module() -> None:
    class Broken(forge.ModuleTransform):
        def transform_module(self, module: nn.Module) -> nn.Module:
            return None

    with pytest.raises(
        TypeError, match="transform Broken: transform_module returned NoneType, but must return a module"
    ):
        forge.jit(nn.Linear(4, 3), transforms=[Broken()])


def test_an_error_of_a_transform_names_it() -> None:
    class Broken(forge.ModuleTransform):
        def transform_module(self, module: nn.Module) -> nn.Module:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        forge.jit(nn.Linear(4, 3), transforms=[Broken()])
    assert caught.value.__notes__ == ["raised by forge.jit's transform Broken: transform_module"]


def test_torch_compile_cannot_be_given_one() -> None:
    compiled = torch.compile(nn.Linear(4, 3), backend="forge", options={"transforms": [Doubled()]})
    with pytest.raises(Exception, match=r"Doubled replaces parameters, which forge\.jit\(module\) alone can do"):
        compiled(torch.randn(2, 4))


def test_a_module_that_cannot_be_copied_is_named() -> None:
    model = nn.Linear(4, 3)
    model.generator = (x for x in ())
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        forge.jit(model, transforms=[Doubled()])
    assert caught.value.__notes__ == [
        "raised by copy.deepcopy of the module, in whose copy forge.jit's transforms replace parameters"
    ]


def test_a_class_in_place_of_a_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a transform is the class .*Int8WeightOnly.*, but must be an object of it"):
        forge.jit(nn.Linear(64, 64), transforms=[Int8WeightOnly])
