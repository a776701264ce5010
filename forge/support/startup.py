"""Imported before all else of forge: `python -m forge` searches no module in the current folder.

Python puts that folder first, so that a torch.py in a folder that was cloned would run where its kernels are only to be
checked. The command `forge` never did; forge itself is found by its own place.
"""

import os
import sys


def leave_current_folder() -> None:
    """Remove the current folder from sys.path where `-m forge` is run, which is being found while this is imported."""
    as_program = sys.argv[:1] == ["-m"] and _module().partition(".")[0] == "forge"
    if as_program and not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _module() -> str:
    """Return the argument of -m on the command line."""
    options = sys.orig_argv[1:]
    for index, option in enumerate(options):
        if option.startswith("-") and not option.startswith(("--", "-W", "-X")) and "m" in option:
            return option.partition("m")[2] or "".join(options[index + 1 : index + 2])
    return ""


leave_current_folder()
