"""The report of a jitted program, operation by operation: as data, as text for a terminal, as JSON."""

from forge.debug.report.explanation import Explanation, explain
from forge.debug.report.rows import CostRow, Row, SavedRow

__all__ = ["CostRow", "Explanation", "Row", "SavedRow", "explain"]
