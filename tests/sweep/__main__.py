"""The command line of the sweep: python -m tests.sweep [--only NAME …] [--checks CHECK …] [--jobs N] [--write
docs/reference/coverage.md]"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

SECONDS = 300.0  # for all checks of one entry


class Worker:
    """A process that checks entries, one per line, restarted when it dies or hangs."""

    def __init__(self, checks: list[str]) -> None:
        self.checks = checks
        self.process: subprocess.Popen | None = None

    def check(self, name: str) -> list[dict]:
        if self.process is None or self.process.poll() is not None:
            environment = {"FORGE_EXECUTORS": "torch", "FORGE_CACHE": "0", **os.environ}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.sweep.worker", *self.checks],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        process, found = self.process, []
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        started = time.monotonic()
        try:
            print(name, file=process.stdin, flush=True)
            for line in process.stdout:
                if line.strip() == "done":
                    return found
                found.append(json.loads(line))
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        process.wait()
        seconds = time.monotonic() - started
        why = "hangs" if seconds >= SECONDS else f"ends the process with status {process.returncode}"
        missing = [check for check in self.checks if check not in {each["check"] for each in found}]
        return [*found, *({"name": name, "check": check, "status": "failed", "why": why} for check in missing)]


def sweep(names: list[str], checks: list[str], jobs: int) -> list[dict]:
    """Return the outcome of each check of each entry."""
    todo: queue.Queue[str] = queue.Queue()
    for name in names:
        todo.put(name)
    found: list[dict] = []

    def work() -> None:
        worker = Worker(checks)
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                break
            results = worker.check(name)
            found.extend(results)
            bad = [f"{each['check']}: {each['why']}" for each in results if each["status"] == "failed"]
            print(f"[{len(names) - todo.qsize():>3}/{len(names)}] {name}: {'; '.join(bad) or 'ok'}", flush=True)
        if worker.process is not None:
            worker.process.stdin.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sorted(found, key=lambda each: (each["name"], each["check"]))


def main() -> int:
    from tests.sweep.checks import CHECKS
    from tests.sweep.coverage import coverage
    from tests.sweep.entries import all_entries

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="entries by name, or by the start of it")
    parser.add_argument("--checks", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", type=Path, help="the document to write")
    parser.add_argument("--json", type=Path, help="a file for what each check says")
    options = parser.parse_args()
    names = [name for name in all_entries() if not options.only or name.startswith(tuple(options.only))]
    found = sweep(names, options.checks, options.jobs)
    if options.json:
        options.json.write_text("".join(json.dumps(each) + "\n" for each in found))
    text = coverage(found)
    if options.write:
        options.write.write_text(text)
    print(text.split("\n\n## ")[0])
    return any(each["status"] == "failed" for each in found)


if __name__ == "__main__":
    sys.exit(main())
