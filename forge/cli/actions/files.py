"""Actions of forge export and run; forge/cli/files.py declares them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch.export import Dim

import forge
from forge.aot.signature import ConstantInput, NumberInput, Signature, TensorInput, evaluate, parameters_of
from forge.aot.tree import unflatten
from forge.cli import inputs
from forge.cli.actions.programs import executor_names, load
from forge.cli.programs import Program
from forge.ir.proxies import short_type
from forge.torch_internals.pytree import torch_pytree

_DYNAMIC = re.compile(r"(?P<name>\w+):(?P<dim>\d+)(?:=(?P<low>\d+)?\.\.(?P<high>\d+)?)?")
_SIZE = 2  # of a dim that may have any, where none is given


def export(program: Program, output: Path, dynamic: list[str] | None) -> int:
    if program.train:
        raise typer.BadParameter("an exported program has no backward", param_hint="--train")
    if output.suffix != ".pt2":
        raise typer.BadParameter(f"{str(output)!r} does not end with .pt2", param_hint="--output")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="--output")
    names = executor_names(program)
    case = load(program, training=False)
    model = case.target if isinstance(case.target, torch.nn.Module) else _Function(case.target)
    parameters = parameters_of(case.target)
    shapes = None if dynamic is None else _dynamic_shapes(dynamic, parameters, case.args, case.kwargs)
    exported = forge.export(model, case.args, case.kwargs, dynamic_shapes=shapes, executors=names)
    digest = exported.save(output)
    print(exported)
    print(f"digest: {digest}")
    return 0


class _Function(torch.nn.Module):
    """A function as a module, as torch.export takes it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _dynamic_shapes(
    texts: Sequence[str], parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return torch.export's dynamic_shapes of a command line. Raises typer.BadParameter for what is not NAME:DIM."""
    shapes: dict[str, Any] = {**dict.fromkeys(parameters[: len(args)]), **dict.fromkeys(kwargs)}
    for text in texts:
        match = _DYNAMIC.fullmatch(text)
        if match is None or match["name"] not in shapes:
            names = ", ".join(shapes)
            message = f"{text!r} is not NAME:DIM or NAME:DIM=LOW..HIGH, with a NAME of {names}"
            raise typer.BadParameter(message, param_hint="--dynamic")
        limits = {key: int(match[name]) for key, name in (("min", "low"), ("max", "high")) if match[name]}
        dims = shapes[match["name"]] or {}
        shapes[match["name"]] = {**dims, int(match["dim"]): Dim.AUTO(**limits) if limits else Dim.AUTO}
    return shapes


def run(file: Path, input_texts: list[str] | None, entry_point: str | None, device: str | None, seed: int) -> int:
    loaded = forge.load(file, device)
    name = entry_point or next(iter(loaded.entry_points))
    if name not in loaded.entry_points or (entry_point is None and len(loaded.entry_points) > 1):
        raise typer.BadParameter(f"the file has {', '.join(loaded.entry_points)}", param_hint="--entry-point")
    torch.manual_seed(seed)
    target = torch.device(device or loaded.device)
    signature = loaded.signatures[name]
    args, kwargs = _random(signature, target) if input_texts is None else inputs.parse_inputs(input_texts, target)
    for path, leaf in torch_pytree.tree_flatten_with_path(loaded.entry_points[name](*args, **kwargs))[0]:
        print(f"{torch_pytree.keystr(path) or 'result'}: {_in_words(leaf)}")
    return 0


def _random(signature: Signature, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that an entry point takes."""
    sizes = {
        name: max(low or 0, min(_SIZE, _SIZE if high is None else high))
        for name, (low, high) in signature.sizes.items()
    }
    leaves: list[Any] = []
    for each in signature.inputs:
        if isinstance(each, TensorInput):
            shape = [int(evaluate(size, sizes)) for size in each.shape]
            place = device if each.device == device.type else torch.device(each.device)
            leaves.append(inputs.random_tensor(shape, getattr(torch, each.dtype), place))
        elif isinstance(each, NumberInput):
            leaves.append(sizes[each.size])
        else:
            assert isinstance(each, ConstantInput)
            leaves.append(each.value)
    args, kwargs = unflatten(signature.arguments, iter(leaves))
    return args, kwargs


def _in_words(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    text = short_type(leaf)
    if not leaf.numel() or leaf.is_complex():
        return text
    values = leaf.double()
    return f"{text} from {values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"
