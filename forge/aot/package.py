"""AOTInductor packages: what runs one, and a first call of one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from forge.executors.executor import Declined, decline
from forge.ir.checks import in_one_line
from forge.torch_internals.packages import RunnerOfCpu, RunnerOfCuda
from forge.torch_internals.pytree import torch_pytree


def open_runner(library: str, device: torch.device, constants: Mapping[str, torch.Tensor]) -> Any:
    """Return what runs a package's shared object. constants: the tensors that it does not hold itself, by name; the
    caller keeps them alive."""
    if device.type == "cuda":
        assert RunnerOfCuda is not None
        runner = RunnerOfCuda(library, 1, str(device))
    else:
        runner = RunnerOfCpu(library, 1)
    if constants:
        names = runner.get_constant_names_to_original_fqns()
        runner.update_constant_buffer({own: constants[fqn] for own, fqn in names.items()}, False, True, True)
    return runner


def find_failure(
    paths: Sequence[str], exported: ExportedProgram, constants: Mapping[str, torch.Tensor], device: torch.device
) -> Declined | None:
    """Return the error of a call of a package with the example that its program was exported with, None where it
    runs.

    What Inductor calls by its proxy executor is looked up when it runs: arguments that it cannot pass on are errors
    only then.
    """
    if exported.example_inputs is None:
        return None
    leaves = torch_pytree.tree_leaves(exported.example_inputs)
    inputs = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]  # it may write to them
    (library,) = [path for path in paths if path.endswith(".so")]
    try:
        open_runner(library, device, constants).run(inputs)
    except Exception as error:
        return decline(f"its AOTInductor package does not run: {in_one_line(error)}", error=error)
    return None
