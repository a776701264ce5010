"""python -m tests.fuzz [--minutes M] [--seed N] [--examples K] [--finds FOLDER]

Run random programs in the default configuration against eager, in batches. Each batch has a process and a seed of its
own, N, N + 1, …; the last line has the next seed. One batch in ten has the real Inductor; in the others torch's
operators run the regions between checks (FORGE_CHECK=regions). A batch ends at its first find, which hypothesis
shrinks; its script is written to FOLDER. The exit status is 1 after a find.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.worker import FIND

ROOT = Path(__file__).parents[2]
INDUCTOR_EVERY = 10
LONGEST = 900  # seconds of a batch


def _batch(seed: int, examples: int, cache: str, folder: Path) -> tuple[int, str]:
    """Run the programs of one seed in a process. Return its status and its output."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1", "FORGE_CHECK": "regions"}
    for name in ("FORGE_EXECUTORS", "FORGE_CACHE", "FORGE_CACHE_DIR"):
        environment.pop(name, None)
    if seed % INDUCTOR_EVERY == INDUCTOR_EVERY - 1:
        del environment["FORGE_CHECK"]
        examples = max(1, examples // 10)
    command = [sys.executable, "-m", "tests.fuzz.worker", str(seed), str(examples), str(folder)]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"seed {seed}: takes more than {LONGEST} seconds; the program is {folder / f'{seed}.py'}\n"
    if ran.returncode not in (0, FIND):
        return 1, f"seed {seed}: the process ends with status {ran.returncode}\n{ran.stderr[-2000:]}"
    return int(ran.returncode == FIND), ran.stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=300, help="programs of a batch")
    parser.add_argument("--finds", type=Path, default=ROOT / "build" / "fuzz", help="where scripts are written")
    options = parser.parse_args(arguments)
    options.finds.mkdir(parents=True, exist_ok=True)
    started, seed, found = time.monotonic(), options.seed, 0
    with tempfile.TemporaryDirectory(prefix="forge-fuzz-", ignore_cleanup_errors=True) as cache:
        while time.monotonic() - started < 60 * options.minutes:
            status, said = _batch(seed, options.examples, cache, options.finds)
            found += status
            print(said, end="", flush=True)
            seed += 1
    print(f"{found} finds in {(time.monotonic() - started) / 60:.1f} minutes; go on with --seed {seed}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
