"""The private names of `kernels` and huggingface_hub that forge uses, in one place.

Each function here has a contract test (tests/hub/test_compat.py), so a breaking release of either library fails there;
`make test-kernels-versions` runs them against every version of `kernels` that pyproject.toml allows. 0.17 is the first
that has metadata, capabilities, signatures and allowed packages in the form that forge reads. Both libraries are
optional: they are imported when a function is first called.
"""

import importlib
import importlib.util
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.hub.errors import MissingExtraError


def library(name: str) -> types.ModuleType:
    """Import the module `name` of an optional library. Raises MissingExtraError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"kernels from the Hub need the package {name.split('.')[0]} ({error}): pip install forge-jit[hub]"
        ) from error


def require() -> None:
    """Raise MissingExtraError if the extra `hub` is not installed."""
    library("kernels")
    library("huggingface_hub")


def parse_variant(name: str) -> Any:
    """Return the library's variant of a folder name. Raises ValueError for an invalid name."""
    return library("kernels.variants").parse_variant(name)


def decide_variants(variants: Sequence[Any], backend: str | None) -> list[tuple[Any, str | None]]:
    """Return (variant, the reason for its rejection, or None), the best accepted one first. Raises ValueError for an
    unknown backend."""
    _, decisions = library("kernels.variants").resolve_variants(list(variants), backend)
    return [(decision.variant, getattr(decision, "reason", None)) for decision in decisions]


def active_backend(backend: str | None = None) -> str:
    """Return the name of the active backend: `backend`, or torch's. Raises ValueError if torch does not have it."""
    return library("kernels.backends")._select_backend(backend).name


def parse_metadata(content: bytes) -> Any:
    """Return the library's Metadata. Raises ValueError for content that it does not accept."""
    return library("kernels").Metadata.from_bytes(content)


def kernel_dependency(dependency: Any) -> tuple[str, int | None, str | None]:
    """Return (repository, version, revision) from an entry of `kernel-depends`."""
    version = dependency.version
    return dependency.repo_id, getattr(version, "version", None), getattr(version, "revision", None)


def python_dependencies(backend: str) -> dict[str, tuple[tuple[str, str | None], ...]]:
    """Return the packages that a kernel may declare in `python-depends` on a backend: name → (package, module that it
    provides)."""
    table = library("kernels.python_deps")._DEPENDENCY_DATA
    allowed = {**table.general, **table.backends.get(backend, {})}
    return {name: tuple((each.pkg, each.import_name) for each in info.python) for name, info in allowed.items()}


def newer_than_installed(minver: Any) -> bool:
    """Return whether a kernel's `kernels-minver` is above the installed version of the library."""
    installed = library("kernels.validate")._installed_version()
    return installed is not None and installed < minver


def signature_problem(folder: Path) -> str | None:
    """Return the reason why the library rejects the signature of a variant's metadata and digest, or None."""
    verify = library("kernels.verify")
    try:
        result = verify.verify_variant(folder)
    except Exception as error:  # the trust root is fetched from the network on first use
        return f"the signature could not be checked: {type(error).__name__}: {error}"
    if isinstance(result, verify.VerificationResult.Success):
        return None
    violations = [str(violation) for violation in getattr(result, "violations", [])]
    details = getattr(result, "reason", "") or "; ".join(violations)
    return f"{type(result).__name__}{f': {details}' if details else ''}"


def kernel_dependencies(modules: dict[str, types.ModuleType]) -> AbstractContextManager[None]:
    """Make `kernels.get_kernel_dep(repository)` return these modules inside the context."""
    return library("kernels.deps").use_kernel_deps(modules)


def hub_api() -> Any:
    """Return a client of the Hub.

    The client identifies as forge without a user agent: `kernels` makes an illegal header when telemetry is off.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    return library("huggingface_hub").HfApi(endpoint=endpoint, library_name="forge", library_version="hub")


def is_offline() -> bool:
    """Return whether the user declared this process offline."""
    return library("huggingface_hub").is_offline_mode()


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the errors of an unanswered request, whichever HTTP library huggingface_hub is built on."""
    errors = library("huggingface_hub.errors")
    http_error = next(each for each in errors.HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")
    return (http_error, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError)


def cache_root() -> Path:
    """Return the folder of huggingface_hub's cache that holds kernels."""
    return Path(os.environ.get("KERNELS_CACHE") or library("huggingface_hub.constants").HF_HUB_CACHE).expanduser()


# layers


@dataclass(frozen=True)
class LayerPlace:
    """The place of a layer: its repository in forge's notation, or a folder; its name; and the trusted repositories:
    True for all, else those named."""

    source: str
    layer: str
    trusts: bool | tuple[str, ...] = False


def is_layer_place(value: Any) -> bool:
    """Return whether a value is a LayerRepository, LocalLayerRepository or LockedLayerRepository of the library."""
    return type(value).__module__.partition(".")[0] == "kernels" and hasattr(value, "layer_name")


def layer_place(repository: Any) -> LayerPlace:
    """Read a LayerRepository, LocalLayerRepository or LockedLayerRepository. Raises ValueError for a locked one
    with an unknown commit."""
    attributes, layer = vars(repository), repository.layer_name
    if "_repo_path" in attributes:
        return LayerPlace(os.fspath(attributes["_repo_path"]), layer)
    name, revision = attributes["_repo_id"], attributes.get("_revision")
    trusted = attributes.get("_trust_remote_code", False)
    trusts = tuple(trusted) if isinstance(trusted, (list, tuple)) else bool(trusted)
    if attributes.get("_version") is not None:
        revision = f"v{attributes['_version']}"
    if revision is None:
        revision = _locked_commit(repository)
    return LayerPlace(f"{name}@{revision}", layer, trusts)


def _locked_commit(repository: Any) -> str:
    locks, dependency = (getattr(repository, name, None) for name in ("kernel_locks", "kernel_dep"))
    if locks is not None:
        return locks[dependency].commit
    resolve = getattr(repository, "_resolve_revision", None)  # before kernels 0.16
    if resolve is None:
        raise ValueError(f"{repository!r} does not say which commit is locked")
    return resolve()


def layer_device(key: Any) -> tuple[str, tuple[int, int] | None]:
    """Return (device type, range of capabilities) from the key of a mapping: "cuda", or the library's Device."""
    if isinstance(key, str):
        return key, None
    limits = key.properties
    return key.type, None if limits is None else (limits.min_capability, limits.max_capability)


def layer_mode(mode: Any) -> frozenset[str]:
    """Return the names of a Mode's flags."""
    return frozenset(each.name for each in type(mode) if each.value and each in mode)


def registered_layers() -> dict[str, dict[tuple[str, tuple[int, int] | None], dict[Any, Any]]]:
    """Return the state of register_kernel_mapping and use_kernel_mapping: layer → (device type, range) → mode →
    place."""
    mapping = library(
        "kernels.layer.globals" if is_installed("kernels.layer.globals") else "kernels.layer"
    )._KERNEL_MAPPING
    return {
        name: {key: modes for kind, repositories in devices.items() for key, modes in _by_range(kind, repositories)}
        for name, devices in mapping.get().items()
    }


def _by_range(kind: str, repositories: Any) -> Iterator[tuple[tuple[str, tuple[int, int] | None], dict[Any, Any]]]:
    tree = getattr(repositories, "repos_by_capability", None)
    if tree is None:
        yield (kind, None), repositories.repos
        return
    waiting = [tree.root]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield (kind, (node.start, node.end)), node.data
            waiting += [node.left, node.right]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False
