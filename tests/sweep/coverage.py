"""What a sweep found, as docs/reference/coverage.md."""

from collections import Counter, defaultdict

from tests.sweep.checks import CHECKS

HEAD = """# Coverage of torch's operators

Written by `make sweep`: every entry of torch's operator database (`torch.testing._internal`'s `op_db`) that gives the
same twice in eager, through `forge.jit` on a CPU with the torch executor, held against eager. Three samples of each.
"""


def coverage(found: list[dict]) -> str:
    """The document."""
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
        lines += [f"- `{each['name']}`, {each['check']}: {each['why']}" for each in failed] or ["Nothing."]
    opaque = [each for each in found if each["status"] == "failed" and each["check"] == "native"]
    lines += ["", "## Not native", "", "What torch runs in forge's programs (opaque calls), or what ends a graph.", ""]
    lines += [f"- `{each['name']}`: {each['why']}" for each in opaque] or ["Nothing."]
    return "\n".join(lines) + "\n"
