"""The TARGET of a command line: a program with its inputs, from a module, a file, or a model's name."""

import contextlib
import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from forge.benchmark.model_bench import Case
from forge.cli import small_models
from forge.cli.app import TargetError
from forge.executors.registry import unknown
from forge.ir.checks import in_one_line
from forge.torch_internals.pytree import torch_pytree

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_LISTED = 100  # names that are told of a module's
INPUTS = "forge_inputs"  # a function of the target's module that gives the arguments of a call
_LIBRARIES = tuple(f"{Path(file).parents[up]}/" for file, up in ((torch.__file__, 0), (__file__, 2)))


@contextlib.contextmanager
def attribute_errors(what: str) -> Iterator[None]:
    """Run code that is not forge's: an error names `what` and the user's line, and printed text goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{what} raised {in_one_line(error)}{_location(error) or _definition(what)}") from error


def _location(error: BaseException) -> str:
    """Return the user's line at which the error was raised."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_LIBRARIES)]
    own_frames = [each for each in frames if Path(each.filename).exists() and "importlib" not in each.filename]
    return f" ({Path(own_frames[-1].filename).name}:{own_frames[-1].lineno})" if own_frames else ""


def _definition(target: str) -> str:
    """Return the place of a target's definition, if that is in the user's code: of a module of torch's that the user's
    code makes, no line runs."""
    place, _, name = target.rpartition(":")
    path = str(Path(place).resolve())
    files = (each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == path)
    try:
        definition = operator.attrgetter(name)(sys.modules.get(place) or next(files, None))
        file, (_, line) = inspect.getsourcefile(definition), inspect.getsourcelines(definition)
    except (AttributeError, TypeError, OSError):  # nothing of that name, or no function or class
        return ""
    return "" if file is None or file.startswith(_LIBRARIES) else f" ({Path(file).name}:{line})"


def load(
    target: str,
    settings: Mapping[str, Any],
    inputs: Inputs | None,
    *,
    training: bool,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Case:
    """Return the program of a command line.

    target: package.module:name, path/to/file.py:name, or a name of transformers. It names the program, or a function
    that makes it from `settings`, alone or as (program, inputs). inputs: of the command line, positional and named,
    which go before the program's own. training: whether a step has a backward. dtype, device: of parameters and
    of the program's own inputs. Raises TargetError for what cannot be loaded, or takes other arguments.
    """
    args, kwargs = inputs or ((), {})
    with attribute_errors(target):
        if ":" in target or target.endswith(".py"):
            program, own = _from_python(target, dict(settings))
            own = ((), {}) if inputs is not None else own
        else:
            program, model_inputs = small_models.make(target, dict(settings), training, kwargs)
            own = (), {} if args else model_inputs
        own_args, own_kwargs = _move_to(own, device, dtype)
        args, kwargs = (*own_args, *args), {**own_kwargs, **kwargs}
        if isinstance(program, torch.nn.Module):
            program = program.to(device=device, dtype=dtype).train(training)
    _check_arguments(target, program, args, kwargs)
    if training and not _parameters(program):
        args, kwargs = torch_pytree.tree_map(_requiring_grad, (args, kwargs))
    return Case(target, program, args, kwargs, training)


def _parameters(program: Callable) -> list[torch.nn.Parameter]:
    parameters = program.parameters() if isinstance(program, torch.nn.Module) else ()
    return [each for each in parameters if each.requires_grad]


def _move_to(inputs: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return the inputs on the device, with floating-point tensors in the dtype."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return torch_pytree.tree_map(move, inputs)


def _requiring_grad(leaf: Any) -> Any:
    differentiable = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.detach().requires_grad_() if differentiable else leaf


def _from_python(target: str, settings: dict[str, Any]) -> tuple[Callable, Inputs]:
    """Return a program and its own inputs."""
    place, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    module = _from_file(place) if place.endswith(".py") else _import_module(target, place)
    result: Any = module
    for part in name.split("."):
        if not hasattr(result, part):
            callables = [each for each, value in vars(result).items() if callable(value) and not each.startswith("_")]
            listing = ", ".join(sorted(callables)) if len(callables) <= _LISTED else f"{len(callables)} names"
            what = unknown("name", part, callables) if part else f"NAME is missing; it has {listing}"
            raise TargetError(f"{target}: {what}")
        result = getattr(result, part)
    if not callable(result):
        raise TargetError(f"{target}: is {result!r}, but must be a module, a function, or a function that makes one")
    program, own = _instantiate(target, result, settings)
    if own is None and callable(getattr(module, INPUTS, None)):
        own = getattr(module, INPUTS)()
    return program, _as_arguments(own)


def _import_module(target: str, name: str) -> ModuleType:
    """Import a module; those of the current folder come after all installed ones."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{target}: {name!r} is no name of a module; a file's ends with .py")
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(f"{target}: there is no module {error.name!r}") from error
        raise


def _from_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"{place}: there is no such file")
    _search(path.parent)
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_{id(path)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Dynamo finds what it compiles by its module
    spec.loader.exec_module(module)
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _instantiate(target: str, factory: Callable, settings: dict[str, Any]) -> tuple[Callable, Any]:
    """Call a class or a factory with the settings, and return the result; a function that needs other arguments is the
    program itself."""
    if isinstance(factory, torch.nn.Module):
        if settings:
            raise TargetError(f"{target}: is made already, so that --set {next(iter(settings))} changes nothing")
        return factory, None
    try:
        inspect.signature(factory).bind(**settings)
    except (TypeError, ValueError) as reason:  # ValueError: a builtin without a signature
        if settings or isinstance(factory, type):
            raise TargetError(f"{target}: cannot be called with what --set gives: {reason}") from reason
        return factory, None
    result = factory(**settings)
    if isinstance(result, tuple) and len(result) == 2 and callable(result[0]):
        return result
    return (result, None) if callable(result) else (factory, None)


def _as_arguments(own: Any) -> Inputs:
    """Return the arguments and keyword arguments in a program's inputs: one tensor, a tuple or list of arguments, or a
    dict of named ones."""
    if own is None:
        return (), {}
    if isinstance(own, Mapping):
        return (), dict(own)
    return (tuple(own), {}) if isinstance(own, (tuple, list)) else ((own,), {})


def _check_arguments(target: str, program: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TargetError where the program takes others."""
    try:
        signature = inspect.signature(program.forward if isinstance(program, torch.nn.Module) else program)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        raise TargetError(
            f"{target}: takes {', '.join(signature.parameters)}, but with its inputs: {reason}; give --input "
            f"NAME=float32[4,8], or define {INPUTS}() beside it"
        ) from reason
