"""The examples of docs/how-to/distributed.md, run by the two existing processes.

tests/test_docs.py runs them as the document says.
"""

import re
from pathlib import Path

import pytest
from distributed_programs import documented
from two_processes import Pair

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/how-to/distributed.md").read_text()
EXAMPLE = re.compile(r"^```console\n\$ [^\n]* (examples/distributed/\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = EXAMPLE.findall(DOCUMENT)


def test_every_example_is_in_the_document() -> None:
    assert {path for path, _ in EXAMPLES} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "examples/distributed").glob("*.py")
    }


@pytest.mark.parametrize(("path", "printed"), EXAMPLES, ids=[Path(path).stem for path, _ in EXAMPLES])
def test_an_example_prints_what_the_document_says(path: str, printed: str, pair: Pair) -> None:
    first, second = pair.run(documented, Path(path).stem, (ROOT / path).read_text())
    assert first == printed
    assert second == ""
