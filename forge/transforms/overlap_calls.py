"""Collectives of the captured program, started as early and awaited as late as neighbouring calls allow.

They start in program order, which is the same on every rank, and stay between the messages of
`bucket_collectives`. The product of a weight's gradient, for instance, runs while the gradient of the layer's input is
reduced (tensor parallelism).

Source: M. Shoeybi et al., Megatron-LM (2019), whose linear layers overlap these by hand.
"""

from collections.abc import Sequence

from forge import prims
from forge.ir import BoundSymbol, Tag, Trace
from forge.prims.distributed import MESSAGE_TAGS, STARTS
from forge.transforms.makers import innermost

_BARRIERS = frozenset({Tag.EFFECT, Tag.OPAQUE, Tag.DONATES, Tag.IN_PLACE})  # they may write to the data being sent


def is_start(bound: BoundSymbol) -> bool:
    """Return whether a call only starts collectives."""
    return all(call.symbol in STARTS for call in innermost(bound))


def is_wait(bound: BoundSymbol) -> bool:
    """Return whether a call only waits for a collective."""
    return all(call.symbol is prims.wait_tensor for call in innermost(bound))


def overlap_calls(trace: Trace) -> Trace:
    """Return the claimed trace with each collective started after its input's producer, and awaited before the
    first user of its result."""
    calls = _starts_early(trace.bound_symbols)
    return trace.derive("overlap_calls", _waits_late(calls))


def _starts_early(calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Move each start up to the last call that makes its input, is a message or sends, or may write to its input."""
    result: list[BoundSymbol] = []
    for bound in calls:
        place = len(result)
        if is_start(bound):
            inputs = set(bound.inputs)
            while place and not _bars_start(result[place - 1]) and inputs.isdisjoint(result[place - 1].outputs):
                place -= 1
        result.insert(place, bound)
    return result


def _waits_late(calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Move each wait down to the first call that reads its result, or may write to the data being sent."""
    result: list[BoundSymbol] = []  # in reverse
    for bound in reversed(calls):
        place = len(result)
        if is_wait(bound):
            outputs = set(bound.outputs)
            while place and outputs.isdisjoint(result[place - 1].inputs):
                if _holds(result[place - 1]) and not is_start(result[place - 1]):
                    break
                place -= 1
        result.insert(place, bound)
    return result[::-1]


def _bars_start(bound: BoundSymbol) -> bool:
    """Return whether no start moves across a call: a message's two calls could not move across one between them."""
    return _holds(bound) or not MESSAGE_TAGS.isdisjoint(bound.symbol.tags)


def _holds(bound: BoundSymbol) -> bool:
    """Return whether no call that sends moves across a call."""
    return not _BARRIERS.isdisjoint(bound.all_tags) and not is_wait(bound)
