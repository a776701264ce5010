"""Patterns: several calls of a trace that become one call of a composite symbol, whose body is a reference in torch."""

from forge.patterns.matching import Match, find_matches
from forge.patterns.reference import Pattern, pattern
from forge.patterns.replacing import replace_patterns

__all__ = ["Match", "Pattern", "find_matches", "pattern", "replace_patterns"]
