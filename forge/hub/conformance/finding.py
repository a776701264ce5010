"""What `forge kernels check` says: one finding for each place that does not meet a requirement of the Hub."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Finding:
    """One violation, or advice. file: the path below the repository; line: from 1, or 0 for the file as a whole.

    requirement: the short name of the requirement, as docs/reference/checking-a-kernel.md lists them.
    """

    file: str
    line: int
    requirement: str
    text: str
    advice: bool = False

    def __str__(self) -> str:
        """Return one line, in which what a terminal would act on is escaped: a file's name may hold any of it."""
        where = f"{self.file}:{self.line}" if self.line else self.file
        return escape(f"{where}: {self.requirement}: {self.text}{' (advice)' if self.advice else ''}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def escape(text: str) -> str:
    """Return the text, with control characters and lone surrogates as Python writes them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
