"""OpInfos of the distributed family, in a group of one process; tests/distributed has two."""

from typing import Any

import torch

from forge.testing.opinfo import FLOATS, Directive
from forge.testing.process_group import group_of_one
from forge.testing.table import Rows, Value, op, sample, t, wrong
from forge.torch_internals.versions import TORCH
from forge.torchlang import parameter_shards, sharding

if torch.distributed.is_available():
    functional = torch.ops._c10d_functional

    def _skips(*tests: str) -> tuple[Directive, ...]:
        """Skip tests before torch 2.13: its group of one process copied what it gathers, but wrote no other results."""
        reason = "the results are uninitialized memory"
        return tuple(Directive("skip", reason, test=test) for test in tests) if TORCH < (2, 13) else ()

    _GRADIENTS = _skips("test_gradient", "test_half_gradient", "test_jit", "test_fused", "test_checked")
    _MODES = [f"test_a_caller_sees_eagers[{mode}]" for mode in ("plain", "grad", "no_grad", "inference", "dynamic")]
    _RESULTS = (*_GRADIENTS, *_skips("test_consistency", "test_strided", "test_printing", *_MODES))

    _GROUP = Value(lambda target: group_of_one())
    _SHAPES = ((3,), (4, 2), (2, 3, 2))
    _ASKED = "torch asks the group, which may end the process"

    def _op(name: str, *rows: Rows, **options: Any) -> None:
        """Register a collective, which is waited for."""
        collective = getattr(functional, name)

        def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
            return functional.wait_tensor(collective(x, *args))

        symbols = (f"torch.ops._c10d_functional.{name}", "torch.ops._c10d_functional.wait_tensor")
        op(name, *rows, op=run, symbols=symbols, dtypes=FLOATS[:3], **options)

    _op(
        "all_reduce",
        [sample(t(*shape), "sum", _GROUP) for shape in _SHAPES],
        wrong(t(3), "total", _GROUP, match="reduce_op is 'total'", stricter=_ASKED),
    )
    _op(
        "all_gather_into_tensor",
        [sample(t(*shape), 1, _GROUP) for shape in _SHAPES],
        wrong(t(3), 0, _GROUP, match="group_size is 0, but must be positive", stricter=_ASKED),
        directives=_GRADIENTS,
    )
    _op(
        "reduce_scatter_tensor",
        [sample(t(*shape), "sum", 1, _GROUP) for shape in _SHAPES],
        wrong(t(3), "sum", 2, _GROUP, match="must be a multiple of group_size", stricter=_ASKED),
        wrong(t(3), "total", 1, _GROUP, match="reduce_op is 'total'", stricter=_ASKED),
        directives=_RESULTS,
    )
    _op(
        "all_to_all_single",
        [sample(t(*shape), [shape[0]], [shape[0]], _GROUP) for shape in _SHAPES],
        wrong(t(3), [3], [1, 2], _GROUP, match="must have a length for each process", stricter=_ASKED),
        directives=_RESULTS,
    )

    # redistribution of a DTensor

    _NOT_TORCHS = "torch has no such function"
    _PLACES = ("replicate", "partial", 0, 1)
    op(
        "redistribute",
        [
            sample(t(2, 3), source, target, 1, 0, _GROUP)
            for source in _PLACES
            for target in _PLACES
            if source == target or target != "partial" or source == "replicate"
        ],
        wrong(
            *(t(3), 1, "replicate", 1, 0, _GROUP),
            error=ValueError,
            match="source is 1, but must be a dim of x",
            stricter=_NOT_TORCHS,
        ),
        op=sharding.redistribute,
        dtypes=FLOATS[:3],
        directives=_RESULTS,
    )
    op(
        "spread",
        sample(t(2, 3), 1, 0, _GROUP),
        wrong(
            *(t(3), 1, 1, _GROUP),
            error=ValueError,
            match="rank is 1, but must be one of a group of 1",
            stricter=_NOT_TORCHS,
        ),
        op=sharding.spread,
        dtypes=FLOATS[:3],
    )

    # parameters of which each process has a part

    torch.compiler.allow_in_graph(parameter_shards.unshard)  # as forge.distributed.shard does

    def _unshard(x: torch.Tensor, length: int | None, group: str) -> torch.Tensor:
        return parameter_shards.unshard(x, length, x.dtype, x.device, None, (1, group, None), None, 1 << 20, 1 << 20)

    op(
        "unshard",
        [sample(t(*shape), shape[0], _GROUP) for shape in _SHAPES],
        sample(t(), None, _GROUP),
        wrong(t(3), 2, _GROUP, error=ValueError, match="x is x.*part of 2 rows", stricter=_NOT_TORCHS),
        op=_unshard,
        symbols=("forge.unshard",),
        dtypes=FLOATS[:3],
        directives=_RESULTS,
    )
