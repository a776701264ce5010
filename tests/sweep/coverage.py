"""The results of a sweep, as docs/reference/coverage.md."""

import re
import textwrap
from collections import Counter, defaultdict

from tests.sweep.checks import CHECKS

HEAD = """# Coverage of torch's operators

Written by `make sweep`: every entry of torch's operator database (`torch.testing._internal`'s `op_db`) that gives the
same twice in eager, through `forge.jit` on a CPU with the torch executor, held against eager. Three samples of each.
"""


def coverage(found: list[dict]) -> str:
    """Return the document."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for each in found:
        counts[each["check"]][each["status"]] += 1
    lines = [HEAD, "| check | what it asks | right | failed | torch cannot |", "|---|---|---|---|---|"]
    for name in (name for name in CHECKS if name in counts):
        about, count = (CHECKS[name].__doc__ or "").splitlines()[0], counts[name]
        lines.append(f"| {name} | {about} | {count['ok']} | {count['failed']} | {count['skipped']} |")
    failed = [each for each in found if each["status"] == "failed" and each["check"] != "native"]
    if counts.keys() - {"native"}:
        lines += ["", "## What fails", ""]
        lines += _by_reason([(each["name"], f"{each['check']}: {_shortened(each['why'])}") for each in failed])
    opaque = [each for each in found if each["status"] == "failed" and each["check"] == "native"]
    lines += ["", "## Not native", "", "What torch runs in forge's programs (opaque calls), or what ends a graph.", ""]
    lines += _by_reason([(each["name"], _causes(each["why"])) for each in opaque])
    return "\n".join(lines) + "\n"


def _by_reason(reasons: list[tuple[str, str]]) -> list[str]:
    """Return one line for each reason, with the entries that have it."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons:
        names[reason].append(f"`{name}`")
    return [f"- {', '.join(each)}: {reason}" for reason, each in names.items()] or ["Nothing."]


def _shortened(why: str) -> str:
    return textwrap.shorten(why, 90, placeholder=" …")


def _causes(why: str) -> str:
    """Return the opaque calls and the kinds of graph breaks, without Dynamo's explanation of each."""
    opaque, *breaks = re.split(r"(?:^|, )graph break: ", why)
    kinds = dict.fromkeys(f"graph break: {each.partition(': ')[0]}" for each in breaks)
    return ", ".join([*([opaque] if opaque else []), *kinds])
