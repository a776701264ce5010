"""What it costs to resolve and load a kernel that is in the cache: python -m bench.hub_load [source@revision]

Without an argument it writes kernels of three sizes to a folder, locks them, and
loads each in a process of its own, so that nothing but the libraries' own imports is warm.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

from forge import hub
from forge.hub import compat

FUNCTION = "def double{n}(x):\n    return x * 2\n\n"
SIZES = {
    "small (3 files, 1 KB)": (1, 10, 0),
    "Python (10 files, 40 KB)": (10, 120, 0),
    "native (20 MB)": (1, 10, 20 << 20),
}


def write_kernel(folder: Path, files: int, functions: int, native_bytes: int) -> None:
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    source = "".join(FUNCTION.format(n=n) for n in range(functions))
    for number in range(files):
        (variant / f"ops{number}.py").write_text(source)
    (variant / "__init__.py").write_text("".join(f"from . import ops{number}\n" for number in range(files)))
    (variant / "_native.so.data").write_bytes(bytes(native_bytes))


def measure(source: str, lock: Path | None, times: multiprocessing.Queue) -> None:
    """Milliseconds of a first and of a second resolve and load."""
    policy = hub.Policy(local=True, trust="publisher" if lock is None else "locked")
    compat.require()
    for _ in range(2):
        started = time.perf_counter()
        resolved = hub.resolve(source, lock=lock, policy=policy)
        middle = time.perf_counter()
        hub.load(resolved)
        times.put((1e3 * (middle - started), 1e3 * (time.perf_counter() - middle)))


def report(name: str, source: str, lock: Path | None, repeat: int) -> None:
    context, rows = multiprocessing.get_context("fork"), []
    for _ in range(repeat):
        times = context.Queue()
        process = context.Process(target=measure, args=(source, lock, times))
        process.start()
        rows.append([*times.get(), *times.get()])
        process.join()
    resolve, load, resolve_again, load_again = (min(column) for column in zip(*rows, strict=True))
    print(f"{name:28}{resolve:9.2f}{load:9.2f}{resolve + load:9.2f}{resolve_again + load_again:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", help="a kernel of the cache instead of the made ones")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{'milliseconds, best':28}{'resolve':>9}{'load':>9}{'both':>9}{'the next':>12}")
    if arguments.source is not None:
        return report(arguments.source, arguments.source, None, arguments.repeat)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, size) in enumerate(SIZES.items()):
            source = Path(folder) / f"kernel{number}"
            write_kernel(source, *size)
            lock = Path(folder) / f"{number}.lock"
            hub.lock_kernels([source], lock, policy=hub.Policy(local=True))
            report(name, str(source), lock, arguments.repeat)
    return None


if __name__ == "__main__":
    main()
