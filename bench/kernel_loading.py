"""What it costs to resolve and load a kernel that is on this machine: python -m bench.hub_load [source@revision]

Without an argument it writes kernels of three sizes to folders, each of other content so that each is new to the
process, locks them and loads them. With one it loads that kernel of the cache, which is new once.
"""

import argparse
import tempfile
import time
from pathlib import Path

from forge import hub

FUNCTION = "def double{n}(x):\n    return x * 2\n\n"
SIZES = {
    "small (3 files, 1 KB)": (1, 10, 0),
    "Python (12 files, 40 KB)": (10, 120, 0),
    "native (20 MB)": (1, 10, 20 << 20),
}


def write_kernel(folder: Path, files: int, functions: int, native_bytes: int) -> None:
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    source = f"# {folder}\n" + "".join(FUNCTION.format(n=n) for n in range(functions))
    for number in range(files):
        (variant / f"ops{number}.py").write_text(source)
    (variant / "__init__.py").write_text("".join(f"from . import ops{number}\n" for number in range(files)))
    (variant / "_native.data").write_bytes(bytes(native_bytes))


def measure(source: str, lock: Path | None) -> tuple[float, float]:
    """Milliseconds to resolve and to load."""
    policy = hub.Policy(local=True, trust="publisher" if lock is None else "locked")
    started = time.perf_counter()
    resolved = hub.resolve(source, lock=lock, policy=policy)
    middle = time.perf_counter()
    hub.load(resolved)
    return 1e3 * (middle - started), 1e3 * (time.perf_counter() - middle)


def report(name: str, sources: list[str], lock: Path | None) -> None:
    """Prints the best of the first loads of each source, and the best of their second loads."""
    first = min((measure(source, lock) for source in sources), key=sum)
    again = min(sum(measure(source, lock)) for source in sources)
    print(f"{name:28}{first[0]:9.2f}{first[1]:9.2f}{sum(first):9.2f}{again:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", help="a kernel of the cache instead of the made ones")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{'milliseconds, best':28}{'resolve':>9}{'load':>9}{'both':>9}{'the next':>12}")
    if arguments.source is not None:
        return report(arguments.source, [arguments.source], None)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, size) in enumerate(SIZES.items()):
            sources = [Path(folder) / f"kernel{number}_{each}" for each in range(arguments.repeat)]
            for source in sources:
                write_kernel(source, *size)
            lock = Path(folder) / f"{number}.lock"
            hub.lock_kernels(sources, lock, policy=hub.Policy(local=True))
            report(name, [str(source) for source in sources], lock)
    return None


if __name__ == "__main__":
    main()
