"""Programs of the two processes of tests/distributed/test_explained.py, beside tests/distributed_programs.py."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from distributed_programs import Llama, parallel

import forge
from forge.distributed import ShardPolicy, shard

_SMALL = ShardPolicy(bucket_mb=0.004, prefetch_mb=0.004)  # several messages for a small model
_TOKENS = torch.arange(16).view(2, 8)


def _step(jitted: Any) -> None:
    jitted(_TOKENS).square().mean().backward()


def sharded_report(rank: int) -> dict[str, Any]:
    """Return the report of a sharded model, profiled in the first process alone, and the bytes of its parameters."""
    torch.manual_seed(0)
    model = Llama()
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    jitted = forge.jit(shard(model, policy=_SMALL))
    _step(jitted)
    found = forge.explain(jitted, profile=rank == 0)
    rows = [dataclasses.asdict(row) for row in found.collectives]
    return {"rows": rows, "text": str(found), "size": size, "unprofiled": found.unprofiled, "costs": len(found.costs)}


def cut_report(rank: int) -> list[dict[str, Any]]:
    """Return the collectives of a model with cut products."""
    jitted = forge.jit(parallel("columns and rows"))
    _step(jitted)
    return forge.explain(jitted).to_dict()["collectives"]


def reports_from_disk(rank: int, folder: str) -> tuple[list[Any], list[Any], int]:
    """Return the collectives of a program and of the same program read from disk, and the number of programs that were
    read."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_CACHE", "1")
        patch.setenv("FORGE_CACHE_DIR", folder)
        for _ in range(2):
            torch.compiler.reset()
            jitted = forge.jit(parallel("columns and rows"))
            _step(jitted)
            found.append(forge.explain(jitted))
    return found[0].collectives, found[1].collectives, found[1].cached


def _compare(jitted: Any) -> list[str]:
    _step(jitted)
    return forge.explain(jitted, ranks=True).ranks


def ranks_alike(rank: int) -> list[str]:
    """Return the report's lines on differences between processes that run the same program."""
    return _compare(forge.jit(Llama()))


def ranks_differ(rank: int) -> list[str]:
    """Return the report's lines on processes with different executors, and then with second collectives at other
    lines."""
    torch.manual_seed(0)
    jitted = forge.jit(Llama(), executors=["torch"] if rank else None)
    first = _compare(jitted)
    second = forge.jit(_reduce_sines if rank else _reduce_squares)
    second(torch.ones(3))
    return [*first, *forge.explain(second, ranks=True).ranks]


def _reduce_squares(x: torch.Tensor) -> torch.Tensor:
    x = functional.all_reduce(x, "sum", torch.distributed.group.WORLD)
    return functional.all_reduce(x.square(), "sum", torch.distributed.group.WORLD)


def _reduce_sines(x: torch.Tensor) -> torch.Tensor:
    x = functional.all_reduce(x, "sum", torch.distributed.group.WORLD)
    x = x.sin()
    return functional.all_reduce(x, "sum", torch.distributed.group.WORLD)
