"""Hooks of mkdocs: turn the documents, which tests/test_docs.py runs as they are, into pages.

Source: mkdocs' hooks, https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

import posixpath
import re
from typing import Any

_BLOCK = re.compile(r"^```(\w+) ([^\n`]+)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)[^)]*\)")
_MARKS = ("printed", "applied")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's markdown as the site shows it.

    A block that names its file gets the name as its title, marks that tests read are dropped, and a link to a file that
    is not part of the site becomes its text.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[1] if target.startswith("..") or target.endswith(".py") else match[0]

    return _LINK.sub(link, _BLOCK.sub(_fence, markdown))


def _fence(match: re.Match) -> str:
    language, rest = match.groups()
    return f"```{language}" if rest in _MARKS else f'```{language} title="{rest}"'
