"""The command `forge`: `trace`, `explain`, `bench` of a program; `doctor`; `kernels` of the Hub.

app.py has what all commands share, help.py what --help prints, and kernels.py, programs.py and doctor.py the commands;
the other files say what their arguments mean.
"""

from forge.cli import doctor, kernels, programs
from forge.cli.app import main

__all__ = ["main"]
