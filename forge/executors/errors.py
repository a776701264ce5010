"""Errors of compiled programs that are not their users' mistakes."""

from collections.abc import Mapping

import torch


class RegionError(RuntimeError):
    """A region that a fusion executor cannot compile, under forge.jit(strict=True) or `check=`; its cause is the
    compiler's error."""


class ContractError(ValueError):
    """A user's executor's function does something else than the call that it runs."""


class OverwrittenArgumentError(ContractError):
    """An executor's function has changed an argument, so that what reads it later computes something else."""


class CheckError(RuntimeError):
    """A value of a compiled program differs from eager.

    Attributes:
        operation: The call that computed the value; None for a result or gradient of the whole program.
        executor: The executor that ran the call, or None.
        inputs: The tensor arguments of the call, by name.
        actual: The value, or None.
        expected: The value of eager, or None.
        check: The kind of check that failed.
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
