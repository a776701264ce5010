"""Small kernels as files, which tests publish or write to a folder."""

import base64
import hashlib
import json
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge import hub
from forge.executors.hubex import hubex
from forge.hub import loader

LOCAL = hub.Policy(local=True)
INIT = "from .ops import double\n"
OPS = "def double(x):\n    return x * 2\n"


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore the kernels of the process at the exit of the context."""
    before = list(hubex.kernels)
    try:
        yield
    finally:
        hubex._kernels = before
        hubex.add([])


def metadata(name: str = "rms", kernel_id: str = "_rms_ab12", **values: Any) -> str:
    """Return metadata.json in its current form."""
    known = {
        "name": name,
        "id": kernel_id,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu", "archs": []},
    }
    return json.dumps(known | {key.replace("_", "-"): value for key, value in values.items()})


def digest(files: Mapping[str, str]) -> dict[str, Any]:
    hashes = {path: base64.b64encode(hashlib.sha256(data.encode()).digest()).decode() for path, data in files.items()}
    return {"algorithm": "sha256", "files": hashes}


def kernel(files: Mapping[str, str | bytes | None] | None = None, variant: str = "torch-universal") -> dict[str, Any]:
    """Return the files of a kernel with a function `double`, below build/; `files` are added, and None removes one."""
    held = {"__init__.py": INIT, "ops.py": OPS, "metadata.json": metadata(), **(files or {})}
    return {f"{variant}/{path}": data for path, data in held.items() if data is not None}


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below the folder's build/."""
    for path, data in files.items():
        target = folder / "build" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return hub.load(hub.resolve(folder, policy=LOCAL, **options))


def forget() -> None:
    """Reset this process to one that has loaded no kernel."""
    for name in list(loader._packages):
        loader._forget(name)
    loader._loaded.clear()


def native_module(folder: Path, name: str, returns: int) -> bytes:
    """Return a module of the limited API with a function `value` that returns a number."""
    source = folder / "native.c"
    source.write_text(
        "#define Py_LIMITED_API 0x03090000\n#include <Python.h>\n"
        f"static PyObject *value(PyObject *s, PyObject *a) {{ return PyLong_FromLong({returns}); }}\n"
        'static PyMethodDef methods[] = {{"value", value, METH_NOARGS, 0}, {0}};\n'
        f'static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", 0, -1, methods}};\n'
        f"PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}\n"
    )
    output = folder / f"{name}{returns}.so"
    include = sysconfig.get_paths()["include"]
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(output)], check=True)
    return output.read_bytes()
