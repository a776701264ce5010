"""A process that reads names of entries, one per line, checks them, and prints each result as a line of JSON, then
`done`."""

import json
import os
import sys

import torch

from tests.sweep.checks import run_check
from tests.sweep.entries import all_entries


def main(checks: list[str]) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # torch's own output must not mix with answers
    for line in sys.stdin:
        name = line.strip()
        for check in checks:
            status, why = run_check(check, all_entries()[name])
            print(json.dumps({"name": name, "check": check, "status": status, "why": why}), file=answers, flush=True)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
