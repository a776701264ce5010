"""The report of a run, with its device and date, as a section of docs/reference/verification.md."""

import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.gpu.cases import SKIPPED
from tests.gpu.measure import CONDITIONED, WITHIN

FAILED = ("beyond", "raises", "hangs", "ends")
BEGIN, END = "<!-- make test-gpu -->", "<!-- end of make test-gpu -->"
SHOWN = 40

_MEASURE = """Each result and each gradient f is held against eager's e in the same dtype and float64's r: in the
Euclidean norm and in the largest element's, |f - r| <= 2 |e - r| + (eps + 8 eps32) |r|. Where that fails, |e - r| may
be what float64 itself gives for inputs that are half an eps off, or eager's distance for those inputs: *by
conditioning*, counted by itself (`tests/gpu/measure.py`)."""


def described(found: list[dict], chosen: int, device: str) -> str:
    """Return the section: a table by kind, and the names of the failures."""
    kinds: dict[str, Counter] = {}
    for each in found:
        kinds.setdefault(each["name"].partition("/")[0], Counter())[each["status"]] += 1
    rows = [
        f"| {kind} | {sum(counts.values())} | {counts[WITHIN]} | {counts[CONDITIONED]} | {counts[SKIPPED]} | "
        f"{sum(counts[each] for each in FAILED)} |"
        for kind, counts in kinds.items()
    ]
    minutes = sum(each["seconds"] for each in found) / 60
    failed = [each for each in found if each["status"] in FAILED]
    lines = [
        "## On a GPU",
        "",
        f"`make test-gpu` on {_where(device)}, {datetime.now(UTC):%Y-%m-%d}:",
        f"{len(found)} of {chosen} cases ran in the default configuration, in {minutes:.0f} minutes of one process.",
        "",
        *_MEASURE.splitlines(),
        "",
        "| kind | cases | within | by conditioning | not run by torch | failed |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Failed: {len(failed) or 'none'}.",
        *(["", *(f"- `{each['name']}` {each['status']}: {each['why']}" for each in failed[:SHOWN])] if failed else []),
    ]
    return "\n".join(lines)


def written(document: str, section: str) -> str:
    """Return the document with the section in place of an earlier one, or at its end."""
    before, found, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    start = before if found else (document.rstrip() or "# Verification") + "\n\n"
    return f"{start}{BEGIN}\n{section}\n{END}{after or chr(10)}"


def _where(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"the CPU ({platform.machine()})"
    others = f"Python {platform.python_version()}, transformers {_version('transformers')}"
    return f"{name}, torch {torch.__version__}, {others}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
