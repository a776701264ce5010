"""A command that runs: its function in forge/cli/actions, its exit status, and its errors in one line.

Only a command that runs imports this, and with it torch.
"""

import importlib
import os
import sys
import traceback
from typing import Any

import typer

from forge import hub
from forge.cli.app import UsageError
from forge.ir.checks import in_one_line

EXPECTED = (hub.HubError, ValueError, TypeError, OSError)  # the last: a path that the system refuses


def status(module: str, name: str, arguments: dict[str, Any], debug: bool) -> int:
    """Return the exit status of a command: 1 where it raises an error, with one line of it on stderr, or its
    traceback."""
    action = getattr(importlib.import_module(f"forge.cli.actions.{module}"), name)
    try:
        found = action(**arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, typer.Exit):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            expected = isinstance(error, EXPECTED)
            text = str(error) if expected else f"{in_one_line(error)} (--debug shows where)"
            print(f"forge: {text}", file=sys.stderr)
        return 1
    return found
