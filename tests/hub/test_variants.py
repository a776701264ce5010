"""Every form of a variant's name, and the order of preference of variants."""

import platform

import pytest
import torch

from forge.hub import compat
from forge.hub.variants import choose, describe

TORCH = "".join(torch.__version__.split(".")[:2])
MINOR = int(torch.__version__.split(".")[1])
HERE = f"{platform.machine()}-{platform.system().lower()}"

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the names below are of Linux builds")


def test_the_order_is_stable_abi_then_torch_then_no_arch_then_universal() -> None:
    best_first = [
        f"torch-stable-abi{TORCH}-cpu-{HERE}",
        f"torch-stable-abi2{MINOR - 1}-cpu-{HERE}",
        f"torch{TORCH}-cpu-{HERE}",
        f"torch{TORCH}-cxx11-cpu-{HERE}",
        "torch-cpu",
        "torch-universal",
    ]
    assert choose(reversed(best_first), "cpu").accepted == tuple(best_first)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"torch2{MINOR - 1}-cxx11-cpu-{HERE}", "Torch version"),
        (f"torch2{MINOR + 1}-cpu-{HERE}", "Torch version"),
        (f"torch{TORCH}-cxx98-cpu-{HERE}", "CXX11 ABI"),
        (f"torch-stable-abi2{MINOR + 1}-cpu-{HERE}", "too new"),
        (f"torch{TORCH}-cpu-sparc-linux", "CPU"),
        (f"torch{TORCH}-cpu-{platform.machine()}-plan9", "OS"),
        (f"tvm-ffi01-cpu-{HERE}", "tvm-ffi"),
        *[
            (f"torch{TORCH}-cxx11-{backend}-{HERE}", "backend")
            for backend in ("cu128", "cu130", "rocm63", "rocm71", "xpu20252", "cann80", "metal")
        ],
        *[(f"torch-{backend}", "backend") for backend in ("cuda", "rocm", "xpu", "metal", "npu")],
    ],
)
def test_each_form_of_name_is_read_and_its_rejection_says_why(name: str, reason: str) -> None:
    choice = choose([name], "cpu")
    assert choice.accepted == () and choice.rejected[0][0] == name
    assert reason in choice.rejected[0][1] and "not the name" not in choice.rejected[0][1]


@pytest.mark.parametrize("name", ["", "main", "torch-stable-abi-cpu", "cpu-torch", "torch213-cpu", "..", "🦀"])
def test_a_name_that_is_none_is_kept_with_a_reason(name: str) -> None:
    choice = choose([name], "cpu")
    assert choice.accepted == () and choice.rejected[0][0] == name
    assert "not the name of a variant" in choice.rejected[0][1]


def test_cuda_takes_its_own_major_and_no_newer_minor_the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    names = [f"torch{TORCH}-cxx11-cu{version}-{HERE}" for version in ("118", "126", "128", "129", "130")]
    choice = choose(names, "cuda")
    assert choice.accepted == (names[2], names[1])
    assert {name for name, _ in choice.rejected} == {names[0], names[3], names[4]}
    assert compat.active_backend() == "cuda"


def test_a_process_with_cuda_can_take_the_variant_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    names = ["torch-cpu", "torch-cuda"]
    assert choose(names).accepted == ("torch-cuda",)
    assert choose(names, "cpu").accepted == ("torch-cpu",)


def test_reasons_are_one_line_each() -> None:
    assert describe([("a", "b"), ("c", "d")]) == "\n  a: b\n  c: d"
    assert describe([]) == "\n  there is none; the place of one is build/<variant>/"
