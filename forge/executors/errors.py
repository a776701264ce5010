"""Errors of compiled programs that are not their users' mistakes."""

from collections.abc import Mapping

import torch


class RegionError(RuntimeError):
    """A region that a fusion executor cannot compile, under forge.jit(strict=True) or `check=`; its cause is the
    compiler's error."""


class CheckError(RuntimeError):
    """A value of a compiled program is not what eager gives.

    operation, executor: the call that gave it and who ran it; None for a result or a gradient as a whole. inputs: the
    tensors that the call was given, by name. actual, expected: the two values, None where there is none. check: the
    kind of check that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        executor: str | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        actual: torch.Tensor | None = None,
        expected: torch.Tensor | None = None,
        check: str = "eager",
    ) -> None:
        super().__init__(f'forge.jit(check="{check}"): {message}')
        self.operation = operation
        self.executor = executor
        self.inputs = dict(inputs or {})
        self.actual = actual
        self.expected = expected
