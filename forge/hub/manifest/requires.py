"""The check of a manifest's requirements against the installed packages."""

from importlib import metadata

import torch

from forge.hub.compat import library
from forge.hub.manifest.model import Requires


def unmet(requires: Requires) -> list[str]:
    """Return the missing requirements, in words: 'needs torch>=2.12, but 2.11.0 is installed'."""
    missing = []
    versions = library("packaging.specifiers").SpecifierSet(requires.torch)
    if not versions.contains(torch.__version__.split("+")[0], prereleases=True):
        missing.append(f"needs torch{requires.torch}, but {torch.__version__} is installed")
    for text in requires.python:
        requirement = library("packaging.requirements").Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"needs {text}, which is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"needs {text}, but {version} is installed")
    return missing
