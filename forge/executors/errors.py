"""Errors of compiled programs that are not their users' mistakes."""

from collections.abc import Mapping

import torch


class RegionError(RuntimeError):
    """A region fails to compile, under forge.jit(strict=True) or `check=`; its cause is the fusion executor's
    error."""


class ContractError(ValueError):
    """A function of a user's executor does not do what the call that it runs promises."""


class OverwrittenArgumentError(ContractError):
    """An executor's function has mutated an argument, so that later readers compute something else."""


class CheckError(RuntimeError):
    """A value of a compiled program differs from eager.

    Attributes:
        operation: The call that computed the value; None for a result or gradient of the whole program.
        executor: The executor that ran the call, or None.
        inputs: The tensor arguments of the call, by name.
        actual: The value, or None.
        expected: Eager's value, or None.
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
