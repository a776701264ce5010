"""Manifests of kernels: YAML files that declare which operator a kernel implements, and for which inputs.

    manifest = read_manifest("forge_kernels.yaml", resolver)     # or ManifestError, with every problem
    for entry in candidates(manifest.kernels):
        check = Checker(entry, resolver.resolve(entry.op))       # check(*args) is True, or the reason

Nothing is imported or registered here.
"""

from forge.hub.manifest.builder import caller, kernel
from forge.hub.manifest.calls import kernel_problems, own_arguments
from forge.hub.manifest.constraints import Checker, no_kernel
from forge.hub.manifest.errors import ManifestError, Mark, Problem, did_you_mean
from forge.hub.manifest.layout import empty_in_order, fix, fix_ups
from forge.hub.manifest.model import (
    REQUIRED,
    Argument,
    Build,
    Constant,
    Device,
    DimOrder,
    DtypeAlias,
    Grad,
    KernelArgument,
    KernelEntry,
    Layout,
    Library,
    Manifest,
    OpEntry,
    OrderAlias,
    Parameter,
    Requires,
    Resolver,
    SavedTensor,
    Signature,
)
from forge.hub.manifest.ordering import candidates, duplicates
from forge.hub.manifest.requires import unmet
from forge.hub.manifest.signatures import from_function, from_schema
from forge.hub.manifest.validate import parse_manifest, read_manifest
from forge.hub.manifest.views import View
