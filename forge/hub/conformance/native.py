"""The requirements on native modules: their processor, the limited API of Python 3.9, old systems, libraries."""

import contextlib
import importlib
import re
import types
from collections.abc import Iterator

from forge.hub.conformance.elf import Library, NotElf, read_library
from forge.hub.conformance.python_abi import ADDED_IN, PRIVATE
from forge.hub.conformance.repository import Finding, Repository, Variant, variant_problem

# manylinux_2_28: no symbol is of a later version than these.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
VERSION = re.compile(r"([A-Z]+)_(\d+(?:\.\d+)*)")
PLATFORM_TAG = re.compile(r"\.(cpython|cp)-?\d+[^.]*\.|\.pypy\d")
# The system's and torch's libraries, and those that the CUDA, ROCm and XPU builds of torch depend on.
SYSTEM = r"lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|atomic|gomp)\.so(\.\d+)*|ld-linux-[\w-]+\.so\.\d+"
TORCH = r"lib(torch|c10|shm)(_\w+)?\.so"
DEVICE = {
    "cuda": r"lib(cuda|cudart|cublas|cublasLt|cudnn\w*|cufft|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc[\w-]*"
    r"|nvJitLink|nvToolsExt|cupti|cufile|nvshmem_host)\.so(\.[\d.]+)?",
    "rocm": r"lib(amdhip64|hsa-runtime64|hipblas|hipblaslt|hipfft|hiprand|hipsolver|hipsparse|hipsparselt|rocblas"
    r"|rocfft|rocrand|rocsolver|rocsparse|MIOpen|rccl|roctx64|roctracer64|amd_comgr|hiprtc[\w-]*)\.so(\.[\d.]+)?",
    "xpu": r"lib(sycl|ze_loader|dnnl|mkl_\w+|svml|irng|imf|intlc|OpenCL|ur_loader|iomp5)\.so(\.[\d.]+)?",
}
FFI = r"libtvm_ffi\.so"


def _modules(repository: Repository) -> Iterator[tuple[Variant, str]]:
    for variant in repository.variants:
        is_here = variant_problem(variant.name) is None and not variant.is_noarch and variant.name.endswith("-linux")
        yield from ((variant, path) for path in variant.native if is_here)


def _libraries(repository: Repository) -> Iterator[tuple[Variant, str, Library]]:
    for variant, path in _modules(repository):
        with contextlib.suppress(NotElf):  # which is a finding of native_modules
            yield variant, path, read_library(variant.files[path].read())


def native_modules(repository: Repository) -> Iterator[Finding]:
    """Require that a native module is a library for the variant's processor, and that universal variants have none."""
    for variant in repository.variants:
        is_known = variant_problem(variant.name) is None
        for path in variant.native if is_known and variant.is_noarch else ():
            yield variant.finding("native", "is native code, in a variant for every processor and torch", path)
    for variant, path in _modules(repository):
        processor = variant.name.split("-")[-2]
        try:
            machine = read_library(variant.files[path].read()).machine
        except NotElf as error:
            yield variant.finding("native", str(error), path)
            continue
        if machine != processor:
            yield variant.finding("native", f"is for {machine}, but the variant for {processor}", path)


def limited_api(repository: Repository) -> Iterator[Finding]:
    """Require that native modules use no more of Python than the limited API of 3.9, so that one build serves all
    versions."""
    for variant in repository.variants:
        for path in variant.native if not variant.is_noarch else ():
            if PLATFORM_TAG.search(path.rpartition("/")[2]):
                yield variant.finding("abi3", "is for one version of Python; build it for the limited API", path)
    checker = _checker()
    for variant, path, library in _libraries(repository):
        if PLATFORM_TAG.search(path.rpartition("/")[2]):
            continue
        problems = _by_checker(checker, variant, path) if checker is not None else None
        if problems is None:
            names = [name for name in library.undefined if name in ADDED_IN or name in PRIVATE]
            problems = [f"{name} (since {ADDED_IN[name]})" if name in ADDED_IN else name for name in names]
        if problems:
            text = f"takes what the limited API of Python 3.9 has not: {', '.join(problems[:6])}"
            yield variant.finding("abi3", text, path)


def _checker() -> types.ModuleType | None:
    """Return kernel-abi-check if it is installed: it knows every symbol of Python's."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("kernel_abi_check")
    return None


def _by_checker(checker: types.ModuleType, variant: Variant, path: str) -> list[str] | None:
    """Return the findings of kernel-abi-check, or None if it cannot read the file."""
    try:
        findings = checker.ObjectFile(variant.files[path].location).check_python_abi("3.9")
    except (OSError, ValueError):
        return None
    return [str(each.name) for each in findings]


def manylinux(repository: Repository) -> Iterator[Finding]:
    """Require that the symbol versions of native modules exist on manylinux_2_28 systems."""
    for variant, path, library in _libraries(repository):
        if late := sorted({version for _, version in library.versions if _is_late(version)}):
            limits = ", ".join(f"{name} {'.'.join(map(str, each))}" for name, each in LIMITS.items())
            text = f"takes symbols of {', '.join(late)}; manylinux_2_28 ends with {limits}"
            yield variant.finding("manylinux", text, path)


def _is_late(version: str) -> bool:
    match = VERSION.fullmatch(version)
    return match is not None and match[1] in LIMITS and tuple(map(int, match[2].split("."))) > LIMITS[match[1]]


def dynamic_libraries(repository: Repository) -> Iterator[Finding]:
    """Require that native modules depend only on the system, torch, and the libraries that come with torch for the
    backend."""
    for variant, path, library in _libraries(repository):
        allowed = [SYSTEM, TORCH, FFI, *([DEVICE[variant.backend]] if variant.backend in DEVICE else [])]
        own = {each.rpartition("/")[2] for each in variant.files}
        for name in library.needed:
            if name not in own and not any(re.fullmatch(each, name) for each in allowed):
                text = f"depends on {name}, which does not come with torch for {variant.backend or 'this backend'}"
                yield variant.finding("dynamic-libraries", text, path)


REQUIREMENTS = (native_modules, limited_api, manylinux, dynamic_libraries)
