"""What mkdocs makes of the documents, which are written to be read and run where they lie (tests/test_docs.py).

Source: mkdocs' hooks, https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

import re
from typing import Any

_BLOCK = re.compile(r"^```(\w+) ([^\n`]+)$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|from_scratch\.py)\)")
_MARKS = ("printed", "applied")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A block that names its file has the name as its title, what a test reads of it is not shown, and a link to a file
    that is no document is its text."""
    return _OUTSIDE.sub(r"\1", _BLOCK.sub(_fence, markdown))


def _fence(match: re.Match) -> str:
    language, rest = match.groups()
    return f"```{language}" if rest in _MARKS else f'```{language} title="{rest}"'
