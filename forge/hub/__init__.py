"""Kernels of the Hugging Face Kernel Hub: found, fetched, verified and imported.

`resolve` finds a repository's build for this system, `load` verifies and imports it. Nothing here needs the network
once a kernel is in the cache, and nothing needs the optional packages until it is called.
"""

from forge.hub.build import BuiltLibrary, build_kernels, load_built, source_files
from forge.hub.bundle import NAME as BUNDLE
from forge.hub.bundle import read_bundle
from forge.hub.conformance import Finding, LayerClass, cached_variants, check_repository, check_selection, layer_classes
from forge.hub.errors import (
    BuildError,
    HubError,
    HubNotice,
    IntegrityError,
    KernelImportError,
    MalformedError,
    MissingExtraError,
    NoManifestError,
    NotFoundError,
    RefusedError,
    UnreachableError,
)
from forge.hub.loader import (
    LoadedKernel,
    VerifiedKernel,
    attribute,
    content_of,
    load,
    loaded_kernels,
    verified_of,
    verify,
)
from forge.hub.lock_kernels import check_locked, lock_kernels, named_repositories
from forge.hub.lockfile import Lock, LockedKernel, read_lock
from forge.hub.metadata import Metadata
from forge.hub.policy import Policy
from forge.hub.resolver import ResolvedKernel, Selection, available, fetch, resolve, resolve_locked, select
from forge.support.deprecation import renamed_attributes

__all__ = [
    "BUNDLE",
    "BuildError",
    "BuiltLibrary",
    "Finding",
    "HubError",
    "HubNotice",
    "IntegrityError",
    "KernelImportError",
    "LayerClass",
    "LoadedKernel",
    "Lock",
    "LockedKernel",
    "MalformedError",
    "Metadata",
    "MissingExtraError",
    "NoManifestError",
    "NotFoundError",
    "Policy",
    "RefusedError",
    "ResolvedKernel",
    "Selection",
    "UnreachableError",
    "VerifiedKernel",
    "available",
    "build_kernels",
    "cached_variants",
    "check_locked",
    "check_repository",
    "check_selection",
    "content_of",
    "fetch",
    "layer_classes",
    "load",
    "load_built",
    "loaded_kernels",
    "lock_kernels",
    "named_repositories",
    "read_bundle",
    "read_lock",
    "resolve",
    "resolve_locked",
    "select",
    "source_files",
    "verified_of",
    "verify",
]

_RENAMED = {
    "Built": "BuiltLibrary",
    "Loaded": "LoadedKernel",
    "Resolved": "ResolvedKernel",
    "Verified": "VerifiedKernel",
    "cached": "cached_variants",
    "loaded": "loaded_kernels",
}
__getattr__ = renamed_attributes(__name__, _RENAMED, globals().__getitem__)
