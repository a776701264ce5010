"""OpInfos of the distributed family, in a group of one process; tests/distributed has two."""

from collections.abc import Iterator
from typing import Any

import torch

from forge.testing.opinfo import FLOATS, Directive, ErrorSample, OpInfo, Sample, register_opinfo, sample
from forge.testing.process_group import group_of_one
from forge.torch_internals.versions import TORCH
from forge.torchlang import sharding

if torch.distributed.is_available():
    functional = torch.ops._c10d_functional

    def _unwritten(*tests: str) -> tuple[Directive, ...]:
        """torch's group of one process copied what it gathers, but wrote no other results."""
        reason = "the results are uninitialized memory"
        return tuple(Directive("skip", reason, test=test) for test in tests) if TORCH < (2, 13) else ()

    _GRADIENTS = _unwritten("test_gradient", "test_half_gradient", "test_jit", "test_fused", "test_checked")
    _MODES = [f"test_a_caller_sees_eagers[{mode}]" for mode in ("plain", "grad", "no_grad", "inference", "dynamic")]
    _RESULTS = (*_GRADIENTS, *_unwritten("test_consistency", "test_strided", "test_printing", *_MODES))

    def _register(
        name: str, calls: list[tuple], mistakes: list[tuple[tuple, str]], directives: tuple[Directive, ...] = ()
    ) -> None:
        """calls: what follows the tensor in the arguments, without the group, which comes last; "length" is that of
        dim 0. mistakes: such arguments for a tensor of length 3, and the error's text."""
        operator = getattr(functional, name)

        def op(x: torch.Tensor, *args: Any) -> torch.Tensor:
            return functional.wait_tensor(operator(x, *args))

        def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
            for args in calls:
                for shape in ((3,), (4, 2), (2, 3, 2)):
                    lengths = [[shape[0]] if arg == "length" else arg for arg in args]
                    yield sample(info.tensor(shape, device, dtype), *lengths, group_of_one())

        def errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
            for args, match in mistakes:
                call = sample(torch.ones(3, device=device), *args, group_of_one())
                yield ErrorSample(call, RuntimeError, match, stricter="torch asks the group, which may end the process")

        id = f"torch.ops._c10d_functional.{name}"
        waited = "torch.ops._c10d_functional.wait_tensor"
        register_opinfo(
            OpInfo(name, op, samples, errors, dtypes=FLOATS[:3], symbols=(id, waited), directives=directives)
        )

    # what redistributing a DTensor is

    _NOT_TORCHS = "torch has no such function"
    _PLACES = ("replicate", "partial", 0, 1)

    def _redistribute_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for source in _PLACES:
            for target in _PLACES:
                if source == target or target != "partial" or source == "replicate":
                    yield sample(info.tensor((2, 3), device, dtype), source, target, 1, 0, group_of_one())

    def _redistribute_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        x = torch.ones(3, device=device)
        call = sample(x, 1, "replicate", 1, 0, group_of_one())
        yield ErrorSample(call, ValueError, "source is 1, but must be a dim of x", stricter=_NOT_TORCHS)

    def _spread_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield sample(info.tensor((2, 3), device, dtype), 1, 0, group_of_one())

    def _spread_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        call = sample(torch.ones(3, device=device), 1, 1, group_of_one())
        yield ErrorSample(call, ValueError, "rank is 1, but must be one of a group of 1", stricter=_NOT_TORCHS)

    register_opinfo(
        OpInfo(
            "redistribute",
            sharding.redistribute,
            _redistribute_samples,
            _redistribute_errors,
            dtypes=FLOATS[:3],
            directives=_RESULTS,
        )
    )
    register_opinfo(OpInfo("spread", sharding.spread, _spread_samples, _spread_errors, dtypes=FLOATS[:3]))

    _register("all_reduce", [("sum",)], [(("total",), "reduce_op is 'total'")])
    _register("all_gather_into_tensor", [(1,)], [((0,), "group_size is 0, but must be positive")], _GRADIENTS)
    _register(
        "reduce_scatter_tensor",
        [("sum", 1)],
        [(("sum", 2), "must be a multiple of group_size"), (("total", 1), "reduce_op is 'total'")],
        _RESULTS,
    )
    _register(
        "all_to_all_single",
        [("length", "length")],
        [(([3], [1, 2]), "must have a length for each process")],
        _RESULTS,
    )
