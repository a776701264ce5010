"""forge doctor."""

import json
from typing import Annotated

import typer

from forge import doctor
from forge.cli.app import command


@command("doctor", "forge doctor", "forge doctor --json                # for a bug report", panel="This machine")
def show(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, for a bug report.")] = False) -> int:
    """Show what forge finds on this machine, and what is wrong.

    Versions, devices, compilers, caches, executors, kernels, policy and environment. Lines with a ! cost you something;
    the exit status is 1 where there is one.
    """
    findings = doctor.examine()
    print(json.dumps(doctor.as_json(findings), indent=1) if as_json else doctor.show(findings))
    return 1 if any(each.state == "problem" for each in findings) else 0
