"""Programs of the two processes of tests/distributed/test_sharded_models.py: sharded models of transformers, entries of
a model other than its forward, and changes of a sharded model."""

import contextlib
import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_programs import Llama, whole
from sharded_programs import SMALL, Uneven, _fsdp2, _model, _told, _train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forge
from forge.distributed import ShardPolicy, register_forward_method, shard
from tests.models.zoo import MODELS

# training


def _build(name: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    return MODELS[name]()


def _reference(model: nn.Module) -> nn.Module:
    """Return the model under FSDP2, or under DDP if it has a 0-d parameter, which FSDP2 refuses."""
    if any(each.ndim == 0 for each in model.parameters()):
        return DistributedDataParallel(model)
    for module in reversed(list(model.modules())):  # the innermost first
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    return fully_shard(model)


def _steps(model: nn.Module, name: str, rank: int) -> list[Any]:
    """Return the losses and gradients of three steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        loss = model(**_build(name, 2 * step + rank)[1]).loss
        loss.backward()
        found += [loss.detach(), *[None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return found


PREPARED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard": lambda model: forge.jit(shard(model, policy=SMALL)),
    "fully_shard": lambda model: forge.jit(fully_shard(model)),
}


def trained_transformer(rank: int, name: str, how: str = "shard") -> dict[str, Any]:
    """Return the results of training a model of the zoo under FSDP2 in eager, and jitted."""
    warnings.simplefilter("ignore")  # transformers'
    reference, jitted = _reference(_build(name, 0)[0]), PREPARED[how](_build(name, 0)[0])
    return {"eager": _steps(reference, name, rank), "forge": _steps(jitted, name, rank)}


class Autocast(nn.Module):
    """A model that runs under autocast, which caches casts of weights for one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(tokens)


def under_autocast(rank: int) -> dict[str, Any]:
    """Return the results of a step under autocast under FSDP2 in eager, and jitted."""
    jitted = forge.jit(shard(_model(Llama), policy=SMALL), numerics="eager")
    found = {
        how: _train(Autocast(model), rank, steps=1)
        for how, model in (("eager", _fsdp2(_model(Llama))), ("forge", jitted))
    }
    return {**found, **_told(jitted)}


def with_a_default_device(rank: int) -> dict[str, Any]:
    """Return the results of training with a default device under FSDP2 in eager, and jitted."""
    torch.set_default_device("cpu")
    try:
        jitted = forge.jit(shard(_model(Uneven), policy=SMALL))
        return {"eager": _train(_fsdp2(_model(Uneven)), rank), "forge": _train(jitted, rank), **_told(jitted)}
    finally:
        torch.set_default_device(None)


# entries


class Entries(nn.Module):
    """A model called through methods other than its forward, and through its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        y = self(x, depth - 1) if depth else x
        return self.head(self.encoder(y)) * self.scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(self(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) * self.scale

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError):
            self.encoder(None)
        return self(x)


ENTRIES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "its forward calls it": lambda model, x: model(x),
    "the forward itself": lambda model, x: model.forward(x),
    "a method that calls modules": lambda model, x: model.encode(x),
    "a method that calls the model": lambda model, x: model.again(x),
    "a module": lambda model, x: model.encoder(x),
    "a module of a module": lambda model, x: model.encoder[0](x),
    "a slice": lambda model, x: model.encoder[:2](x),
    "a copy of a module": lambda model, x: copy.deepcopy(model.encoder)(x),
    "a method that is registered": lambda model, x: model.scaled(x),
    "a registered method of a copy": lambda model, x: copy.deepcopy(model).scaled(x),
    "after an error": lambda model, x: model.fail(x),
}


def entered(rank: int, entry: str) -> dict[str, Any]:
    """Return results and gradients of an entry of a plain, a sharded and a jitted model, and the state of attributes
    afterwards."""
    found: dict[str, Any] = {"outside": []}
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    for how, prepare in (("plain", lambda model: model), ("eager", shard), ("forge", lambda m: forge.jit(shard(m)))):
        model = prepare(_model(Entries))
        if how != "plain" and "registered" in entry:
            register_forward_method(model, "scaled")
        out = ENTRIES[entry](model, x)
        out.square().sum().backward()
        copied = "copy" in entry
        found[how] = [out.detach(), *[None if p.grad is None or copied else whole(p.grad) for p in model.parameters()]]
        found["outside"].append(type(model.head.weight).__name__)
    return found


def interrupted(rank: int) -> list[str]:
    """Return the state of an attribute of a jitted model after a forward that raises after a graph break, and after
    another one."""

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, error: bool) -> torch.Tensor:
            x = self.layer(x)
            torch._dynamo.graph_break()
            if error:
                raise KeyError("asked for")
            return self.layer(x)

    model, found = forge.jit(shard(Raises())), []
    for error in (True, False):
        with pytest.raises(KeyError) if error else contextlib.nullcontext():
            model(torch.ones(4), error)
        found.append(type(model.layer.weight).__name__)
    return found


def generated(rank: int) -> dict[str, Any]:
    """Return the tokens that a T5 generates, and the results of its encoder: plain, sharded, and jitted."""
    warnings.simplefilter("ignore")
    found, words = {}, torch.arange(3, 11).view(1, 8)
    for how, prepare in (("plain", lambda model: model), ("eager", shard), ("forge", lambda m: forge.jit(shard(m)))):
        model = prepare(_build("t5", 0)[0]).eval()
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            tokens = model.generate(words, max_new_tokens=3, do_sample=False)
            found[how] = [tokens, model.encoder(input_ids=words).last_hidden_state]
    return found


# changes


def _half(model: nn.Module) -> None:
    model.to(torch.bfloat16).float()


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: x.detach() * 0.5 for name, x in model.state_dict().items()}, assign=True)


def _replaced(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 0.5)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "to a device": lambda model: model.to("cpu"),
    "to a dtype and back": _half,
    "to_empty": lambda model: [nn.init.constant_(p, 0.01) for p in model.to_empty(device="cpu").parameters()],
    "load_state_dict": _assigned,
    "another parameter": _replaced,
    "frozen": lambda model: model.head.requires_grad_(False),
}


def changed(rank: int, change: str) -> dict[str, Any]:
    """Return the results of training after a change of the model: under FSDP2, changed before it runs, and jitted,
    changed after a step."""
    reference, jitted = _fsdp2(_model(Llama)), forge.jit(shard(_model(Llama), policy=SMALL))
    jitted(torch.arange(8).view(2, 4)).sum().backward()
    jitted.zero_grad()
    for model in (reference, jitted):
        CHANGES[change](model)
    return {"eager": _train(reference, rank, steps=2), "forge": _train(jitted, rank, steps=2)}


def without_a_bias(rank: int) -> dict[str, list[Any]]:
    """Return the results of a plain, a sharded and a jitted layer whose bias is None, and whether they have one after
    its deletion."""
    found: dict[str, list[Any]] = {"results": [], "there": []}
    for prepare in (lambda model: model, shard, lambda model: forge.jit(shard(model))):
        model = prepare(_model(lambda: nn.Linear(3, 3)))
        model(torch.ones(3))
        model.bias = None
        found["results"].append(model(torch.ones(3)).detach())
        del model.bias
        found["there"].append(hasattr(model, "bias"))
    return found


def whole_numbers(rank: int) -> list[torch.dtype]:
    """Return the dtypes in which a forward reads integer and floating point parameters, under param_dtype."""

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self) -> Any:
            return self.codes + 0, self.scale + 0

    model = shard(Coded(), policy=ShardPolicy(param_dtype=torch.bfloat16))
    return [each.dtype for each in (*model(), *forge.jit(model)())]


# refusals


def _plain() -> nn.Module:
    return shard(nn.Sequential(nn.Linear(2, 2)))


def _assign() -> None:
    _plain()[0].weight = nn.Parameter(torch.ones(2, 2))


def _load() -> None:
    _plain().load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict(), assign=True)


def _jitted_part() -> None:
    shard(nn.Sequential(forge.jit(nn.Linear(2, 2))))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "assigned": (_assign, TypeError, "Linear: weight is sharded, but was assigned a Parameter that is not"),
    "loaded": (_load, RuntimeError, "load whole tensors by torch.distributed.checkpoint.state_dict.set_model"),
    "pickled": (lambda: pickle.dumps(_plain()), TypeError, "Sequential: a sharded model cannot be pickled"),
    "jitted and pickled": (lambda: pickle.dumps(forge.jit(_plain())), TypeError, "save its state, by torch"),
    "saved": (lambda: torch.save(_plain()[0], io.BytesIO()), TypeError, "Linear: a sharded model cannot be pickled"),
    "a jitted module": (_jitted_part, ValueError, "the model is jitted; shard it first"),
    "a method of no sharded model": (
        lambda: register_forward_method(nn.Linear(2, 2), "forward"),
        TypeError,
        "register_forward_method: module is a Linear, but must be a sharded torch.nn.Module",
    ),
    "no method": (
        lambda: register_forward_method(_plain(), "encode"),
        ValueError,
        "register_forward_method: name is 'encode', but must be a method of Sequential",
    ),
}


def refused(rank: int, what: str) -> str:
    call, error, _ = REFUSED[what]
    with pytest.raises(error) as found:
        call()
    return re.sub(r"\s+", " ", str(found.value))
