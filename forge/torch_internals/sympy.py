"""Expressions of symbolic sizes."""

from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.printers import PythonPrinter as PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT as SymT
from torch.utils._sympy.symbol import symbol_is_type as symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges
