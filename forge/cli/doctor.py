"""forge doctor, as it is declared: what it does is in forge/cli/actions/doctor.py."""

from typing import Annotated

import typer

from forge.cli.app import command


@command("doctor", "forge doctor", "forge doctor --json                # for a bug report", panel="This machine")
def show(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, for a bug report.")] = False) -> None:
    """Show what forge finds on this machine, and what is wrong.

    Versions, devices, compilers, caches, executors, kernels, policy and environment. Lines with a ! cost you something;
    the exit status is 1 where there is one.
    """
