"""Kernels that read their own writes have a barrier in between."""

import pytest
import torch

import forge
from forge.torch_internals.inductor import barriers
from forge.torch_internals.inductor.barriers import with_barriers

LOOPS = """
def kernel(in_ptr0, out_ptr0, out_ptr1):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1), r0_mask)
        tl.store(out_ptr0 + (r0_1), tmp0, r0_mask)
    tmp1 = tl.sum(_tmp1, 1)[:, None]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp2 = tl.load(in_ptr0 + (r0_1), r0_mask)
        tmp3 = tl.load({read} + (r0_1), r0_mask)
        tl.store(out_ptr1 + (r0_1), tmp3, r0_mask)
"""


def lines_with(text: str, word: str) -> list[int]:
    return [number for number, line in enumerate(text.split("\n")) if word in line]


def test_a_loop_that_reads_what_another_one_wrote_waits_for_it() -> None:
    text = with_barriers(LOOPS.format(read="out_ptr0"))
    (barrier,) = lines_with(text, "    tl.debug_barrier()")
    assert barrier == lines_with(text, "for r0_offset")[1] - 1


def test_loops_that_read_what_the_kernel_is_given_wait_for_nothing() -> None:
    text = LOOPS.format(read="in_ptr1")
    assert with_barriers(text) == text


def test_what_is_read_behind_the_loops_is_waited_for_there() -> None:
    text = with_barriers(LOOPS.format(read="in_ptr0") + "    tmp4 = tl.load(out_ptr1 + (x0), None)\n")
    (barrier,) = lines_with(text, "    tl.debug_barrier()")
    assert "tmp4" in text.split("\n")[barrier + 1]


def test_a_second_barrier_stands_where_more_was_written_since() -> None:
    body = "".join(LOOPS.format(read="out_ptr0").splitlines(keepends=True)[2:])
    text = with_barriers(LOOPS.format(read="out_ptr0") + body.replace("out_ptr0", "out_ptr1"))
    assert len(lines_with(text, "tl.debug_barrier()")) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of Triton need a GPU")
def test_inductors_kernels_pass_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(barriers, "with_barriers", lambda text: seen.append(text) or text)
    forge.jit(lambda x: x.softmax(-1) * x.exp().sum(), cache=False)(torch.randn(64, 3333, device="cuda"))
    assert seen
