"""The text of --help: usage, description, arguments and options under headings, and examples."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

EXAMPLES: dict[str, tuple[str, ...]] = {}  # command lines that the help of a command shows, by the command
THE_PROGRAM, TRUST = "The program and its inputs", "Whom to trust"  # headings
_ORDER = ("Arguments", THE_PROGRAM, "Options", TRUST)
_WIDEST = 110  # columns
Rows = dict[str, list[tuple[Text, str]]]  # by heading


def show(ctx: typer.Context, commands: Sequence[Any] = ()) -> None:
    """Print the help of a command, or of a group with its commands."""
    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as captured:
        for each in _parts(ctx, commands):
            console.print(each, soft_wrap=isinstance(each, Text) and each.no_wrap)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _parts(ctx: typer.Context, commands: Sequence[Any]) -> Iterator[RenderableType]:
    parameters = ctx.command.get_params(ctx)
    arguments = [str(each.metavar) for each in parameters if each.param_type_name == "argument"]
    usage = " ".join([ctx.command_path, *arguments, "[OPTIONS]", *["COMMAND ..."] * bool(commands)])
    yield Text.assemble(("Usage: ", "bold"), usage)
    for paragraph in inspect.cleandoc(ctx.command.help or "").split("\n\n"):
        yield Text(f"\n{' '.join(paragraph.split())}")
    for rows in filter(None, (_commands(commands), _parameters(parameters))):
        width = max(len(name) for of in rows.values() for name, _ in of)
        for heading, of in rows.items():
            yield Text(f"\n{heading}", "bold")
            for name, text in of:
                yield _row(name, text, width)
    for number, line in enumerate(EXAMPLES.get(ctx.command_path, ())):
        if number == 0:
            yield Text("\nExamples", "bold")
        run, mark, comment = line.partition("  #")
        yield Text.assemble("  ", run, (f"{mark}{comment}", "dim"), no_wrap=True)


def _commands(commands: Sequence[Any]) -> Rows:
    rows: Rows = {}
    for each in commands:
        rows.setdefault(each.rich_help_panel, []).append((Text(each.name, "bold cyan"), _first_sentence(each.help)))
    return rows


def _parameters(parameters: Sequence[Any]) -> Rows:
    rows: Rows = {}
    for each in parameters:
        if each.param_type_name == "argument":
            rows.setdefault("Arguments", []).append((Text(each.metavar, "bold cyan"), each.help))
        elif not each.hidden:
            heading = getattr(each, "rich_help_panel", None) or "Options"
            rows.setdefault(heading, []).append((_name(each), _help_with_default(each)))
    return {heading: rows[heading] for heading in _ORDER if heading in rows}


def _first_sentence(help: str) -> str:
    return " ".join(help.split("\n\n")[0].split())


def _name(option: Any) -> Text:
    """Return an option's names and metavar, as in `-o, --output FILE`."""
    short = [name for name in option.opts if not name.startswith("--")]
    long = [name for name in option.opts if name.startswith("--")]
    metavar = "" if option.is_flag or not option.metavar else f" {option.metavar}"
    return Text.assemble((", ".join([*short, *long]), "bold cyan"), (metavar, "yellow"))


def _help_with_default(option: Any) -> str:
    """Return an option's help, with its default where it has one."""
    default = option.default
    has_default = not (option.is_flag or default is None or callable(default) or default == [])
    return f"{option.help} Default: {default}." if has_default else option.help


def _row(name: Text, text: str, width: int) -> RenderableType:
    """Return the name on the left."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=width, no_wrap=True)
    row.add_column()
    row.add_row(name, Text(text))
    return Padding(row, (0, 0, 0, 2))
