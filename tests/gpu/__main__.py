"""python -m tests.gpu [--minutes M] [--state FILE] [--only START …] [--every N] [--write FILE]

Run the cases that FILE does not have yet, in several processes that share the device, and add each result to it. The
run ends after M minutes, and another call continues it. The exit status is 0 if all cases ran and none failed, 1 if one
failed, 3 if some are left.
"""

import argparse
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.gpu.cases import Case, all_cases
from tests.gpu.report import FAILED, described, written

ROOT = Path(__file__).parents[2]
STATE = ROOT / "build" / "gpu" / "results.jsonl"
LEFT = 3
UNUSABLE = ("CUDA error", "CUDA driver error", "device-side assert", "cudaError")  # for all later cases of the process


class Worker:
    """A process that runs cases, restarted when it ends or takes too long."""

    def __init__(self, device: str, cache: Path) -> None:
        self.device = device
        self.cache = cache
        self.process: subprocess.Popen | None = None

    def run(self, name: str, seconds: float) -> dict:
        """Return the process's answer for a case."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        process = self.process
        try:
            print(name, file=process.stdin, flush=True)
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if selector.select(seconds) else None
        except BrokenPipeError:
            line = ""
        said = json.loads(line) if line else None
        if said is None or any(each in said["why"] for each in UNUSABLE):
            process.kill()
            process.wait()
        if said is not None:
            return said
        if line is None:
            return {"status": "hangs", "why": f"takes more than {seconds:.0f} seconds"}
        return {"status": "ends", "why": f"ends the process with status {process.returncode}"}

    def _start(self) -> None:
        environment = {
            **os.environ,
            "FORGE_ZOO": "wide" if self.device == "cuda" else "",
            "FORGE_CACHE_DIR": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        for name in ("FORGE_EXECUTORS", "FORGE_CACHE", "FORGE_CHECK"):  # the tests use the default configuration
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", self.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def close(self) -> None:
        """End the process without waiting for its current case."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Run:
    """A run of the remaining cases, spread over processes until the time is over."""

    def __init__(self, cases: dict[str, Case], device: str, state: Path, minutes: float) -> None:
        self.cases = cases
        self.device = device
        self.state = state
        self.until = time.monotonic() + 60 * minutes
        self.found = {each["name"]: each for each in _read(state)}
        self.lock = threading.Lock()

    def __call__(self, jobs: int) -> None:
        """Run cases until none is left, or the time is over."""
        todo: queue.Queue[str] = queue.Queue()
        for name in self.cases:
            if name not in self.found:
                todo.put(name)
        with _cache(self.state) as cache:
            workers = [Worker(self.device, cache) for _ in range(min(jobs, todo.qsize()))]
            threads = [threading.Thread(target=self._work, args=(each, todo)) for each in workers]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

    def _work(self, worker: Worker, todo: "queue.Queue[str]") -> None:
        try:
            while (rest := self.until - time.monotonic()) > 0:
                try:
                    name = todo.get_nowait()
                except queue.Empty:
                    return
                limit, started = self.cases[name].seconds, time.monotonic()
                said = worker.run(name, min(limit, rest))
                if said["status"] == "hangs" and rest < limit:  # it did not have its time
                    return
                self._note({"name": name, **said, "seconds": round(time.monotonic() - started, 1)})
        finally:
            worker.close()

    def _note(self, result: dict) -> None:
        with self.lock:
            self.found[result["name"]] = result
            with self.state.open("a") as file:
                print(json.dumps(result), file=file)
            if result["status"] in FAILED:
                print(f"{result['name']} {result['status']}: {result['why']}", flush=True)


@contextlib.contextmanager
def _cache(state: Path) -> Iterator[Path]:
    """Yield the folder of compiled programs: beside the default state file, so that the next call finds them, otherwise
    a temporary one."""
    if state == STATE:
        yield state.parent / "cache"
        return
    with tempfile.TemporaryDirectory(prefix="forge-gpu-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _read(state: Path) -> list[dict]:
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--only", nargs="*", help="cases by the start of their names")
    parser.add_argument("--every", type=int, default=1, help="every Nth of them")
    parser.add_argument("--again", action="store_true", help="run those that failed once more")
    parser.add_argument("--write", type=Path, help="the document whose section is written, of all cases in the state")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("tests.gpu: skipped: torch finds no GPU here (--device cpu tests the machinery)")
        return 0
    options.state.parent.mkdir(parents=True, exist_ok=True)
    if options.again and options.state.exists():
        kept = [each for each in _read(options.state) if each["status"] not in FAILED]
        options.state.write_text("".join(json.dumps(each) + "\n" for each in kept))
    cases = all_cases()
    names = [name for name in cases if not options.only or name.startswith(tuple(options.only))]
    chosen = {name: cases[name] for name in names[:: options.every]}
    run = Run(chosen, options.device, options.state, options.minutes)
    run(options.jobs)
    found = [run.found[name] for name in chosen if name in run.found]
    print(described(found, len(chosen), options.device))
    if options.write:  # all results in the state, whichever cases were requested
        whole = [run.found[name] for name in cases if name in run.found]
        text = described(whole, len(cases), options.device)
        options.write.write_text(written(options.write.read_text() if options.write.exists() else "", text))
    if any(each["status"] in FAILED for each in found):
        return 1
    return 0 if len(found) == len(chosen) else LEFT


if __name__ == "__main__":
    sys.exit(main())
