"""The benchmark of resolving and loading a local kernel: synthetic ones by size, and a real one."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.timing import show_table
from forge import hub
from forge.testing.hub_server import Hub

WANTED = 0.020
REPEAT = 5
FUNCTION = '''\
def scaled_{n}(x, scale=2.0):
    """x times scale, computed in float32."""
    if x.ndim == 0:
        raise ValueError(f"scaled_{n}: x must have a dim, but its shape is {{tuple(x.shape)}}")
    wide = x.float() * scale
    return wide.to(x.dtype) if x.is_floating_point() else wide


'''
SIZES = {  # Python files, functions in each, bytes of a native module
    "small: 3 files, 1 KB": (1, 3, 0),
    "Python: 12 files, 40 KB": (10, 14, 0),
    "native: 20 MB": (1, 3, 20 << 20),
}
FIRST_USE = """
import json, sys, time
import torch
import forge
from forge.hub import compat

def milliseconds(call):
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)

from forge.executors.hubex import gather
sources = [sys.argv[1]]
print(json.dumps({
    "importing the libraries `kernels` and huggingface_hub": milliseconds(compat.require),
    "gather, the first: resolve, verify files, import, read the manifest": milliseconds(lambda: gather(sources)),
    "gather, again": milliseconds(lambda: gather(sources)),
    "forge.use_kernels": milliseconds(lambda: forge.use_kernels(sources)),
}))
"""


def write_kernel(folder: Path, files: int, functions: int, native_bytes: int) -> None:
    """Write a kernel with unique content, so that it is new to the process."""
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    source = f"# {folder.name}\nimport torch\n\n\n" + "".join(FUNCTION.format(n=n) for n in range(functions))
    for number in range(files):
        (variant / f"ops{number}.py").write_text(source)
    (variant / "__init__.py").write_text("".join(f"from . import ops{number}\n" for number in range(files)))
    (variant / "_native.data").write_bytes(folder.name.encode() + bytes(native_bytes))


def seconds(source: str, lock: Path) -> tuple[float, float]:
    """Return the seconds to resolve and to load."""
    start = time.perf_counter()
    resolved = hub.resolve(source, lock=lock, policy=hub.Policy(trust="locked"))
    middle = time.perf_counter()
    hub.load(resolved)
    return middle - start, time.perf_counter() - middle


def row(name: str, sources: list[str], lock: Path) -> tuple[str, ...]:
    """Return the best of the first loads of each source, and the best of their second loads."""
    first = min((seconds(source, lock) for source in sources), key=sum)
    again = min(sum(seconds(source, lock)) for source in sources)
    verdict = "yes" if sum(first) < WANTED else "no"
    return name, *(f"{1e3 * each:.2f}" for each in (*first, sum(first), again)), verdict


def lock_from_hub(kernels: dict[str, Path], folder: Path) -> Path:
    """Publish kernels on a loopback Hub, and make another process fetch and lock them; the Hub is stopped
    afterwards."""
    lock = folder / "hub.lock"
    with Hub(trusted={"acme"}) as served:
        for name, path in kernels.items():
            served.publish_folder(name, path)
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNELS_"))}
        ours = {"HF_ENDPOINT": served.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-m", "forge", "kernels", "lock", "--force", *(f"{name}@v1" for name in kernels)]
        environment = {**theirs, **ours, "KERNELS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home")}
        subprocess.run([*command, "--output", str(lock)], env=environment, stdout=subprocess.PIPE, check=True)
    return lock


def bench_made_up() -> None:
    """Benchmark kernels of three sizes, each new to this process, from folders and from the Hub's cache."""
    rows = [("milliseconds, best", "resolve", "load", "both", "the next", f"< {1e3 * WANTED:.0f}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["KERNELS_CACHE"] = str(folder / "cache")
        for number, (size, content) in enumerate(SIZES.items()):
            local = [folder / f"local{number}_{each}" for each in range(REPEAT)]
            remote = {f"acme/hub{number}-{each}": folder / f"hub{number}_{each}" for each in range(REPEAT)}
            for path in (*local, *remote.values()):
                write_kernel(path, *content)
            lock = folder / f"{number}.lock"
            hub.lock_kernels(local, lock, policy=hub.Policy(local=True))
            rows.append(row(f"{size}, a locked folder", [str(path) for path in local], lock))
            from_hub = lock_from_hub(remote, folder)
            rows.append(row(f"{size}, the Hub's cache by commit", [f"{name}@v1" for name in remote], from_hub))
        del os.environ["KERNELS_CACHE"]
    show_table(rows)


def bench_first_use(source: Path) -> None:
    """Measure the cost of a repository's first use in a new process; the best of several processes."""
    times: dict[str, list[float]] = {}
    for _ in range(REPEAT):
        process = subprocess.run([sys.executable, "-c", FIRST_USE, source], stdout=subprocess.PIPE, check=True)
        for name, value in json.loads(process.stdout).items():
            times.setdefault(name, []).append(value)
    show_table([(f"{source.name} in a new process, ms", "best"), *((n, f"{min(v):.1f}") for n, v in times.items())])


def bench_loading(source: Path) -> None:
    bench_made_up()
    print()
    bench_first_use(source)
