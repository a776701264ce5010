"""Packages run by torch alone: from C++, and from Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim
from torch.utils import cpp_extension

import forge
from tests.export.support import Mlp


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    model = Mlp()
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    forge.export(model, (torch.randn(4, 8),), dynamic_shapes={"x": {0: Dim("batch", max=64)}}).save(path)
    return model, path


@pytest.mark.slow
def test_package_runs_in_python_without_forge(package, tmp_path):
    model, path = package
    x = torch.randn(5, 8)
    torch.save(x, tmp_path / "x")
    script = """
import sys
sys.modules["forge"] = None
import torch
loaded = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(loaded.loader.run([torch.load(sys.argv[2])]), sys.argv[3])
"""
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "x"), str(tmp_path / "results")]
    subprocess.run(command, check=True, cwd=tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "results")[0], model(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.slow
def test_package_runs_in_cpp_without_forge(package, tmp_path):
    model, path = package
    program = tmp_path / "runner"
    libraries = cpp_extension.library_paths()
    command = [
        *("g++", "-O0", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *[f"-I{folder}" for folder in cpp_extension.include_paths()],
        *(str(Path(__file__).with_name("runner.cpp")), "-o", str(program)),
        *[f"-L{folder}" for folder in libraries],
        *[f"-Wl,-rpath,{folder}" for folder in libraries],
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    inputs = [torch.randn(batch, 8) for batch in (1, 3)]
    files = [tmp_path / f"input{number}" for number in range(2)]
    for file, x in zip(files, inputs, strict=True):
        file.write_bytes(x.numpy().tobytes())
    done = subprocess.run([program, path, *files], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    expected = torch.cat([model(x).flatten() for x in inputs])
    torch.testing.assert_close(
        torch.tensor([float(line) for line in done.stdout.split()]), expected, rtol=1e-4, atol=1e-5
    )
