"""Names that were renamed: the old one works for one version, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed_attributes(module: str, names: Mapping[str, str], resolve: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose public names were renamed.

    Args:
        module: its name, as users write it.
        names: the new name of each old one.
        resolve: gives the object of a new name.

    The function raises AttributeError for every other name, and warns with a DeprecationWarning of an old one.
    """

    def __getattr__(name: str) -> Any:
        new = names.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now {module}.{new}; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return resolve(new)

    return __getattr__
