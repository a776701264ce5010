"""forge.quantize: transforms of forge.jit that store the weights of linear layers in 8 or 4 bits an element."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from forge.ir import check
from forge.ir.checks import check_flag
from forge.runtime.module_transforms import ModuleTransform, StateDict
from forge.runtime.quantized_linear import QuantizedLinear, QuantizedWeight, Scheme
from forge.torch_internals.modules import parameters_of
from forge.torchlang.nn.quantized import FLOAT8

logger = logging.getLogger("forge")
Filter = Callable[[nn.Module, str], bool]


class Quantization(ModuleTransform):
    """A transform that quantizes the weights of linear layers (torch.nn.Linear)."""

    def __init__(self, scheme: Scheme, filter_fn: Filter | None = None) -> None:
        check(
            filter_fn is None or callable(filter_fn),
            lambda: f"forge.quantize: filter_fn is {filter_fn!r}, but must be a function of (module, name)",
            TypeError,
        )
        self.scheme = scheme
        self.filter_fn = filter_fn

    def transform_module(self, module: nn.Module) -> nn.Module:
        """Return the module with each linear layer quantized that can be.

        Args:
            module: A copy of the user's module.

        Returns:
            The module, or a quantized layer if it is itself a linear layer.

        Raises:
            ValueError: If no layer was quantized, with the reasons.
        """
        declined: dict[str, str] = {}
        quantized: dict[nn.Module, QuantizedLinear] = {}
        stored = {id(each) for _, layer in _quantized_layers(module) for each in layer.stored}
        trained = {each.requires_grad for each in module.parameters() if id(each) not in stored}
        for name, each in list(module.named_modules(remove_duplicate=False)):
            if isinstance(each, QuantizedLinear) or not (isinstance(each, nn.Linear) and self._wants(each, name)):
                continue
            parent = module.get_submodule(name.rpartition(".")[0]) if name else None
            reason = self._problem_with(each, parent, trains_parts=len(trained) == 2)
            if reason is not None:
                declined[name] = reason
                continue
            if each not in quantized:
                quantized[each] = QuantizedLinear(each, self.scheme)
            if parent is None:
                return quantized[each]
            module.set_submodule(name, quantized[each])
        reasons = "".join(f"\n  {name or 'the module'}: {reason}" for name, reason in declined.items())
        for name, reason in declined.items():
            logger.info("forge.quantize: %s is not quantized: %s", name, reason)
        check(
            bool(quantized),
            lambda: (
                f"forge.quantize: {type(self).__name__} quantized no layer of {type(module).__name__}"
                + (f":{reasons}" if reasons else ", which has no torch.nn.Linear that filter_fn takes")
            ),
        )
        return module

    def _wants(self, linear: nn.Linear, name: str) -> bool:
        return self.filter_fn is None or bool(self.filter_fn(linear, name))

    def _problem_with(self, linear: nn.Linear, parent: nn.Module | None, *, trains_parts: bool) -> str | None:
        """Return why a layer is not quantized, None if it is."""
        if type(linear) is not nn.Linear:
            return f"its class is {type(linear).__name__}, and not torch.nn.Linear"
        if "weight" not in parameters_of(linear):
            return "its weight is no parameter"
        if isinstance(parent, nn.TransformerEncoderLayer):
            return "torch.nn.TransformerEncoderLayer reads its weight itself"
        if trains_parts and linear.weight.requires_grad:
            return "its weight is trained, where others are frozen"
        return self.scheme.problem_with(linear.weight)

    def transform_state_dict(self, state_dict: StateDict, module: nn.Module) -> StateDict:
        """Return a state_dict whose weights of quantized layers are quantized.

        Args:
            state_dict: Names and tensors, in the original or the new form.
            module: The quantized module.

        Returns:
            The entries in the new form.
        """
        new = dict(state_dict)
        for prefix, layer in _quantized_layers(module):
            if f"{prefix}weight" in new and f"{prefix}scale" not in new:
                for name, value in layer.scheme.quantize(new.pop(f"{prefix}weight"))._asdict().items():
                    new |= {} if value is None else {f"{prefix}{name}": value}
        return new

    def reverse_transform_state_dict(self, state_dict: StateDict, module: nn.Module) -> StateDict:
        """Return a state_dict whose quantized weights are dequantized, in their former dtype.

        Args:
            state_dict: Names and tensors.
            module: The quantized module.

        Returns:
            The entries in the original form.
        """
        new = dict(state_dict)
        for prefix, layer in _quantized_layers(module):
            if f"{prefix}scale" in new:
                stored = QuantizedWeight(*(new.pop(f"{prefix}{name}", None) for name in QuantizedWeight._fields))
                new[f"{prefix}weight"] = layer.scheme.dequantize(stored, layer.original_dtype)
        return new


def _quantized_layers(module: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantized layers of a module, each with the prefix of its parameters' names."""
    for name, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, QuantizedLinear):
            yield f"{name}." if name else "", each


class Int8WeightOnly(Quantization):
    """Weights in 8-bit integers, with a scale for each row or group.

    Args:
        group_size: How many elements of a row share a scale. None: all.
        filter_fn: A function of (module, name); layers for which it is False stay as they are.
    """

    def __init__(self, group_size: int | None = None, *, filter_fn: Filter | None = None) -> None:
        super().__init__(Scheme("linear_int8", torch.int8, _group_size(group_size)), filter_fn)


class Int4WeightOnly(Quantization):
    """Weights in 4 bits, two in a byte, with a scale for each group.

    Args:
        group_size: How many elements of a row share a scale: an even number.
        symmetric: Have no zero points: a group's values lie around zero. It is faster, and less exact.
        filter_fn: A function of (module, name); layers for which it is False stay as they are.
    """

    def __init__(self, group_size: int = 128, *, symmetric: bool = False, filter_fn: Filter | None = None) -> None:
        check_flag(symmetric, "forge.quantize.Int4WeightOnly: symmetric")
        size = _group_size(group_size)
        check(
            size is not None and size % 2 == 0,
            lambda: f"forge.quantize.Int4WeightOnly: group_size is {size}, but must be an even number",
        )
        super().__init__(Scheme("linear_int4", torch.uint8, size, not symmetric), filter_fn)


class Float8WeightOnly(Quantization):
    """Weights in 8-bit floats, with a scale for each row.

    Args:
        weight_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        filter_fn: A function of (module, name); layers for which it is False stay as they are.
    """

    def __init__(self, weight_dtype: torch.dtype = torch.float8_e4m3fn, *, filter_fn: Filter | None = None) -> None:
        check(
            weight_dtype in FLOAT8,
            lambda: (
                f"forge.quantize.Float8WeightOnly: weight_dtype is {weight_dtype}, but must be one of "
                + ", ".join(map(str, FLOAT8))
            ),
        )
        super().__init__(Scheme("linear_fp8", weight_dtype), filter_fn)


def _group_size(size: Any) -> int | None:
    check(
        size is None or (type(size) is int and size > 0),
        lambda: f"forge.quantize: group_size is {size!r}, but must be a positive number",
        TypeError if not isinstance(size, int) else ValueError,
    )
    return size


def from_torchao(config: Any, *, filter_fn: Filter | None = None) -> Quantization:
    """Return the transform that stores weights as a config of torchao says.

    Args:
        config: torchao's Int8WeightOnlyConfig, Int4WeightOnlyConfig or Float8WeightOnlyConfig.
        filter_fn: A function of (module, name), as of torchao's quantize_; layers for which it is False stay as they
            are.

    Returns:
        A transform for forge.jit.

    Raises:
        TypeError: For another config.
    """
    name = type(config).__name__
    is_torchaos = type(config).__module__.partition(".")[0] == "torchao" and name in _OF_TORCHAO
    check(
        is_torchaos,
        lambda: (
            f"forge.quantize.from_torchao: config is {config!r}, but must be one of torchao's "
            f"{', '.join(_OF_TORCHAO)}; a model that torchao quantized is jitted as it is"
        ),
        TypeError,
    )
    return _OF_TORCHAO[name](config, filter_fn)


_OF_TORCHAO: dict[str, Callable[[Any, Filter | None], Quantization]] = {
    "Int8WeightOnlyConfig": lambda config, filter_fn: Int8WeightOnly(config.group_size, filter_fn=filter_fn),
    "Int4WeightOnlyConfig": lambda config, filter_fn: Int4WeightOnly(config.group_size, filter_fn=filter_fn),
    "Float8WeightOnlyConfig": lambda config, filter_fn: Float8WeightOnly(config.weight_dtype, filter_fn=filter_fn),
}
