"""forge export and run, as they are declared: what they do is in forge/cli/actions/files.py."""

from pathlib import Path
from typing import Annotated

import typer

from forge.cli.app import command
from forge.cli.programs import Program

_PANEL = "Deploy a program"


@command(
    "export",
    "forge export llama -o llama.pt2 --dynamic input_ids:0=2..64",
    "forge export torch.nn:Softmax --set dim=-1 -i 'float32[2,8]' -o softmax.pt2",
    panel=_PANEL,
)
def export(
    program: Program,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file, which ends with .pt2.")],
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DIM",
            help="A dim of an argument whose size differs from call to call, with its limits as x:0=2..64. May be "
            "repeated.",
        ),
    ] = None,
) -> None:
    """Compile a model to one file, which runs without its source.

    Print the inputs that the file takes, and its digest.
    """


@command(
    "run",
    "forge run softmax.pt2",
    "forge run softmax.pt2 --input 'float32[2,8]'",
    panel=_PANEL,
)
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that forge export wrote.")],
    input_texts: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="INPUT",
            help="An argument of the call, as x=float32[4,8]; by default random ones of the sizes that it takes.",
        ),
    ] = None,
    entry_point: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which entry point, where there are several.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Such as cuda:1; by default the one that the file is for.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of inputs.")] = 0,
) -> None:
    """Run a file that forge export wrote, and print what it returns.

    A file is code: run those of people whose programs you would run.
    """
