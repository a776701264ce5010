"""Calls in the place of others, whose results they give."""

from collections.abc import Callable

from forge.ir import Proxy, Trace
from forge.ir.symbol import substitute


def record_as(new: Trace, output: Proxy, make: Callable[[], Proxy]) -> None:
    """Record the calls that `make` makes; its result is `output` to the calls that follow. `new` is being recorded."""
    with new.collecting() as recorded:
        made = make()
    for call in recorded:
        new.record(substitute(call, {made.name: output}))
