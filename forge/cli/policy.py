"""The options that say whose kernels may run, and for which backend they are chosen."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from forge.cli.help import TRUST


@dataclass(frozen=True)
class PolicyOptions:
    """The options of a command that reads kernels' repositories."""

    trust: Annotated[
        Literal["locked", "publisher", "any"],
        typer.Option(
            metavar="WHOM", help="Whom to take kernels from: locked, publisher or any.", rich_help_panel=TRUST
        ),
    ] = "publisher"
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="ORG[/NAME]", help="Trust this one too; may be repeated.", rich_help_panel=TRUST),
    ] = None
    allow_import: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Let kernels import this module too.", rich_help_panel=TRUST),
    ] = None
    signatures: Annotated[
        Literal["off", "warn", "enforce"],
        typer.Option(metavar="WHAT", help="What becomes of a bad one: off, warn or enforce.", rich_help_panel=TRUST),
    ] = "off"
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Choose variants for this backend, such as cpu.", rich_help_panel=TRUST),
    ] = None
