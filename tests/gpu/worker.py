"""Runs the cases that come by name, one a line, and says of each what it found, as JSON, one a line."""

import json
import os
import sys
import traceback

import torch

from tests.gpu.cases import SKIPPED, Case, Skipped, all_cases


def main(name: str) -> None:
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # torch's own output is no answer
    known = all_cases()
    for line in sys.stdin:
        status, why = _verdict(known[line.strip()], device)
        print(json.dumps({"status": status, "why": why}), file=answers, flush=True)


def _verdict(case: Case, device: torch.device) -> tuple[str, str]:
    torch._dynamo.reset()
    try:
        return case.run(device)
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
