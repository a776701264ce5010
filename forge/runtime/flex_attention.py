"""flex_attention in a program: torch compiles its kernel for the given functions.

In eager it materializes all scores.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from forge.ir.bounded import BoundedDict
from forge.ir.source import warn
from forge.torch_internals.dynamo import TorchDynamoException, lookup_backend, mark_static
from forge.torch_internals.functorch import allow_retained_graph, functorch_config

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
_numbers = itertools.count()
_compiled: BoundedDict[tuple, Callable] = BoundedDict(64)  # identical layers share a function


class CompiledFlexAttention:
    """flex_attention as a Dynamo graph calls it, compiled by torch.compile at its first call.

    New lengths recompile it as torch.compile does: the second one makes them symbolic. If torch cannot compile
    it, it runs in eager, with a warning.
    """

    def __init__(self) -> None:
        self._runs_in_eager = False
        self._compiled: tuple[tuple, Callable] | None = None  # with the key of the last call

    def __call__(self, *args: Any) -> Any:
        """Return (output, logsumexp, maxima) for the arguments of torch's operator. Either of the last two is zeros
        unless `kernel_options` requests it."""
        if self._runs_in_eager:
            return FLEX_ATTENTION(*args)
        query, key, value, score_mod, (*sparsity, mask_mod), scale, kernel_options, score_buffers, mask_buffers = args
        if self._compiled is None or self._compiled[0] != (score_mod, mask_mod, kernel_options):
            self._compiled = (score_mod, mask_mod, dict(kernel_options)), _compile(score_mod, mask_mod, kernel_options)
        attend = self._compiled[1]
        try:
            results = attend(query, key, value, sparsity, scale, score_buffers, mask_buffers)
        except TorchDynamoException as failure:
            self._runs_in_eager = True
            reason = str(failure).strip().partition("\n")[0]
            warn(f"flex_attention runs in eager, where it holds all scores: torch cannot compile it: {reason}")
            return FLEX_ATTENTION(*args)
        allow_retained_graph(results[0])  # forge retains torch's graph for a backward that runs again
        rows = _zero(query.device).expand(query.shape[:-1])
        return tuple(rows if each is None else each for each in results)


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    """Return the scalar placeholder of a result that was not requested."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.float32, device=device)


def _compile(score_mod: GraphModule, mask_mod: GraphModule, kernel_options: dict[str, Any]) -> Callable:
    """Return a function that returns the results of flex_attention, None for those not requested."""
    identity = _identity(score_mod), _identity(mask_mod), repr(sorted(kernel_options.items()))
    if identity not in _compiled:
        options = dict(kernel_options)
        output_mask = [True, *map(options.get, ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"))]

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            sparsity: list[Any],
            scale: float,
            score_buffers: tuple,
            mask_buffers: tuple,
        ) -> Any:
            def score(*at: Any) -> Any:
                return score_mod(*at, *score_buffers)

            def mask(*at: Any) -> Any:
                return mask_mod(*at, *mask_buffers)

            for each in query, key, value:
                mark_static(each, -3)
                mark_static(each, -1)
            results = FLEX_ATTENTION(query, key, value, score, (*sparsity, mask), scale, options)
            return [each if is_wanted else None for each, is_wanted in zip(results, output_mask, strict=True)]

        name = f"flex_attention_{next(_numbers)}"
        attend.__code__ = attend.__code__.replace(co_name=name)  # Dynamo caches by code object
        _compiled[identity] = torch.compile(attend, backend=_compile_graph, fullgraph=True)
    return _compiled[identity]


def _compile_graph(graph: GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """Return the function that Inductor compiles from a graph, whose backward may run again."""
    with functorch_config.patch(donated_buffer=False):
        return lookup_backend("inductor")(graph, inputs)


def _identity(graph: GraphModule) -> str | int:
    """Return the code of a graph, or a unique key if it holds more than code."""
    holds = next(graph.children(), None) is not None or next(graph.buffers(), None) is not None
    return id(graph) if holds else graph.code
