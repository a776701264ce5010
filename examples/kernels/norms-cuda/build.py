"""Compiles csrc/ with nvcc into build/<variant>/, in the layout of the Kernel Hub. Does nothing when nothing changed.

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
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "torch-ext" / "norms_cuda"
MANIFEST = ROOT / "forge_kernels.yaml"
FLAGS = ["-std=c++17", "-O3", "--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DUSE_CUDA"]
ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x03090000"]
# Machine code for 8.x and 9.0, and code that the driver compiles for later devices.
ARCHITECTURES = ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]
METADATA = {
    "name": "norms-cuda",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cuda", "archs": ["8.0", "9.0", "9.0+PTX"]},
}


def sources() -> list[Path]:
    """Every file that decides what is built."""
    return sorted([Path(__file__).resolve(), MANIFEST, *ROOT.glob("csrc/*"), *PACKAGE.glob("*.py")])


def version_of(compiler: str) -> str:
    """Return the compiler's version text."""
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout


def build_key(told: str) -> str:
    """A short hash of the sources, the compiler, torch's headers and Python's."""
    digest = hashlib.sha256(f"{told}{version('torch')}{platform.python_version()}".encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def variant_name(told: str) -> str:
    """The Hub's name for this build."""
    major, minor = re.search(r"release (\d+)\.(\d+)", told).groups()
    return f"torch-stable-abi211-cu{major}{minor}-{platform.machine()}-linux"


def torch_flags() -> list[str]:
    """Where the headers and libraries of torch and Python are; torch is not imported, which takes seconds.

    libtorch.so needs libtorch_cuda.so where torch has CUDA, so a module built beside a torch without CUDA finds it too.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    libraries = ["torch", "torch_cpu", *(["torch_cuda"] if (torch / "lib" / "libtorch_cuda.so").exists() else [])]
    return [
        f"-I{torch / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        f"-L{torch / 'lib'}",
        "-Xlinker=--no-as-needed",
        *(f"-l{library}" for library in libraries),
    ]


def compile_module(compiler: str, namespace: str, work: Path) -> Path:
    """The extension module, compiled in `work`."""
    module = work / f"{namespace}.abi3.so"
    architectures = [f"-gencode={each}" for each in ARCHITECTURES]
    command = [compiler, *FLAGS, *ABI_FLAGS, *architectures, f"-DOP_NAMESPACE={namespace}", *torch_flags()]
    subprocess.run([*command, "-shared", ROOT / "csrc/ops.cu", "-o", module], check=True)
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
    told = version_of(compiler)
    namespace = f"_norms_cuda_{build_key(told)}"
    variant = ROOT / "build" / variant_name(told)
    variant.parent.mkdir(exist_ok=True)
    # The lock of a builder that was killed is free at once.
    with open(variant.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (variant / f"{namespace}.abi3.so").exists():
            return variant
        with tempfile.TemporaryDirectory(dir=variant.parent) as work:
            module = compile_module(compiler, namespace, Path(work))
            fresh = Path(work) / variant.name
            fresh.mkdir()
            assemble(fresh, module, namespace)
            shutil.rmtree(variant, ignore_errors=True)
            fresh.rename(variant)
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("NVCC", "nvcc"), help="default: $NVCC, nvcc")
    compiler = parser.parse_args().compiler
    if shutil.which(compiler) is None:
        parser.error(f"there is no {compiler}: install the CUDA toolkit, or name nvcc with --compiler")
    try:
        print(build(compiler))
    except subprocess.CalledProcessError as error:  # the compiler has printed why
        sys.exit(error.returncode)
