"""The examples of docs/how-to/distributed.md, run by two processes that are there already.

tests/test_docs.py runs them as the document says."""

import re
from pathlib import Path

import pytest
from distributed_programs import documented
from two_processes import Pair

DOCUMENT = (Path(__file__).parents[2] / "docs/how-to/distributed.md").read_text()
EXAMPLE = re.compile(r"^```python (\w+)\.py\n(.*?)^```\n\n^```console\n\$ [^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


EXAMPLES = EXAMPLE.findall(DOCUMENT)


@pytest.mark.parametrize(("name", "code", "printed"), EXAMPLES, ids=[each[0] for each in EXAMPLES])
def test_an_example_prints_what_the_document_says(name: str, code: str, printed: str, pair: Pair) -> None:
    first, second = pair.run(documented, name, code)
    assert first == printed
    assert second == ""
