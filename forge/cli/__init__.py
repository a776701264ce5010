"""The command `forge`: `trace`, `explain`, `bench` of a program; `export` and `run`; `doctor`; `kernels` of the Hub.

app.py has what all commands share, help.py what --help prints; kernels.py, programs.py, files.py and doctor.py declare
the commands, and the files of those names in actions/ do what they say. names.py has what completion offers. None of
these but the actions imports torch; the other files say what the actions' arguments mean.
"""

from forge.cli import doctor, files, kernels, programs
from forge.cli.app import main

__all__ = ["main"]
