"""forge trace, explain and bench, as they are declared: what they do is in forge/cli/actions/programs.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forge.cli.app import command
from forge.cli.help import THE_PROGRAM
from forge.cli.names import DTYPES, EXECUTORS, SYSTEMS, Plan

_PANEL = "See into a program"


def _completion(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completion of names between commas: of the one behind the last."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name not in before.split(",")]

    return complete


@dataclass(frozen=True)
class Program:
    """A program as the command line names it, with its inputs."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A function, a module, or a function that makes one, as package.module:NAME or file.py:NAME; or a "
            "model of transformers, made small: a model type (llama), or the class of a config or a model.",
        ),
    ]
    input_texts: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="INPUT",
            help="An argument of the call, as x=float32[4,8], ids=int64[2,16]<1000 (below 1000) or dim=-1; "
            "positional without NAME=. May be repeated. By default what the factory returns, as (program, inputs), or "
            "forge_inputs() of its module; of a model by name, random tokens or images.",
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A field of the config, or an argument of the class or factory. May be repeated.",
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    train: Annotated[
        bool,
        typer.Option("--train", help="A training step: forward and backward.", rich_help_panel=THE_PROGRAM),
    ] = False
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of parameters and of inputs by default, such as bfloat16.",
            autocompletion=lambda: [*DTYPES],
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Such as cuda or cuda:1.", rich_help_panel=THE_PROGRAM)
    ] = "cpu"
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights and inputs.", rich_help_panel=THE_PROGRAM)] = 0
    executors: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Who is asked to run each operation, in this order, such as inductor,torch; by default those of "
            "forge.jit.",
            autocompletion=_completion(EXECUTORS),
        ),
    ] = None


@command(
    "trace",
    "forge trace llama --executors torch",
    "forge trace torch.nn.functional:gelu --input 'float32[4,8]' --train",
    "forge trace torch.nn:Linear --set in_features=8 --set out_features=4 \\\n      --input 'float32[2,8]' --stage all",
    "forge trace gpt2 --set n_layer=1 --stage 0 --levels 3",
    panel=_PANEL,
)
def trace(
    program: Program,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Which stage: its number, a part of its name, all, or list for their names; the last one by default, "
            "which is what runs.",
        ),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward alone, of a training step.")] = False,
    levels: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many levels of what each call consists of; 1 is the call.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the traces.")] = False,
) -> None:
    """Print the program that forge generates, or a stage on the way to it.

    The output is Python: the last stage runs as it stands.
    """


@command(
    "explain",
    "forge explain llama --train",
    "forge explain gpt2 --profile",
    "forge explain bert --html report.html",
    "forge explain torch.nn.functional:softmax --input 'float32[4,8]' \\\n      --input dim=-1 --json",
    panel=_PANEL,
)
def explain(
    program: Program,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one page to search and filter, too.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run the program again, and say what each call takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say who runs each operation, who declined it and why.

    And what is fused, what is saved for the backward, graph breaks, what runs in eager, and the time to compile; with
    --profile the time and memory of each call.
    """


@command(
    "bench",
    "forge bench llama --only eager,forge",
    "forge bench gpt2 --train --only eager,forge --rounds 15 --json",
    "forge bench llama --train --nproc 2 --plan shard",
    "forge bench torch.nn:Linear --set in_features=512 --set out_features=512 \\\n      --input 'float32[64,512]'",
    panel=_PANEL,
)
def bench(
    program: Program,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often each is timed, in turn.")] = 9,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="These alone, of eager, torch.compile and forge.",
            autocompletion=_completion(SYSTEMS),
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            metavar="N",
            help="How many processes of this machine share the work, each on a GPU of its own where --device is cuda.",
        ),
    ] = None,
    plan: Annotated[
        Plan,
        typer.Option(
            "--plan",
            help="How processes share it: DistributedDataParallel, FSDP2 of the whole model, or for forge "
            "forge.distributed.shard beside FSDP2.",
        ),
    ] = "ddp",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time eager, torch.compile and forge, in turn in one process, or in several that share the work.

    The ratios are medians over rounds, of the slowest process: below 1.00 is faster. The exit status is 1 where one of
    them failed.
    """
