"""Calls in an order in which each comes after what it reads."""

from collections.abc import Iterable

from forge.ir import BoundSymbol, Tag


def in_order(calls: Iterable[BoundSymbol], inputs: Iterable[str]) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """Return (the calls, moved back no further than to where their inputs are there; those whose inputs never are).

    Nothing passes a call with an effect, and random calls keep their order.
    """
    available = set(inputs)
    result: list[BoundSymbol] = []
    waiting: list[BoundSymbol] = []
    missing: set[str] = set()

    def put(bound: BoundSymbol) -> None:
        result.append(bound)
        available.update(bound.outputs)

    for call in calls:
        if _must_wait(call, waiting, available):
            waiting.append(call)
            missing.update(name for name in call.inputs if name not in available)
            continue
        put(call)
        while not missing.isdisjoint(available):
            queue, waiting[:] = list(waiting), []
            missing.clear()
            for late in queue:
                if _must_wait(late, waiting, available):
                    waiting.append(late)
                    missing.update(name for name in late.inputs if name not in available)
                else:
                    put(late)
    return result, waiting


def _must_wait(call: BoundSymbol, waiting: list[BoundSymbol], available: set[str]) -> bool:
    if not available.issuperset(call.inputs):
        return True
    if not waiting:
        return False
    if Tag.EFFECT in call.all_tags or any(Tag.EFFECT in other.all_tags for other in waiting):
        return True
    return Tag.RANDOM in call.all_tags and any(Tag.RANDOM in other.all_tags for other in waiting)
