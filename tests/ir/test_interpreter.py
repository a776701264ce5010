"""Settings of Python's interpreter while forge compiles."""

import gc
import resource

import pytest

from forge.ir.interpreter import paused_gc, with_room

CALLS = 300


def faults_in_a_loop(depth: int) -> int:
    """Return the number of pages mapped while a loop at this depth of frames calls a function."""
    if depth:
        return faults_in_a_loop(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def leaf() -> None:
    """Have a larger frame than the loop, so that at some depth it does not fit into the rest of a chunk."""
    a = b = c = d = e = f = g = h = i = j = k = m = n = o = p = q = r = s = t = u = v = w = x = y = z = None  # noqa: F841


def most_faults() -> int:
    return max(faults_in_a_loop(depth) for depth in range(400))


def test_a_loop_maps_no_memory_at_any_depth():
    with_memory = with_room(lambda: most_faults())
    assert with_memory() < CALLS / 2 < most_faults()


def test_garbage_collection_is_as_before_after_an_error():
    with pytest.raises(ValueError), paused_gc():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
