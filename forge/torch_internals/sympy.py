"""Expressions of symbolic sizes."""

from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.printers import PythonPrinter as PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT as SymT
from torch.utils._sympy.symbol import symbol_is_type as symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges


def raw_expression(node: Any) -> Any:
    """Return the expression of a symbolic number as it was made: what torch has learnt since is not put into it."""
    return node._expr


def record_guards(environment: ShapeEnv) -> None:
    """Have a ShapeEnv record guards, which torch.export has told it to ignore."""
    environment.frozen = False


def evaluate_static(environment: ShapeEnv, question: Any) -> Any:
    """Return an expression's value where it is one for every size, None elsewhere; no guard is added."""
    return environment._maybe_evaluate_static(question)
