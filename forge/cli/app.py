"""The parts that all commands share: their declaration, help, exit status, and errors in one line.

Neither this nor a declaration imports torch or forge's compiler, so that help and completion answer at once: a command
that runs imports its action.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from forge.cli import help
from forge.version import __version__

ORDER = ("trace", "explain", "bench", "export", "run", "doctor", "kernels")
# typer has no name for it; to a type checker, it is the subclass with its attributes
UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
_WANTED = {"int": "a whole number", "float": "a number", "finite": "a finite number"}  # by the kind of a problem

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class TargetError(ValueError):
    """A command line's target cannot be loaded, or raised an error of its own."""


class Command(TyperCommand):
    """A command with forge's help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        help.show(ctx)


class Group(TyperGroup):
    """A group of commands with forge's help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        help.show(ctx, [self.get_command(ctx, name) for name in self.list_commands(ctx)])

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands of `forge` in the order of ORDER, others as they were declared."""
        names = list(super().list_commands(ctx))
        return sorted(names, key=lambda name: ORDER.index(name) if ctx.parent is None else 0)


def _group(description: str) -> typer.Typer:
    return typer.Typer(
        cls=Group,
        help=description,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _group("A compiler framework for PyTorch: see what runs, by whom, why, and how fast.")
kernels = _group("Kernels of the Kernel Hub, of folders and of manifests.")
app.add_typer(kernels, name="kernels", rich_help_panel="Kernels")
_GROUPS = {"": app, "kernels": kernels}
help.EXAMPLES["forge"] = (
    "forge trace llama                  # the Python that forge generates",
    "forge explain gpt2 --train         # who runs each operation, and why",
    "forge bench bert --only eager,forge",
    "forge doctor",
)
help.EXAMPLES["forge kernels"] = (
    "forge kernels list",
    "forge kernels new my-gate          # a source tree to fill in",
    "forge kernels check my-gate",
)


def _version(value: bool) -> None:
    if value:
        torch = importlib.metadata.version("torch")
        print(f"forge {__version__}, torch {torch}, Python {platform.python_version()}")
        raise SystemExit(0)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions of forge, torch and Python.")
    ] = False,
    debug: Debug = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit status.

    Raises: SystemExit(2) for a usage error, with one line on stderr that names the argument.
    """
    command = typer.main.get_command(app)
    try:
        return command.main(args=argv, prog_name="forge", standalone_mode=False) or 0
    except typer.Abort:  # Control-C
        return 130
    except UsageError as error:
        _print_usage_error(error)
        raise SystemExit(2) from None


def _print_usage_error(error: typer.BadParameter) -> None:
    path = error.ctx.command_path if error.ctx is not None else "forge"
    message = " ".join(_error_message(error).split()).rstrip(".")
    if message:  # without arguments, a group has shown its help
        message = f"{message[0].lower()}{message[1:]}"
        print(f"{path}: {message} ({path} --help)", file=sys.stderr)


def _error_message(error: typer.BadParameter) -> str:
    """Return the problem of a command line; for a value, in forge's words where typer would have pydantic's."""
    problems = getattr(error.__cause__, "errors", None)
    if isinstance(error, typer.BadParameter) and problems is not None:
        error.message = _wrong_value(problems()[0])
    return error.format_message()


def _wrong_value(problem: dict[str, Any]) -> str:
    """Return the error text for a value, from pydantic's error: its kind, the input, and the context of the kind."""
    if problem["type"] == "value_error":  # typer's own, for a choice
        return str(problem["ctx"]["error"])
    if problem["type"] == "greater_than_equal":
        return f"{problem['input']} is less than {problem['ctx']['ge']}"
    return f"{problem['input']!r} is not {_WANTED.get(problem['type'].partition('_')[0], 'valid')}"


def command(
    path: str, *examples: str, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function as the command of that path, such as "kernels list"; its docstring is the help.

    The function of the same name in forge/cli/actions runs the command and returns its exit status.

    A parameter whose type is a dataclass stands for the dataclass's fields, each an argument or option of its own.
    examples: command lines that its help shows. panel: under which heading the group's help has it.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        group, _, name = path.rpartition(" ")
        help.EXAMPLES[f"forge {path}"] = examples
        declare = _GROUPS[group].command(name, cls=Command, help=inspect.getdoc(function), rich_help_panel=panel)
        declare(_callback(function))
        return function

    return add


def _callback(function: Callable[..., None]) -> Callable[..., int]:
    """Return a callback for typer, with every field of `function` as a parameter, and --debug."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for parameter in signature.parameters.values() for each in _expand(parameter)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", keyword, annotation=typer.Context)
    debug = inspect.Parameter("debug", keyword, default=False, annotation=Debug)

    def callback(ctx: typer.Context, debug: bool, **values: Any) -> int:
        arguments = {}
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                arguments[name] = kind(**{each.name: values[each.name] for each in dataclasses.fields(kind)})
            else:
                arguments[name] = values[name]
        action = getattr(
            importlib.import_module(function.__module__.replace("cli", "cli.actions", 1)), function.__name__
        )
        return _run(functools.partial(action, **arguments), debug or ctx.find_root().params["debug"])

    every = [context, *parameters, debug]
    vars(callback)["__signature__"] = inspect.Signature(every)
    callback.__annotations__ = {each.name: each.annotation for each in every}
    return callback


def _expand(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if not dataclasses.is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(parameter.annotation, include_extras=True)
    for each in dataclasses.fields(parameter.annotation):
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name])


def _run(action: Callable[[], int], debug: bool) -> int:
    """Return the exit status of an action: 1 for an error, which is printed as one line, or with its traceback."""
    from forge import ExportError, hub
    from forge.ir.checks import in_one_line

    try:
        status = action()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, typer.Exit):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            expected = isinstance(
                error, (hub.HubError, ExportError, ValueError, TypeError, OSError)
            )  # OSError: of a path
            text = str(error) if expected else f"{in_one_line(error)} (--debug shows where)"
            print(f"forge: {text}", file=sys.stderr)
        return 1
    return status
