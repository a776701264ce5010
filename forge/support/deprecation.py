"""Names that were renamed: the old one works for one version, with a warning."""

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar


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


class RenamedMembers:
    """A base of classes that users subclass: for one version, subclasses may define and call renamed members by their
    old names, with a DeprecationWarning.

    renamed_members: the new name of each old one.
    """

    renamed_members: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the class the members that it defines by their other names, too."""
        super().__init_subclass__(**options)
        defined = dict(vars(cls))
        for old, new in cls.renamed_members.items():
            message = f"{cls.__qualname__}.{old} is now {new}; the old name goes with the next version"
            if new in defined:
                setattr(cls, old, _deprecated(defined[new], message))
            elif old in defined:
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                setattr(cls, new, defined[old])


def _deprecated(member: Any, message: str) -> Any:
    """Return a method that warns; any other member as it is."""
    if not callable(member):
        return member

    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return member(*args, **kwargs)

    return call
