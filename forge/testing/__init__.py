"""OpInfos, shipped with forge: operations are tested with them, and kernels are verified with them."""

from forge.testing import opinfos
from forge.testing.opinfo import (
    ALL,
    BOOL,
    FLOATS,
    INTEGERS,
    REAL,
    Directive,
    ErrorSample,
    OpInfo,
    Sample,
    all_opinfos,
    make_tensor,
    register_opinfo,
)
from forge.testing.table import sample

__all__ = [
    "ALL",
    "BOOL",
    "FLOATS",
    "INTEGERS",
    "REAL",
    "Directive",
    "ErrorSample",
    "OpInfo",
    "Sample",
    "all_opinfos",
    "make_tensor",
    "register_opinfo",
    "sample",
]
