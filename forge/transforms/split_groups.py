"""Grouped convolutions as one convolution of each group, where cuDNN's kernels of all groups are slow.

    conv1d(x, weight, bias, groups=2) = cat([conv1d(x[:, :c], weight[:k], bias[:k]), conv1d(x[:, c:], ...)], 1)

cuDNN computes some grouped convolutions of half precision without tensor cores. The one that embeds positions in
wav2vec 2.0 and its successors (768 channels, 16 groups, 128 wide) takes 34 ms on an H200, and its groups take 0.8 ms.
Which are slow follows from no property of the call: at 96 wide the same one takes 0.3 ms. Candidates are timed on the
device, once in a process.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from forge import torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.ir.bounded import BoundedDict
from forge.ir.proxies import hint_of
from forge.support.timing import time_candidates
from forge.torch_internals.dispatch import disable_current_modes
from forge.transforms.grad import active_names, is_differentiated
from forge.transforms.replacement import rewrite

_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torchlang.conv1d: torch.conv1d,
    torchlang.conv2d: torch.conv2d,
    torchlang.conv3d: torch.conv3d,
}
_HALF = frozenset({torch.float16, torch.bfloat16})
_FEWEST_TERMS = 2048  # of a result: cuDNN has fast kernels for shorter sums
_MOST_GROUPS = 64  # each of which takes several launches
_GAIN = 2.0  # the ratio of times from which the groups are apart, far beyond what measurements vary
_apart: BoundedDict[Any, bool] = BoundedDict(256)

Decision = Callable[[Symbol, dict[str, Any], bool], bool]


def is_slow_in_cudnn(function: Symbol, arguments: dict[str, Any], flows: bool) -> bool:
    """Return whether a grouped convolution takes more than twice the time of one convolution of each group.

    flows: whether its gradients are computed.
    """
    x, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    terms = math.prod(map(hint_of, weight.shape[1:]))
    if x.device.type != "cuda" or x.dtype not in _HALF or groups > _MOST_GROUPS or terms < _FEWEST_TERMS:
        return False
    leaves = {name: _hints(value) if isinstance(value, TensorProxy) else value for name, value in arguments.items()}
    key = (function.id, x.dtype, x.device, flows, *map(str, leaves.values()))
    if key not in _apart:
        _apart[key] = _measure(_FUNCTIONS[function], leaves, x, flows)
    return _apart[key]


def split_groups(
    trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True, is_slow: Decision = is_slow_in_cudnn
) -> Trace:
    """Return the trace with the groups of slow convolutions apart.

    Args:
        trace: A program of torch's functions.
        in_torch: Returns whether a call runs as torch runs it.
        is_slow: Decides for a convolution, its arguments by name, and whether gradients flow through it.
    """
    if _FUNCTIONS.keys().isdisjoint(bound.symbol for bound in trace.bound_symbols):
        return trace
    active = active_names(trace)

    def rule(call: BoundSymbol) -> TensorProxy | None:
        if call.symbol not in _FUNCTIONS or not in_torch(call):
            return None
        arguments = call.symbol.bind(call.args, call.kwargs)
        groups, is_batched = arguments["groups"], arguments["input"].ndim == arguments["weight"].ndim
        if groups == 1 or not is_batched or arguments["weight"].shape[1] == 1:
            return None
        flows = is_differentiated(call) and not active.isdisjoint(call.inputs)
        return _by_group(call.symbol, arguments) if is_slow(call.symbol, arguments, flows) else None

    return rewrite(trace, "split_groups", rule)


def _by_group(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Return the convolution of torch's or forge's tensors, by a convolution of each group."""
    groups, apart = arguments["groups"], arguments | {"groups": 1}
    images = torch.chunk(arguments["input"], groups, 1)
    weights = torch.chunk(arguments["weight"], groups)
    biases = (None,) * groups if arguments["bias"] is None else torch.chunk(arguments["bias"], groups)
    operands = zip(images, weights, biases, strict=True)
    return torch.cat([function(**apart | {"input": x, "weight": w, "bias": b}) for x, w, b in operands], 1)


# measurements


def _hints(x: TensorProxy) -> tuple[int, ...]:
    return tuple(map(hint_of, x.shape))


def _measure(function: Callable[..., torch.Tensor], leaves: dict[str, Any], x: TensorProxy, flows: bool) -> bool:
    """Return whether the groups apart are faster. leaves: the arguments, with shapes in place of tensors."""
    with disable_current_modes(), torch.set_grad_enabled(flows):
        tensors = {
            name: None if leaves[name] is None else torch.zeros(leaves[name], dtype=x.dtype, device=x.device)
            for name in ("input", "weight", "bias")
        }
        operands = [each.requires_grad_(flows) for each in tensors.values() if each is not None]
        arguments = leaves | tensors

        def run(convolve: Callable[[], torch.Tensor]) -> None:
            result = convolve()
            if flows:
                torch.autograd.grad(result, operands, torch.zeros_like(result))

        seconds = time_candidates(
            {
                "together": lambda: run(lambda: function(**arguments)),
                "apart": lambda: run(lambda: _by_group(function, arguments)),
            },
            x.device,
        )
    return seconds["together"] > _GAIN * seconds["apart"]
