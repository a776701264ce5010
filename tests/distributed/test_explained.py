"""Reports of forge.explain on programs that communicate: their messages, the overlap, and differences between
processes."""

import re
from pathlib import Path

import pytest
from explained_programs import cut_report, ranks_alike, ranks_differ, reports_from_disk, sharded_report
from two_processes import Pair


def test_messages_that_gather_and_reduce_parameters(pair: Pair) -> None:
    """Each process sends half of all parameters, once for the forward and once for their gradients."""
    for found in pair.run(sharded_report):
        rows = {
            (phase, operation): []
            for phase in ("forward", "backward")
            for operation in ("all_gather", "reduce_scatter")
        }
        for row in found["rows"]:
            rows[row["phase"], row["operation"]].append(row)
        assert rows["forward", "reduce_scatter"] == []
        for messages in (rows["forward", "all_gather"], rows["backward", "reduce_scatter"]):
            assert sum(row["bytes"] for row in messages) == found["size"]
            assert sum(row["sent_bytes"] for row in messages) == found["size"] // 2
            assert len(messages) > 1 and {row["group_size"] for row in messages} == {2}
        assert any("linear" in row["overlap"] for row in rows["forward", "all_gather"])
        assert (
            f"collectives: forward, all_gather over 2 processes: {len(rows['forward', 'all_gather'])} messages"
            in found["text"]
        )


@pytest.mark.slow
def test_a_profile_sends_nothing(pair: Pair) -> None:
    """Only the first process profiles its program; the computation that overlaps with a message has a time."""
    profiled, other = pair.run(sharded_report)
    assert profiled["unprofiled"] == [] and profiled["costs"] > 0
    for row in profiled["rows"]:
        assert (row["overlap_seconds"] > 0) == bool(row["overlap"])
    assert all(row["overlap_seconds"] is None for row in other["rows"])


def test_messages_of_cut_products(pair: Pair) -> None:
    for rows in pair.run(cut_report):
        for row in rows:
            assert row["operation"] in ("all_reduce", "all_gather") and row["module"]
            hops = 2 if row["operation"] == "all_reduce" else 1
            assert row["sent_bytes"] == hops * row["bytes"] // 2
        assert {row["operation"] for row in rows} == {"all_reduce", "all_gather"}


@pytest.mark.slow
def test_messages_of_a_program_from_disk(pair: Pair, tmp_path: Path) -> None:
    for compiled, read, cached in pair.run(reports_from_disk, str(tmp_path)):
        assert cached == 1 and compiled
        assert read == compiled


def test_processes_that_run_the_same_programs_do_not_differ(pair: Pair) -> None:
    assert pair.run(ranks_alike) == [[], []]


def test_facts_in_which_processes_differ(pair: Pair) -> None:
    first, second = pair.run(ranks_differ)
    assert first == second
    operations, *_, collective = first
    assert operations.startswith("operations: torch ") and ", torch " in operations
    assert operations.endswith("on rank 1") and " on rank 0, " in operations
    assert re.fullmatch(
        r"collective 0: all_reduce of 1 tensor, 12 B, in group 0, in the forward of graph 0 "
        r"\(explained_programs.py:\d+  .*all_reduce.*\) on rank 0, all_reduce of .*\) on rank 1",
        collective,
    )
