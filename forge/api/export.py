"""forge.export and forge.load: programs compiled ahead of time, in one file."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export import export as torch_export

from forge.aot.dim_names import dim_names
from forge.aot.entry_point import CompiledEntry, compile_entry
from forge.aot.errors import ExportError
from forge.aot.exported import Exported
from forge.aot.signature import parameters_of
from forge.api.options import check_transforms, resolve_options
from forge.executors.executor import Executor
from forge.executors.hubex import Source, kernel_executor
from forge.ir.checks import in_one_line
from forge.runtime.module_transforms import ModuleTransform, split_transforms, transform_module
from forge.runtime.torch_state import dynamo_disable
from forge.torch_internals.dispatch import OpOverload
from forge.torch_internals.distributed import is_dtensor
from forge.torch_internals.pytree import torch_pytree
from forge.transforms.users import Transform

ALONE = "model"  # the only entry point, by torch's name


class EntryPoint(NamedTuple):
    """A model with example arguments; forge.export takes several.

    Attributes:
        model: A module, or a program of torch.export.
        args: Example arguments by position.
        kwargs: Example arguments by name.
        dynamic_shapes: The dims whose size varies between calls.
    """

    model: torch.nn.Module | ExportedProgram
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None


@dynamo_disable
def export(  # noqa: PLR0913  the options of forge.export
    model: torch.nn.Module | ExportedProgram | Mapping[str, Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    executors: Sequence[str | Executor] | None = None,
    transforms: Sequence[Transform | ModuleTransform] = (),
    kernels: Sequence[Source] = (),
    allow_imports: Sequence[str] = (),
    numerics: str = "fast",
) -> Exported:
    """Compile a model for inference, ahead of time, for one file that needs neither its source nor Dynamo.

    torch.export captures the model; its program goes through all of forge's passes, with the weights as constants.

    Args:
        model: A module; a program of torch.export, whose `dynamic_shapes` it has; or a mapping from names to
            forge.EntryPoint, for several entry points that share weights.
        args: Example arguments by position.
        kwargs: Example arguments by name.
        dynamic_shapes: The dims whose size varies between calls, as torch.export takes them.
        strict: Capture by Dynamo, as torch.export's `strict`.
        executors: As forge.jit's.
        transforms: As forge.jit's. A forge.ModuleTransform replaces parameters in a copy of each module.
        kernels: As forge.jit's. The file holds the kernels that run.
        allow_imports: As forge.jit's.
        numerics: As forge.jit's.

    Returns:
        The exported programs, which `save` writes to a file for forge.load.

    Raises:
        ExportError: For a model that torch.export or forge cannot compile, with the reason.
    """
    check_transforms(transforms)
    of_programs, of_modules = split_transforms(transforms)
    own = kernel_executor(kernels, allow_imports=allow_imports) if kernels else None
    config = resolve_options(
        executors,
        of_programs,
        cache=False,
        cuda_graphs=False,
        freeze=True,
        numerics=numerics,
        first=[] if own is None else [own],
        is_for_a_file=True,
    )
    points = model if isinstance(model, Mapping) else {ALONE: EntryPoint(model, args, kwargs, dynamic_shapes)}
    compiled: dict[str, CompiledEntry] = {}
    transformed: dict[int, torch.nn.Module] = {}  # a module of several entry points has its weights once
    for name, each in points.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise ExportError(f"forge.export: the entry point {name!r} must have an identifier for its name")
        point = each if isinstance(each, EntryPoint) else EntryPoint(*each)
        if of_modules and isinstance(point.model, torch.nn.Module):
            original = getattr(point.model, "_forge_module", point.model)
            if id(original) not in transformed:
                transformed[id(original)] = transform_module(original, of_modules)
            point = point._replace(model=transformed[id(original)])
        elif of_modules:
            raise ExportError(
                "forge.export: a transform replaces parameters, and needs a module, not a program of torch.export"
            )
        exported = _export(point, strict=strict)
        _check_collectives(exported)
        parameters = parameters_of(point.model)
        dims = dim_names(point.args, point.kwargs or {}, point.dynamic_shapes, parameters)
        compiled[name] = compile_entry(exported, config, parameters, dims, alone=points is not model)
    return Exported(compiled)


# A guard that torch could not prove for all sizes. Some hold for all: torch 2.11's meta function of attention on CUDA
# sorts strides, and guards on min(64 * n, 128 * n) being 64 * n. The program asserts those instead.
_UNPROVEN = "Constraints violated"


def _export(point: EntryPoint, *, strict: bool) -> ExportedProgram:
    model = point.model
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"forge.export: the model is a {type(model).__name__}, but must be a torch.nn.Module")
    if not isinstance(point.args, (tuple, list)):
        raise ExportError(
            f"forge.export: args is a {type(point.args).__name__}, but must be a tuple of the arguments by position"
        )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ExportError(
                f"forge.export: parameter {name} is a DTensor, but a file is for one process; export the model before "
                "its parameters are distributed"
            )
    args, kwargs = _distinct((tuple(point.args), point.kwargs))
    run = functools.partial(torch_export, model, args, kwargs, dynamic_shapes=point.dynamic_shapes, strict=strict)
    try:
        with torch.no_grad():
            try:
                return run()
            except Exception as error:
                if _UNPROVEN not in str(error):
                    raise
                return run(prefer_deferred_runtime_asserts_over_guards=True)
    except Exception as error:
        raise ExportError(f"forge.export: torch.export cannot take the model: {in_one_line(error)}") from error


def _check_collectives(exported: ExportedProgram) -> None:
    """Raise ExportError for a program with collectives."""
    for node in exported.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace in ("_c10d_functional", "c10d"):
            raise ExportError(f"forge.export: the model calls {node.target}, but a file is for one process")


def _distinct(arguments: Any) -> Any:
    """Return the arguments with a copy of each repeated tensor, which torch.export would treat as one input."""
    visited: set[int] = set()

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in visited:
            return leaf.detach().clone()
        visited.add(id(leaf))
        return leaf

    return torch_pytree.tree_map(copied, arguments)
