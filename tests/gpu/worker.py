"""A process that reads names of cases, one per line, runs them, and prints each result as a line of JSON.

A case in which Inductor cannot compile a region fails, because torch's calls in its place are correct but slow.
"""

import json
import os
import sys
import traceback
from typing import Any

import torch

from forge.compiler import fusion
from tests.gpu.cases import SKIPPED, Case, Skipped, all_cases


def main(name: str) -> None:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # torch's own output must not mix with answers
    known, warn_of_fallback = all_cases(), fusion.warn_of_fallback

    def record(what: str, runners: str, error: Exception, *rest: Any) -> None:
        _uncompiled.append(f"{what}: {error!r}")
        warn_of_fallback(what, runners, error, *rest)

    fusion.warn_of_fallback = record
    for line in sys.stdin:
        status, why = _verdict(known[line.strip()], device)
        print(json.dumps({"status": status, "why": why}), file=answers, flush=True)


_uncompiled: list[str] = []  # regions of the running case, with their errors


def _verdict(case: Case, device: torch.device) -> tuple[str, str]:
    torch._dynamo.reset()
    _uncompiled.clear()
    fusion._warnings.clear()
    try:
        verdict = case.run(device)
        return ("raises", _uncompiled[0]) if _uncompiled else verdict
    except Skipped as skipped:
        return SKIPPED, str(skipped)
    except torch.cuda.OutOfMemoryError as error:
        return SKIPPED, f"out of memory: {str(error)[:100]}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "raises",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place.filename}:{place.lineno})",
        )
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
