"""The tests of forge in its default configuration on a GPU against an error bound: `make test-gpu`."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
if _TESTS not in sys.path:  # as pytest has it: `support`, `capture` and `test_ops` are found there
    sys.path.append(_TESTS)
