"""Errors as one line."""

import pytest

from forge.ir.checks import in_one_line

COMPILERS = """C++ compile error

Command:
g++ main.cpp -o main.so

Output:
main.cpp: In function 'void kernel()':
main.cpp:23:5: error: 'at::vec' has not been declared
main.cpp:24:5: error: 'tmp0' was not declared in this scope
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "RuntimeError"),
        ("first\nsecond", "RuntimeError: first"),
        ("In a call:\n  it failed\nframes", "RuntimeError: In a call: it failed"),
        ("sizes: error: 3", "RuntimeError: sizes: error: 3"),
        (COMPILERS, "RuntimeError: C++ compile error: 'at::vec' has not been declared"),
    ],
)
def test_an_error_in_one_line(message: str, line: str) -> None:
    assert in_one_line(RuntimeError(message)) == line
