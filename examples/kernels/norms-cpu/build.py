"""Compiles csrc/ with g++ into build/<variant>/, in the layout of the Kernel Hub. Does nothing when nothing changed.

python build.py
"""

import argparse
import base64
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "torch-ext" / "norms_cpu"
MANIFEST = ROOT / "forge_kernels.yaml"
VARIANT = f"torch-stable-abi211-cpu-{platform.machine()}-linux"
# The file rows.cpp is compiled for each of these, and the best is chosen when the kernel runs.
INSTRUCTION_SETS = (
    {"baseline": "x86-64", "v3": "x86-64-v3", "v4": "x86-64-v4"} if platform.machine() == "x86_64" else {"baseline": ""}
)
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x03090000"]
METADATA = {
    "name": "norms-cpu",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}


def sources() -> list[Path]:
    """Every file that decides what is built."""
    return sorted([Path(__file__).resolve(), MANIFEST, *ROOT.glob("csrc/*"), *PACKAGE.glob("*.py")])


def build_key(compiler: str) -> str:
    """A short hash of the sources, the compiler, torch's headers and Python's."""
    told = subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout
    digest = hashlib.sha256(f"{told}{version('torch')}{platform.python_version()}".encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def include_flags() -> list[str]:
    """Where the headers of torch and Python are; torch itself is not imported, which would take longer than g++."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    return [f"-I{torch / 'include'}", f"-I{sysconfig.get_paths()['include']}", f"-L{torch / 'lib'}"]


def compile_all(compiler: str, namespace: str, work: Path) -> Path:
    """The extension module, compiled in `work`."""
    common, include = [compiler, *FLAGS], include_flags()
    ops = [*common, *ABI_FLAGS, *include, f"-DOP_NAMESPACE={namespace}", "-c", ROOT / "csrc/ops.cpp"]
    commands = [[*ops, "-o", work / "ops.o"]]
    for name, march in INSTRUCTION_SETS.items():
        target = [f"-march={march}"] if march else []
        rows = [*common, *target, f"-DROWS=rows_{name}", "-c", ROOT / "csrc/rows.cpp"]
        commands.append([*rows, "-o", work / f"rows_{name}.o"])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    module = work / f"{namespace}.abi3.so"
    objects = [command[-1] for command in commands]
    subprocess.run([compiler, "-shared", *objects, *include, "-ltorch", "-ltorch_cpu", "-o", module], check=True)
    return module


def assemble(target: Path, module: Path, namespace: str) -> None:
    """Fills the variant's folder: the Python side, the module, the manifest, and metadata with every file's digest."""
    for path in (*PACKAGE.glob("*.py"), MANIFEST):
        shutil.copy(path, target)
    shutil.copy(module, target)
    (target / "_ops.py").write_text(
        "import torch\n\n"
        f"from . import {namespace}\n\n"
        f"ops = torch.ops.{namespace}\n\n\n"
        "def add_op_namespace_prefix(op_name: str) -> str:\n"
        f'    return f"{namespace}::{{op_name}}"\n'
    )
    files = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(target.iterdir())
    }
    metadata = {**METADATA, "id": namespace, "digest": {"algorithm": "sha256", "files": files}}
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def build(compiler: str) -> Path:
    """The variant's folder, up to date."""
    namespace = f"_norms_cpu_{build_key(compiler)}"
    variant = ROOT / "build" / VARIANT
    variant.parent.mkdir(exist_ok=True)
    # The lock of a builder that was killed is free at once.
    with open(variant.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (variant / f"{namespace}.abi3.so").exists():
            return variant
        with tempfile.TemporaryDirectory(dir=variant.parent) as work:
            module = compile_all(compiler, namespace, Path(work))
            fresh = Path(work) / VARIANT
            fresh.mkdir()
            assemble(fresh, module, namespace)
            shutil.rmtree(variant, ignore_errors=True)
            fresh.rename(variant)
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"), help="default: $CXX, g++")
    compiler = parser.parse_args().compiler
    if shutil.which(compiler) is None:
        parser.error(f"there is no {compiler}: install a C++ compiler, or name one with --compiler")
    try:
        print(build(compiler))
    except subprocess.CalledProcessError as error:  # the compiler has printed why
        sys.exit(error.returncode)
