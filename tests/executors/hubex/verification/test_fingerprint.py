"""Fingerprints of kernels change with everything that can change their results, and report what they cannot cover."""

import ctypes
import dataclasses
import enum
import functools
import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.fingerprint import Fingerprint, natives
from forge.executors.hubex.fingerprint import fingerprint
from tests.hub.kernels import native_module

SCALE = 1.0
TABLE = {"scale": 1.0}
LOCK = threading.Lock()
LIBRARY = torch.library.Library("called_directly", "DEF")  # torch 2.11 fails if it is freed


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def of(function: Callable, **options: Any) -> Fingerprint:
    """Return the fingerprint of a function as a kernel of gelu."""
    return fingerprint(forge.kernel("torch.nn.functional.gelu", function, name="mine", args={"x": "input"}, **options))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * SCALE


def tabled(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * TABLE["scale"]


def through_a_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


def test_it_is_the_same_for_the_same() -> None:
    assert of(scaled) == of(scaled)
    assert of(scaled).is_lasting


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (scaled, "SCALE", 2.0),
        (tabled, "TABLE", {"scale": 2.0}),
        (through_a_helper, "helper", lambda x: F.gelu(x) * 2),
        (through_a_helper, "helper", F.relu),
    ],
)
def test_a_global_that_it_reads_is_a_part_of_it(
    function: Callable, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of(function)
    monkeypatch.setitem(globals(), name, value)
    assert of(function) != before


def test_a_value_that_is_changed_in_place_is_another() -> None:
    before = of(tabled)
    TABLE["scale"] = 2.0
    try:
        assert of(tabled) != before
    finally:
        TABLE["scale"] = 1.0
    assert of(tabled) == before


def test_closures_defaults_and_attributes_are_a_part_of_it() -> None:
    def made(closed: float, default: float, attribute: float) -> Callable:
        def function(x: torch.Tensor, factor: float = default) -> torch.Tensor:
            return F.gelu(x) * closed * factor * function.attribute

        function.attribute = attribute
        return function

    found = [of(made(*values)) for values in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))]
    assert len(set(found)) == 4
    assert of(made(1, 1, 1)) == found[0]


def test_a_small_tensor_is_its_values() -> None:
    def made(weight: torch.Tensor) -> Callable:
        return lambda x: F.gelu(x) * weight

    assert of(made(torch.ones(3))) == of(made(torch.ones(3))) != of(made(torch.zeros(3)))


def test_a_large_tensor_is_known_in_this_process_until_it_is_written_to() -> None:
    weight = torch.ones(1 << 20)

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * weight[0]

    before = of(weighted)
    assert not before.is_lasting and of(weighted) == before
    weight[0] = 2
    assert of(weighted) != before


class Doubler:
    factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_an_object_is_its_class_and_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    doubler = Doubler()

    def called(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * doubler(x)

    before = of(called)
    assert before.is_lasting
    doubler.factor = 3.0
    changed = of(called)
    monkeypatch.setattr(Doubler, "__call__", lambda self, x: x)
    assert len({before, changed, of(called)}) == 3


class Options(NamedTuple):
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 1.0


class Mode(enum.Enum):
    SINGLE = 1.0
    DOUBLE = 2.0


@functools.cache
def cached(scale: float) -> float:
    return scale


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Options(), Options(2.0)),
        (Settings(), Settings(2.0)),
        (Mode.SINGLE, Mode.DOUBLE),
        (cached, functools.cache(lambda scale: scale)),
        (functools.partial(cached, 1.0), functools.partial(cached, 2.0)),
        (torch.float32, torch.float64),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        (logging.getLogger("verified"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_many_kinds_are_known_everywhere(one: Any, other: Any) -> None:
    def made(value: Any) -> Fingerprint:
        return of(lambda x: F.gelu(x) if value else x)

    assert made(one).is_lasting and made(other).is_lasting
    assert made(one) == made(one) != made(other)


def test_every_function_of_the_entry_is_a_part_of_it() -> None:
    options = {"arg_meta": {"x": "T"}, "type_alias": {"T": [torch.float32]}, "shape": {"x": "[..., H]"}}
    reference = forge.pattern(doubled)

    def fingerprint_of(forward: Callable, backward: Callable, kernel: Callable = doubled) -> Fingerprint:
        grad = {"kernel_name": backward, "forward": forward, "saves": {"saved": ["T", "[...]"]}}
        return fingerprint(forge.kernel(reference, kernel, name="mine", grad=grad, **options))

    forwards = (lambda x: (x + x, x), lambda x: (x * 2, x))
    backwards = (lambda g, x, saved: g + g, lambda g, x, saved: g * 2)
    found = {fingerprint_of(f, b, k) for f in forwards for b in backwards for k in (doubled, lambda x: x * 2)}
    assert len(found) == 8


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x + x])


def test_what_it_is_compared_with_is_a_part_of_it() -> None:
    def of_pattern(reference: Callable) -> Fingerprint:
        pattern = forge.pattern(reference)
        pattern.name = "mine"
        return fingerprint(forge.kernel(pattern, doubled, name="mine"))

    assert of_pattern(lambda x: torch.relu(x) + x) != of_pattern(lambda x: torch.relu(x) - x)


# modules


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Yield a function that writes modules, which are imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def written(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(f"import torch\nimport torch.nn.functional as F\n{text}\n")
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.startswith("verified_")]:
            del sys.modules[name]

    yield written
    written()


def imported(name: str) -> Callable:
    return importlib.import_module(name).f


KERNELS = {
    "a module's function": "import verified_helper\ndef f(x):\n    return verified_helper.g(x)",
    "a name of a module": "from verified_helper import g\ndef f(x):\n    return g(x)",
    "an import within": "def f(x):\n    from verified_helper import g\n    return g(x)",
    "a module within": "def f(x):\n    import verified_helper\n    return verified_helper.g(x)",
    "a module as a value": "import verified_helper\ndef f(x):\n    return getattr(verified_helper, 'g')(x)",
    "a function within": "import verified_helper\ndef f(x):\n    return (lambda y: verified_helper.g(y))(x)",
    "a decorator": "import verified_helper\n@verified_helper.decorated\ndef f(x):\n    return F.gelu(x)",
    "a base class": "import verified_helper\nclass K(verified_helper.K):\n    pass\ndef f(x):\n    return K().g(x)",
}
HELPER = """
def g(x):
    return F.gelu(x) * {0}
def decorated(function):
    return lambda x: function(x) * {0}
class K:
    def g(self, x):
        return F.gelu(x) * {0}
"""


@pytest.mark.parametrize("text", KERNELS.values(), ids=KERNELS)
def test_helper_modules_are_a_part_of_it(text: str, write: Callable) -> None:
    write(verified_kernel=text, verified_helper=HELPER.format(1.0))
    importlib.import_module("verified_helper")
    before = of(imported("verified_kernel"))
    assert before.is_lasting
    write(verified_helper=HELPER.format(2.0))
    importlib.import_module("verified_helper")
    assert of(imported("verified_kernel")) != before
    write(verified_helper=HELPER.format(1.0))
    importlib.import_module("verified_helper")
    assert of(imported("verified_kernel")) == before


def test_what_is_beside_what_it_reads_is_no_part_of_it(write: Callable) -> None:
    write(verified_kernel=KERNELS["a module's function"], verified_helper=HELPER.format(1.0))
    before = of(imported("verified_kernel"))
    write(verified_helper=HELPER.format(1.0) + "OTHER = 1\n")
    assert of(imported("verified_kernel")) == before


def test_it_is_the_same_in_another_process(write: Callable, tmp_path: Path) -> None:
    text = KERNELS["a base class"] + "\ng = f\nNAMES = {'a', 'b', 'c'}\ndef f(x):\n    return g(x) if NAMES else x"
    write(verified_kernel=text, verified_helper=HELPER.format(1.0))
    program = f"""
import sys
sys.path[:0] = {[str(tmp_path), *sys.path]!r}
import forge, verified_kernel
from forge.executors.hubex.fingerprint import fingerprint
made = forge.kernel("torch.nn.functional.gelu", verified_kernel.f, name="mine", args={{"x": "input"}})
print(fingerprint(made).digest)
"""
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == of(imported("verified_kernel")).digest, done.stderr


# code that is not Python


def test_a_native_module_is_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for returns in (1, 2, 1):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        (folder / "verified_native.so").write_bytes(native_module(tmp_path, "verified_native", returns))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "verified_native", raising=False)
        module: ModuleType = importlib.import_module("verified_native")
        value = module.value

        def by_module(x: torch.Tensor, module: ModuleType = module) -> torch.Tensor:
            return F.gelu(x) * module.value()

        def by_function(x: torch.Tensor, value: Callable = value) -> torch.Tensor:
            return F.gelu(x) * value()

        found.append((of(by_module), of(by_function)))
    assert all(each.is_lasting for pair in found for each in pair)
    assert found[0] == found[2]
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_a_library_of_ctypes_is_its_bytes(tmp_path: Path) -> None:
    def made(returns: int) -> Fingerprint:
        path = tmp_path / f"lib{returns}.so"
        path.write_bytes(native_module(tmp_path, f"lib{returns}", 7))
        library = ctypes.CDLL(str(path))
        return of(lambda x: F.gelu(x) * bool(library))

    assert made(1).is_lasting
    assert made(1) != made(2)


@pytest.mark.parametrize("name", ["libhelper.so", "helper.cpython-311.so", "libhelper.dylib"])
def test_a_library_is_those_of_the_user_that_it_names_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {each: tmp_path / each for each in ("libkernel.so", name, "libother.so")}
    libraries["libkernel.so"].write_bytes(b"\0libc.so.6\0/opt/" + name.encode() + b".3\0")
    for each in (name, "libother.so"):
        libraries[each].write_bytes(b"first")
    monkeypatch.setattr(natives, "loaded_files", lambda: frozenset(map(str, libraries.values())))
    first = natives.file_hash(str(libraries["libkernel.so"]))
    libraries["libother.so"].write_bytes(b"another")
    assert natives.file_hash(str(libraries["libkernel.so"])) == first
    libraries[name].write_bytes(b"another")
    assert natives.file_hash(str(libraries["libkernel.so"])) != first


def test_a_file_that_was_replaced_since_it_was_loaded_is_known_in_this_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "replaced.so"
    path.write_bytes(native_module(tmp_path, "replaced", 1))
    library = ctypes.CDLL(str(path))
    path.unlink()
    path.write_bytes(native_module(tmp_path, "replaced", 2))
    assert not of(lambda x: F.gelu(x) * bool(library)).is_lasting


def test_an_operator_of_python_is_its_functions() -> None:
    def made(factor: float) -> Fingerprint:
        @torch.library.custom_op("verified::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x) * factor

        return of(lambda x: torch.ops.verified.scaled(x))

    first = made(1.0)
    assert first.is_lasting and first == made(1.0) != made(2.0)


def test_torchs_own_operators_are_torchs_version() -> None:
    assert of(lambda x: torch.ops.aten.gelu.default(x)).is_lasting


def test_an_operator_that_python_registers_is_known_in_this_process_alone() -> None:
    LIBRARY.define("f(Tensor x) -> Tensor")
    LIBRARY.impl("f", lambda x: F.gelu(x), "CPU")
    found = of(lambda x: torch.ops.called_directly.f(x))
    assert not found.is_lasting


def locked(x: torch.Tensor) -> torch.Tensor:
    with LOCK:
        return F.gelu(x)


@pytest.mark.parametrize(
    "function",
    [
        locked,
        lambda x: eval("F.gelu(x)"),
        lambda x: F.gelu(x) * float(open("factor").read()),  # noqa: SIM115
        lambda x: F.gelu(x) * globals()["SCALE"],
        lambda x: importlib.import_module("verified_helper").g(x),
    ],
)
def test_what_cannot_be_read_off_is_known_in_this_process_alone(function: Callable) -> None:
    found = of(function)
    assert not found.is_lasting and of(function) == found


def test_two_objects_that_cannot_be_known_are_two_kernels() -> None:
    def made(lock: Any) -> Fingerprint:
        return of(lambda x: F.gelu(x) * bool(lock))

    lock = threading.Lock()
    assert made(lock) == made(lock) != made(threading.Lock())
