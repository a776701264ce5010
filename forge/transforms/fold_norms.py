"""Batch norms in evaluation are folded into the weights of the preceding layer.

    batch_norm(conv(x, weight, bias)) = conv(x, weight * scale, (bias - mean) * scale + shift),
    scale = gamma / sqrt(var + eps)

if weight, bias and statistics are all weights of a frozen program. The calls that scale them depend on weights
alone, so that they are folded like others. Only rounding differs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.transforms.freezing import Freezing
from forge.transforms.makers import Makers
from forge.transforms.replacement import rewrite

NORMS = frozenset({torchlang.batch_norm, torchlang.torch_batch_norm})
LINEAR = torchlang.linear
CONVOLUTIONS = frozenset({torchlang.conv1d, torchlang.conv2d, torchlang.conv3d})
TRANSPOSED = frozenset({torchlang.conv_transpose1d, torchlang.conv_transpose2d, torchlang.conv_transpose3d})
_LAYERS = CONVOLUTIONS | TRANSPOSED | {LINEAR}


class _Site(NamedTuple):
    """A batch norm and the preceding layer, by their arguments."""

    norm: dict[str, Any]
    layer: Symbol[TensorProxy]
    arguments: dict[str, Any]


def fold_norms(trace: Trace, freezing: Freezing, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True) -> Trace:
    """Return the trace with batch norms folded into the preceding convolutions and linear layers.

    `in_torch` returns whether a call runs as torch runs it: one for which the user selected another kernel stays.
    """
    norms = [bound for bound in trace.bound_symbols if bound.symbol in NORMS]
    if not norms:
        return trace
    search = _Search(trace, freezing, in_torch)
    sites: dict[str, _Site] = {}
    for bound in norms:
        site = search.site(bound)
        name = freezing.owner(bound.symbol.bind(bound.args, bound.kwargs)["running_mean"].name, search.makers)
        if isinstance(site, str):
            freezing.misses.append(f"batch norm {name}: {site}")
        else:
            sites[bound.output.name] = site
            layer = freezing.owner(site.arguments["weight"].name, search.makers)
            freezing.folds.append(f"batch norm {name} in the weights of {layer}")
    return _rewrite(trace, sites) if sites else trace


class _Search:
    def __init__(self, trace: Trace, freezing: Freezing, in_torch: Callable[[BoundSymbol], bool]) -> None:
        self.in_torch = in_torch
        self.values = freezing.values(trace)
        self.makers = Makers(trace)
        self.outputs = set(trace.output_names)
        self.readers: dict[str, int] = {}
        for bound in trace.bound_symbols:
            for name in bound.inputs:
                self.readers[name] = self.readers.get(name, 0) + 1

    def site(self, bound: BoundSymbol) -> _Site | str:
        """Return the layer that a batch norm is folded into, or the reason why it is not."""
        norm = bound.symbol.bind(bound.args, bound.kwargs)
        x = norm["input"]
        maker = self.makers.calls.get(x.name)
        if maker is None or maker.symbol not in _LAYERS:
            return "no convolution or linear layer is before it"
        if x.name in self.outputs or self.readers[x.name] > 1:
            return "what it normalizes is used elsewhere, too"
        if not (self.in_torch(bound) and self.in_torch(maker)):
            return "a kernel that was named for it runs it, or the layer before it"
        if bound.mode != maker.mode:
            return "gradients of it and of the layer before it are not alike"
        arguments = maker.symbol.bind(maker.args, maker.kwargs)
        read = [norm[name] for name in ("running_mean", "running_var", "weight", "bias")]
        read += [arguments["weight"], arguments["bias"]]
        if not all(value is None or value.name in self.values for value in read):
            return "a weight or statistic of it, or of the layer before it, is no weight that stays as it is"
        if not _fits(maker.symbol, arguments, norm, bound.output):
            return "its channels are not those of the layer before it, or dtypes differ"
        source = self._wide(arguments["weight"])
        return _Site(norm, maker.symbol, {**arguments, "weight": source, "dtype": arguments["weight"].dtype})

    def _wide(self, weight: TensorProxy) -> TensorProxy:
        """Return the weight before it was rounded to the dtype in which the layer runs."""
        call = self.makers.prim(weight.name)
        if call is None or call.symbol is not prims.convert_element_type or call.args[0].name not in self.values:
            return weight
        source = call.args[0]
        return source if source.is_floating_point() and source.element_size() > weight.element_size() else weight


def _fits(layer: Symbol, arguments: dict[str, Any], norm: dict[str, Any], output: TensorProxy) -> bool:
    """Return whether each channel of the norm is one of the layer's own output and torch accepts its dtypes: the input
    has a batch, and no rows lie between."""
    x, weight = norm["input"], arguments["weight"]
    rank = 2 if layer is LINEAR else weight.ndim
    statistics = [norm[name] for name in ("running_mean", "running_var", "weight", "bias") if norm[name] is not None]
    (kind, *others) = {tensor.dtype for tensor in statistics}
    is_supported = not others and (
        kind == x.dtype or (kind == torch.float32 and x.dtype in (torch.bfloat16, torch.float16))
    )
    return is_supported and weight.ndim >= 2 and x.ndim == rank and x.dtype == weight.dtype == output.dtype


def _rewrite(trace: Trace, sites: dict[str, _Site]) -> Trace:
    def layer(bound: BoundSymbol) -> TensorProxy | None:
        site = sites.get(bound.output.name) if bound.symbol in NORMS else None
        return None if site is None else _layer_of(site)

    return rewrite(trace, "fold_norms", layer, language=clang.language)


def _layer_of(site: _Site) -> TensorProxy:
    """Return the layer with the norm in its weights, which are computed in the widest dtype involved."""
    norm, arguments = site.norm, dict(site.arguments)
    dtype, weight, bias = arguments.pop("dtype"), arguments["weight"], arguments["bias"]
    wide = clang.wider(torch.promote_types(weight.dtype, norm["running_var"].dtype))
    scale = clang.rsqrt(clang.convert(norm["running_var"], wide) + norm["eps"])
    if norm["weight"] is not None:
        scale = scale * clang.convert(norm["weight"], wide)
    shift = -clang.convert(norm["running_mean"], wide)
    if bias is not None:
        shift = clang.convert(bias, wide) + shift
    shift = shift * scale
    if norm["bias"] is not None:
        shift = shift + clang.convert(norm["bias"], wide)
    scaled = _scale(site.layer, clang.convert(weight, wide), scale, arguments.get("groups", 1))
    arguments["weight"], arguments["bias"] = clang.convert(scaled, dtype), clang.convert(shift, dtype)
    return site.layer(*arguments.values())


def _scale(layer: Symbol, weight: TensorProxy, scale: TensorProxy, groups: int) -> TensorProxy:
    """Return the weight times the scale of each channel of the output."""
    if layer not in TRANSPOSED:
        return weight * clang.reshape(scale, (weight.shape[0], *[1] * (weight.ndim - 1)))
    kernel = weight.shape[2:]
    grouped = clang.reshape(weight, (groups, weight.shape[0] // groups, weight.shape[1], *kernel))
    scaled = grouped * clang.reshape(scale, (groups, 1, weight.shape[1], *[1] * len(kernel)))
    return clang.reshape(scaled, weight.shape)
