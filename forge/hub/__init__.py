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
