"""The table of programs, filled by every file beside this one."""

from capture.programs import (  # noqa: F401  each fills the table
    effects,
    errors,
    functions,
    grad_modes,
    modules,
    reshaping,
    surroundings,
    views,
)
from capture.programs.table import PROGRAMS

__all__ = ["PROGRAMS"]
