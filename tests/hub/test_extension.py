"""Kernels by class: forge.KernelExtension, registered as a class or as an instance."""

import importlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import hubex
from forge.hub import BuildError, HubNotice, KernelImportError
from forge.hub.manifest import ManifestError

SILU = "torch.nn.functional.silu"


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a separate cache, and restore the process's kernels afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = list(hubex.kernels)
    yield
    hubex._kernels = before
    hubex.add([])


def silu(input: torch.Tensor) -> torch.Tensor:
    return input / (1 + torch.exp(-input))


class Silu(forge.KernelExtension):
    op = SILU
    options = {"dtypes": [torch.float32], "grad": "composite"}  # noqa: RUF012

    def load(self) -> Callable:
        return silu


class Unavailable(Silu):
    name, priority = "unavailable", 3

    def is_available(self) -> str:
        return "there is no such chip here"

    def load(self) -> Callable:
        raise AssertionError("it must not be loaded")


class Incompatible(Silu):
    name, priority = "incompatible", 2

    def assert_compatible(self) -> None:
        raise RuntimeError("the chip has version 7, and needs 9")


class Broken(Silu):
    name, priority = "broken", 1

    def load(self) -> Callable:
        raise ImportError("undefined symbol: _ZN2at4silu")


def taken(kernels: list[Any], x: torch.Tensor) -> tuple[list[str], dict[str, str]]:
    """Return the executors that run a silu, and the reasons of those that do not."""
    jitted = forge.jit(lambda x: F.silu(x), kernels=kernels)
    torch.testing.assert_close(jitted(x), F.silu(x))
    rows = forge.explain(jitted).rows
    return [row.executor for row in rows], dict(reason for row in rows for reason in row.declined)


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
def test_what_is_unavailable_incompatible_or_broken_gives_way_to_the_next_with_its_reason() -> None:
    who, reasons = taken([Silu, Broken, Incompatible, Unavailable], torch.randn(3, 4))
    assert who == ["Silu"]
    assert reasons["unavailable"] == "not available: there is no such chip here"
    assert (
        reasons["incompatible"]
        == "not compatible: assert_compatible() raised RuntimeError: the chip has version 7, and needs 9"
    )
    assert reasons["broken"] == "load() raised ImportError: undefined symbol: _ZN2at4silu"


def test_a_load_that_raises_is_told_once_and_not_tried_again() -> None:
    calls = []

    class Counted(Broken):
        name = "counted"

        def load(self) -> Callable:
            calls.append(1)
            raise SystemExit(1)  # as setuptools ends

    with pytest.warns(HubNotice, match="kernel counted is not used: load\\(\\) raised SystemExit: 1"):
        forge.register_kernel(Counted)
        jitted = forge.jit(lambda x: F.silu(x))
        jitted(torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forge.jit(lambda x: F.silu(x) * 2)(torch.randn(3))
    assert calls == [1]


@pytest.mark.parametrize("answer", [None, 1, "raise"])
def test_an_answer_that_is_none_is_a_reason(answer: Any) -> None:
    class Odd(Silu):
        def is_available(self) -> Any:
            if answer == "raise":
                raise OSError("no driver")
            return answer

    wanted = {
        "raise": "not available: is_available() raised OSError: no driver",
    }.get(answer, f"is_available() gave {answer!r}, but must give True, False or the reason why not")
    who, reasons = taken([Odd], torch.randn(3))
    assert "Odd" not in who and reasons["Odd"] == wanted


def test_nothing_is_asked_or_loaded_before_a_call_comes_that_it_could_take() -> None:
    calls = []

    class Slow(Silu):
        def is_available(self) -> bool:
            calls.append("asked")
            return True

        def load(self) -> Callable:
            calls.append("loaded")
            return silu

    forge.register_kernel(Slow)
    assert calls == []
    assert taken([], torch.randn(3, dtype=torch.float64))[1]["Slow"] == "dtype float64 not in T (float32)"
    assert calls == ["asked"]
    (row,) = forge.kernels(op=F.silu)
    assert (row.kernel, row.status) == ("Slow", "not loaded yet")
    assert row.place.startswith(str(Path("tests/hub/test_extension.py"))) and not row.place.endswith(":1")
    for _ in range(2):
        assert taken([], torch.randn(3))[0] == ["Slow"]
    assert calls == ["asked", "loaded"]
    (row,) = forge.kernels(op=F.silu)
    assert row.status == "verified"


def test_it_is_verified_as_any_kernel() -> None:
    class Wrong(Silu):
        def load(self) -> Callable:
            return lambda input: silu(input) + 1

    with pytest.warns(HubNotice, match="failed verification"):
        who, reasons = taken([Wrong], torch.randn(3))
    assert "Wrong" not in who and reasons["Wrong"].startswith("failed verification on input: ")


def test_an_instance_registers_with_its_own_values() -> None:
    class Named(Silu):
        def __init__(self, name: str, where: str) -> None:
            self.name = name
            self.options = {**Silu.options, "where": where}

    assert forge.register_kernel(vectors := Named("vectors", "input.ndim == 1")) is vectors
    forge.register_kernel(Named("matrices", "input.ndim == 2"))
    assert taken([], torch.randn(3))[0] == ["vectors"]
    assert taken([], torch.randn(3, 4))[0] == ["matrices"]


def test_a_class_registers_itself_alone() -> None:
    before = len(hubex.kernels)

    @forge.register_kernel
    class First(Silu): ...

    class Second(First): ...

    class Third(First): ...

    assert [kernel.name for kernel in hubex.kernels[before:]] == ["First"]
    forge.register_kernel(Third)
    assert [kernel.name for kernel in hubex.kernels[before:]] == ["First", "Third"]


def test_a_name_that_is_taken_is_refused_and_what_was_there_stays() -> None:
    forge.register_kernel(Silu)
    before = list(hubex.kernels)
    with pytest.raises(ValueError, match=r"kernel Silu of torch\.nn\.functional\.silu is there already"):
        forge.register_kernel(Silu())
    assert hubex.kernels == before


def test_priority_orders_classes_and_declared_kernels_alike() -> None:
    class High(Silu):
        priority = 5

    declared = forge.kernel(SILU, silu, name="declared", priority=3, **Silu.options)
    assert forge.load_kernel(SILU, kernels=[Silu, declared, High]).kernels == ["High", "declared", "Silu"]


# by name


def test_load_by_name_is_checked_unless_it_is_forced() -> None:
    loaded = forge.load_kernel(SILU, "incompatible", kernels=[Silu, Incompatible])
    with pytest.raises(NotImplementedError, match=r"incompatible: not compatible: .* version 7, and needs 9"):
        loaded(torch.randn(3))
    forced = forge.load_kernel(SILU, "incompatible", kernels=[Silu, Incompatible], force=True)
    x = torch.randn(3)
    torch.testing.assert_close(forced(x), F.silu(x))


def test_a_misspelt_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="did you mean 'incompatible'"):
        forge.load_kernel(SILU, "incompatable", kernels=[Silu, Incompatible])


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
def test_what_cannot_be_loaded_is_not_forced_either() -> None:
    with pytest.raises(KernelImportError, match=re.escape("broken: load() raised ImportError: undefined symbol")):
        forge.load_kernel(SILU, "broken", kernels=[Broken], force=True)


# modules and libraries that it loads


def module(name: str, **functions: Callable) -> types.ModuleType:
    found = types.ModuleType(name)
    vars(found).update(functions)
    return found


class Prebuilt(forge.KernelExtension):
    op, module, kernel_name = SILU, "forge_prebuilt_silu", "silu_forward"
    options = Silu.options


class Rebuilt(Prebuilt):
    def build_jit(self) -> types.ModuleType:
        return module("built", silu_forward=silu)


def test_what_was_compiled_ahead_of_time_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def silu_forward(input):\n    return input / (1 + (-input).exp())\n"
    (tmp_path / "forge_prebuilt_silu.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert taken([Prebuilt], torch.randn(3))[0] == ["Prebuilt"]
    finally:
        sys.modules.pop("forge_prebuilt_silu", None)


def test_what_is_not_installed_is_built_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken([Rebuilt], torch.randn(3))[0] == ["Rebuilt"]


def test_a_module_of_another_abi_is_no_missing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forge_prebuilt_silu.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "forge_prebuilt_silu is installed and cannot be imported: ImportError: undefined symbol: _ZN3c105ErrorC2"
    with pytest.warns(HubNotice, match=f"{text}; it is built instead"):
        assert taken([Rebuilt], torch.randn(3))[0] == ["Rebuilt"]
    with pytest.warns(HubNotice, match=text):
        who, reasons = taken([Prebuilt], torch.randn(3))
    assert "Prebuilt" not in who and text in reasons["Prebuilt"]


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda: 3, "load() raised TypeError: load() gave 3, which is no function"),
        (lambda: module("m"), "load() raised ValueError: load() gave the module m, and kernel_name says no function"),
        (lambda: lambda x, y: x, "its signature needs 'y', which it is not given"),
        (lambda: lambda: 0, "its signature does not accept 'input'"),
    ],
)
def test_what_load_gives_is_checked(found: Callable, reason: str) -> None:
    class Loads(Silu):
        def load(self) -> Any:
            return found()

    who, reasons = taken([Loads], torch.randn(3))
    assert "Loads" not in who and reason in reasons["Loads"]


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    who, reasons = taken([Prebuilt], torch.randn(3))
    assert "Prebuilt" not in who
    assert reasons["Prebuilt"] == "load() raised BuildError: Prebuilt has no build_jit, and no build with sources"
    assert issubclass(BuildError, Exception)


# errors of a class


def variant(**attributes: Any) -> type:
    return type("Variant", (Silu,), attributes)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (type("Empty", (forge.KernelExtension,), {"op": SILU}), "Empty has neither load nor build_jit"),
        (variant(op=None), "Variant does not say in op what it implements"),
        (variant(priority="high"), "Variant.priority is 'high', but must be an integer"),
        (variant(is_available=True), "Variant.is_available must be a method"),
        (variant(is_avaliable=lambda self: True), "Variant.is_avaliable means nothing; did you mean 'is_available'?"),
        (variant(option={}), "Variant.option means nothing; did you mean 'options'?"),
        (variant(options={"dtype": 1}), "the class has no such option; did you mean 'dtypes'?"),
        (variant(options={"priority": 1}), "Variant.options: 'priority': the class says so itself"),
    ],
)
def test_a_wrong_class_is_refused_when_it_is_registered(cls: type, message: str) -> None:
    before = list(hubex.kernels)
    for given in (cls, cls()):
        with pytest.raises(TypeError, match=re.escape(message)):
            forge.register_kernel(given)
    assert hubex.kernels == before


@pytest.mark.parametrize("given", [silu, object(), int, "folder", None])
def test_what_is_no_extension_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"forge\.register_kernel: .* is no KernelExtension"):
        forge.register_kernel(given)


def test_constraints_that_are_wrong_are_told_with_the_place_of_the_class() -> None:
    class Variant(Silu):
        options = {"arg_meta": {"nosuch": torch.float32}}  # noqa: RUF012

    with pytest.raises(ManifestError, match=r"test_extension\.py:\d+:1: .*'nosuch'"):
        forge.register_kernel(Variant)


SOURCE = """\
#include <torch/library.h>
#include <ATen/ATen.h>
namespace {
at::Tensor silu(const at::Tensor& input) { return input / (1 + (-input).exp()); }
}
TORCH_LIBRARY(forge_by_class, m) {
  m.def("silu(Tensor input) -> Tensor");
  m.impl("silu", c10::DispatchKey::CPU, silu);
}
"""
CLASS = """\
import forge


class Native(forge.KernelExtension):
    op, kernel_name, module = "torch.nn.functional.silu", "forge_by_class::silu", "forge_by_class_native"
    build = {"cpp": "silu.cpp"}
    options = {"dtypes": ["float32"], "grad": "composite"}
"""


@pytest.mark.slow  # compiles
def test_sources_are_compiled_once_for_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silu.cpp").write_text(SOURCE)
    (tmp_path / "forge_by_class.py").write_text(CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    native = importlib.import_module("forge_by_class").Native
    try:
        assert taken([native], torch.randn(3))[0] == ["Native"]
        assert len(list((tmp_path / "cache").rglob("builds/Native-*/*.so"))) == 1
        setup = native().build_aot()
        assert (setup.name, setup.sources) == ("forge_by_class_native", [str(tmp_path / "silu.cpp")])
    finally:
        del sys.modules["forge_by_class"]


def test_a_pattern_and_a_backward_of_its_own_work_as_in_a_decorator() -> None:
    class Swiglu(forge.KernelExtension):
        op = "pattern:swiglu"

        @property
        def options(self) -> dict[str, Any]:
            return {"dtypes": [torch.float32], "grad": self.backward}

        def backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple:
            s = torch.sigmoid(gate)
            return grad * up * s * (1 + gate * (1 - s)), grad * F.silu(gate)

        def load(self) -> Callable:
            return lambda gate, up: F.silu(gate) * up

    jitted = forge.jit(lambda gate, up: F.silu(gate) * up, kernels=[Swiglu])
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    ours, theirs = (torch.autograd.grad(f(gate, up).sum(), (gate, up)) for f in (jitted, lambda a, b: F.silu(a) * b))
    torch.testing.assert_close(ours, theirs)
    assert {row.executor for row in forge.explain(jitted).rows if "Swiglu" in row.operation} == {"Swiglu"}


def test_a_class_names_torchs_own_function_or_a_pattern() -> None:
    @forge.pattern
    def twice_silu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2

    for implemented, function in ((torch.nn.functional.silu, torch.nn.functional.silu), (twice_silu, doubled)):

        class Kernel(forge.KernelExtension):
            op = implemented

            def load(self, function: Any = function) -> Any:
                return function

        jitted = forge.jit(lambda x, f=function: f(x), kernels=[Kernel])
        x = torch.randn(4, 8)
        torch.testing.assert_close(jitted(x), function(x))
        assert [row.executor for row in forge.explain(jitted).rows] == ["Kernel"]


@pytest.mark.parametrize("said", [{"options": ["dtypes"]}, {"options": None}, {"build": "silu.cpp"}])
def test_options_and_build_that_are_no_mappings_are_an_error_that_says_so(said: dict[str, Any]) -> None:
    kernel = type("Wrong", (forge.KernelExtension,), {"op": "torch.nn.functional.silu", "load": None.__init__, **said})
    with pytest.raises(TypeError, match=r"Wrong: options is .*, but must be mappings"):
        forge.register_kernel(kernel)
