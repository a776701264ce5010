"""Collectives of the captured program, started as early and awaited as late as the calls around them allow.

They start in the order of the program, which is that of every process. The product of a weight's gradient, for
instance, runs while the gradient of the layer's input is reduced (tensor parallelism): `delay_products` brings it there
before regions are made, which no call leaves over a collective, and `overlap_calls` moves the collectives between the
calls that run.

Source: M. Shoeybi et al., Megatron-LM (2019), whose linear layers overlap these by hand.
"""

import math
from collections.abc import Sequence

from forge import prims
from forge.ir import BoundSymbol, Tag, Trace
from forge.ir.proxies import bytes_of, hint_of
from forge.prims.distributed import STARTS
from forge.transforms.makers import exposed, innermost

_WORK = 4096  # operations of products for each byte of a collective: what a GPU does while NVLink carries it
_STAYS = frozenset({Tag.RANDOM, Tag.SYNCHRONIZING})  # beside barriers: calls that no call moves over
_BARRIERS = frozenset({Tag.EFFECT, Tag.OPAQUE, Tag.DONATES, Tag.IN_PLACE})  # they may write to what is being sent


def is_start(bound: BoundSymbol) -> bool:
    """Return whether a call starts collectives, and does nothing else."""
    return all(call.symbol in STARTS for call in innermost(bound))


def is_wait(bound: BoundSymbol) -> bool:
    """Return whether a call waits for a collective, and does nothing else."""
    return all(call.symbol is prims.wait_tensor for call in innermost(bound))


def delay_products(trace: Trace) -> Trace:
    """Return the program with matrix products that a collective does not wait for between its start and its wait: the
    last ones before it, as many as take its time, and what reads their results."""
    written: list[BoundSymbol] = []
    first = 0  # of the calls that may move
    for bound in exposed(trace.bound_symbols, is_start, Tag.EFFECT):
        written.append(bound)
        if is_start(bound):
            delayed = _products_beside(bound, written[first:-1])
            moved = set(map(id, delayed))
            written[first:] = [*(call for call in written[first:] if id(call) not in moved), *delayed]
            first = len(written) - len(delayed)
        elif not (_BARRIERS | _STAYS).isdisjoint(bound.all_tags):
            first = len(written)
    return trace.derive("delay_products", written)


def _products_beside(start: BoundSymbol, calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Return the products among the calls before a start that may run after it, and the calls that read them."""
    needed, apart = set(start.inputs), []
    for bound in reversed(calls):
        if needed.isdisjoint(bound.outputs):
            apart.append(bound)
        else:
            needed.update(bound.inputs)
    work = _WORK * sum(max(bytes_of(call.args[0]), bytes_of(call.output)) for call in innermost(start))
    chosen: set[str] = set()  # results of products
    for bound in apart:
        if work <= 0:
            break
        done = _operations(bound)
        work -= done
        if done:
            chosen.update(bound.outputs)
    delayed = []
    for bound in reversed(apart):
        if not chosen.isdisjoint((*bound.outputs, *bound.inputs)):
            chosen.update(bound.outputs)
            delayed.append(bound)
    return delayed


def _operations(bound: BoundSymbol) -> int:
    """Return the multiplications and additions of the matrix products of a call."""
    products = [call for call in innermost(bound) if call.symbol is prims.matmul]
    return sum(2 * math.prod(map(hint_of, (*call.output.shape, call.args[0].shape[-1]))) for call in products)


def overlap_calls(trace: Trace) -> Trace:
    """Return the claimed trace with each collective started after the call that makes its input, and awaited before the
    call that reads its result."""
    calls = _starts_early(trace.bound_symbols)
    return trace.derive("overlap_calls", _waits_late(calls))


def _starts_early(calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Move each start up to the last call that makes its input, sends before it, or may write to its input."""
    written: list[BoundSymbol] = []
    for bound in calls:
        place = len(written)
        if is_start(bound):
            inputs = set(bound.inputs)
            while place and not _holds(written[place - 1]) and inputs.isdisjoint(written[place - 1].outputs):
                place -= 1
        written.insert(place, bound)
    return written


def _waits_late(calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Move each wait down to the first call that reads its result, or may write to what is sent."""
    written: list[BoundSymbol] = []  # backwards
    for bound in reversed(calls):
        place = len(written)
        if is_wait(bound):
            outputs = set(bound.outputs)
            while place and outputs.isdisjoint(written[place - 1].inputs):
                if _holds(written[place - 1]) and not is_start(written[place - 1]):
                    break
                place -= 1
        written.insert(place, bound)
    return written[::-1]


def _holds(bound: BoundSymbol) -> bool:
    """Return whether nothing that sends moves over a call."""
    return not _BARRIERS.isdisjoint(bound.all_tags) and not is_wait(bound)
