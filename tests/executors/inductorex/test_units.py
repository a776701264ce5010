"""Kernels of several regions form one translation unit; those that cannot are built separately."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from forge.executors.inductorex import compile_wait, units
from forge.torch_internals.versions import TORCH

ADD = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* x, float* out, const int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = x[i] + %d;
}
"""
TYPES = ["const float*", "float*", "const int64_t"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Yield the sources passed to g++, with two cores and an empty cache, in a process that has seen no kernel."""
    sources: list[str] = []
    load_async = CppPythonBindingsCodeCache.load_async

    def noted(source: str, *args: object, **kwargs: object) -> Callable:
        sources.append(source)
        return load_async(source, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", noted)
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    CppPythonBindingsCodeCache.cache_clear()  # of modules, which may be those of another test's folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    units.forget()
    with inductor_config.patch(compile_threads=2):
        yield sources
    wait(unit._future for unit in units._process._units.values())  # their links belong in this test's folder
    units.forget()


def asked(*sources: str) -> list[Callable[[], Callable]]:
    """Return a waiting function for each kernel, which returns it built, while another one is being built."""
    with compile_wait.defer_waits():
        return [AsyncCompile().cpp_pybinding(TYPES, source).result for source in (ADD % 0, *sources)][1:]


def added(kernel: Callable) -> float:
    out = torch.empty(3)
    kernel(torch.zeros(3), out, 3)
    (value,) = set(out.tolist())
    return value


def test_what_is_asked_for_meanwhile_is_one_unit(built: list[str]) -> None:
    one, two = asked(ADD % 1, ADD % 2)
    assert [added(kernel()) for kernel in (two, one)] == [2.0, 1.0]
    assert [source.count('extern "C" void kernel') for source in built] == [1, 2]


def test_the_rest_is_shared_among_the_cores(built: list[str]) -> None:
    with inductor_config.patch(compile_threads=3):
        kernels = asked(*[ADD % n for n in range(1, 6)])
        units.start_rest()
    assert [added(kernel()) for kernel in kernels] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(source.count('extern "C" void kernel') for source in built) == [1, 1, 4]


def test_the_same_kernel_is_built_once(built: list[str]) -> None:
    one, again = asked(ADD % 1, ADD % 1)
    (later,) = asked(ADD % 1)
    assert one() == again() == later()
    assert sum(source.count("+ 1;") for source in built) == 1


@pytest.mark.slow
def test_a_kernel_that_cannot_be_built_takes_no_other_along(built: list[str]) -> None:
    wrong, right = asked(ADD.replace("x[i]", "y[i]") % 1, ADD % 2)
    assert added(right()) == 2.0
    with pytest.raises(Exception, match=r"y.* was not declared"):
        wrong()


def test_a_kernel_with_a_macro_of_its_own_is_built_by_itself(built: list[str]) -> None:
    (kernel,) = asked(f"#define N 7\n{ADD.replace('%d', 'N')}")
    assert added(kernel()) == 7.0
    assert not any("#define N 7" in source and "namespace" in source for source in built)


@pytest.mark.slow
def test_other_flags_make_another_kernel(built: list[str]) -> None:
    (one,) = asked(ADD % 1)
    one()
    with inductor_config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        (other,) = asked(ADD % 1)
        assert other() != one()


def test_another_thread_has_inductor_build_its_kernels(built: list[str]) -> None:
    with compile_wait.defer_waits():
        thread = Thread(target=lambda: AsyncCompile().cpp_pybinding(TYPES, ADD % 1).result())
        thread.start()
        thread.join()
    assert built and "namespace" not in built[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(3), torch.zeros(3)), "expected 3 arguments"),
        ((torch.zeros(3), torch.zeros(3), 3.5), "expected an int"),
        ((torch.zeros(3), 3, 3), None),
    ],
)
@pytest.mark.one_in(3)
def test_a_call_that_does_not_fit_is_an_error(built: list[str], given: tuple, message: str | None) -> None:
    (kernel,) = asked(ADD % 1)
    with pytest.raises(RuntimeError, match=message):
        kernel()(*given)


@pytest.mark.slow
def test_another_process_finds_the_units(built: list[str], tmp_path: Path) -> None:
    """This holds for another program with the same region, too."""
    program = """
import torch, forge
from torch._inductor.codecache import CppPythonBindingsCodeCache
load_async, sources = CppPythonBindingsCodeCache.load_async, []
def noted(source, *args, **options):
    sources.append(source)
    return load_async(source, *args, **options)
CppPythonBindingsCodeCache.load_async = noted
forge.jit(lambda x: (x.exp() + 1).sin()%s, cache=False, executors=["inductor", "torch"])(torch.ones(8))
print(len(sources))
"""
    counts = [
        subprocess.run([sys.executable, "-c", program % more], stdout=subprocess.PIPE, text=True, check=True).stdout
        for more in ("", "", ".nonzero()")
    ]
    assert [int(count) for count in counts] == [1, 0, 0]


@pytest.mark.slow
def test_a_unit_that_was_deleted_is_built_again(built: list[str], tmp_path: Path) -> None:
    (kernel,) = asked(ADD % 1)
    kernel()
    for library in tmp_path.rglob("*.so"):
        library.unlink()
    units.forget()
    CppPythonBindingsCodeCache.cache_clear()
    (kernel,) = asked(ADD % 1)
    assert added(kernel()) == 1.0


@pytest.mark.skipif(TORCH < (2, 13), reason="before torch 2.13, a process takes a library that it has loaded as loaded")
@pytest.mark.slow
def test_a_unit_that_was_damaged_is_built_again(built: list[str], tmp_path: Path) -> None:
    (kernel,) = asked(ADD % 1)
    kernel()
    for library in tmp_path.rglob("*.so"):
        library.unlink()  # it is loaded, and must stay as it is for this process
        library.write_bytes(b"no shared object")
    units.forget()
    CppPythonBindingsCodeCache.cache_clear()
    (kernel,) = asked(ADD % 1)
    assert added(kernel()) == 1.0
    assert [source.count("namespace") for source in built if "+ 1;" in source] == [1, 1]


def test_a_unit_for_which_no_thread_can_be_started_takes_nobody_along(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(task: Callable) -> None:
        raise RuntimeError("can't start new thread")

    one, two = asked(ADD % 1, ADD % 2)
    with monkeypatch.context() as patched:
        patched.setattr(AsyncCompile, "submit", refuse)
        units.start_rest()
    assert [added(kernel()) for kernel in (one, two)] == [1.0, 2.0]


def test_kernels_that_were_asked_for_are_built_though_no_threads_may_be_used_meanwhile(built: list[str]) -> None:
    one, two = asked(ADD % 1, ADD % 2)
    with inductor_config.patch(compile_threads=1):
        units.start_rest()
        units.start_rest()
    assert [added(kernel()) for kernel in (one, two)] == [1.0, 2.0]
