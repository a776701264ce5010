"""The cases of models in training with real widths (zoo.py's constants for FORGE_ZOO=wide): in bfloat16, under
autocast, and called often enough for CUDA graphs."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

import forge
from forge.runtime.tiering import CALLS_TO_RECORD
from tests.gpu.cases import Case, Skipped
from tests.gpu.measure import judge, nudged
from tests.models.test_models import loss_of, outputs
from tests.models.zoo import MODELS

Make = Callable[[], tuple[nn.Module, dict[str, Any]]]
SECONDS = 400.0


def cases(first: bool = False) -> dict[str, Case]:
    """Return every case by name. first: the cases of one model at the widths at which its gradients were once wrong."""
    makers = GEMMAS if first else MODELS
    kinds = {
        "bfloat16": (torch.bfloat16, False, 1),
        "autocast": (torch.float32, True, 1),
        "recorded": (torch.bfloat16, False, CALLS_TO_RECORD + 8),
    }
    return {
        f"model/{name}/{kind}": Case(partial(_run, make, *how), SECONDS)
        for name, make in makers.items()
        for kind, how in kinds.items()
    }


def _run(make: Make, dtype: torch.dtype, autocast: bool, calls: int, device: torch.device) -> tuple[str, str]:
    """Judge the last of some calls of a jitted model."""
    torch.manual_seed(0)
    model, arguments = make()
    model = model.train().to(device, dtype)
    arguments = _pytree.tree_map(lambda leaf: _moved(leaf, device, dtype), arguments)

    def flow(model: nn.Module, arguments: dict, function: Callable, *, mixed: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            result = function(**arguments)
            loss = loss_of(result)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [*(each.detach() for each in outputs(result)), *gradients]

    eager, compiled = copy.deepcopy(model), copy.deepcopy(model)
    try:
        theirs = flow(eager, arguments, eager, mixed=autocast)
    except Exception as error:
        raise Skipped(f"eager refuses it: {str(error).partition(chr(10))[0]}") from error
    try:
        jitted = forge.jit(compiled)
        for _ in range(calls):
            ours = flow(compiled, arguments, jitted, mixed=autocast)
    except Exception as error:
        if _fails_in_dynamo(model, arguments, partial(flow, mixed=autocast), type(error)):
            raise Skipped(f"torch.compile fails too: {str(error).partition(chr(10))[0]}") from error
        raise

    def nearby(draw: int | None) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model and its arguments, or perturbed ones in the same dtype."""
        if draw is None:
            return copy.deepcopy(model), arguments
        near, given = copy.deepcopy(model), _neighbours(arguments, draw)
        with torch.no_grad():
            for parameter, value in zip(near.parameters(), _neighbours(list(model.parameters()), draw), strict=True):
                parameter.copy_(value)
        return near, given

    def reference(draw: int | None) -> list[torch.Tensor | None]:
        near, given = nearby(draw)
        wide = _in_float64(near)
        torch.set_default_dtype(torch.float64)
        try:
            with _Float64():
                return flow(wide, nudged(given, torch.bfloat16, None), wide, mixed=False)
        finally:
            torch.set_default_dtype(torch.float32)

    def neighbour(draw: int) -> list[torch.Tensor | None]:
        near, given = nearby(draw)
        return flow(near, given, near, mixed=autocast)

    def again(draw: int) -> list[torch.Tensor | None]:
        near, given = nearby(draw)
        jitted = forge.jit(near)
        return [flow(near, given, jitted, mixed=autocast) for _ in range(calls)][-1]

    return judge(ours, theirs, reference, neighbour, again)


def _fails_in_dynamo(model: nn.Module, arguments: dict, flow: Callable, error: type[Exception]) -> bool:
    """Return whether torch.compile, with a backend that compiles nothing, raises the same error: the model fails in
    capture."""
    again = copy.deepcopy(model)
    torch._dynamo.reset()
    try:
        flow(again, arguments, torch.compile(again, backend="eager"))
    except error:
        return True
    return False


def _neighbours(tree: Any, draw: int) -> Any:
    """Return numbers half an eps of bfloat16 away, rounded to their own dtypes."""
    near = nudged(tree, torch.bfloat16, draw)
    return _pytree.tree_map(lambda leaf, of: leaf.to(of.dtype) if isinstance(leaf, torch.Tensor) else leaf, near, tree)


class _Float64(TorchFunctionMode):
    """A mode for linear functions that a model computes in float32 whatever its dtype, with parameters in float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear and (args[0].dtype, args[1].dtype) == (torch.float32, torch.float64):
            args = (args[0].double(), *args[1:])
        return func(*args, **(kwargs or {}))


def _in_float64(model: nn.Module) -> nn.Module:
    """Return a copy whose experts are multiplied one by one, because torch's grouped product does not support
    float64."""
    wide = copy.deepcopy(model).double()
    for part in wide.modules():
        config = getattr(part, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
    return wide


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)


def _gemma(key_heads: int, head_dim: int, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=1152,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        use_cache=False,
    )
    ids = torch.randint(3, 2048, (4, 1024))
    return transformers.Gemma3ForCausalLM(config), {"input_ids": ids, "labels": ids}


GEMMAS = {
    f"gemma3-{key_heads}x{head_dim}-{layers}": partial(_gemma, key_heads, head_dim, layers)
    for key_heads, head_dim, layers in ((1, 256, 2), (1, 256, 3), (1, 128, 2), (2, 256, 2), (4, 256, 2), (4, 64, 2))
}
