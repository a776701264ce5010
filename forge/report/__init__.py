"""What became of a jitted program, operation by operation: as data, as text for a terminal, as JSON."""

from forge.report.explanation import Explanation, explain
from forge.report.rows import Row, SavedRow

__all__ = ["Explanation", "Row", "SavedRow", "explain"]
