"""Names that were renamed: the old one works for one version, with a warning."""

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


class RenamedMember:
    """A member of a class by its old name: reading and setting it warn, and use the new one.

    Through `super()` it stands for the new member as the class that has the descriptor sees it.

    Args:
        new: The new name.
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, old: str) -> None:
        self.owner = owner
        self.message = f"{owner.__qualname__}.{old} is now {self.new}; the old name goes with the next version"
        self.old = old

    def __get__(self, instance: Any, owner: type) -> Any:
        warnings.warn(self.message, DeprecationWarning, stacklevel=2)
        target = owner if instance is None else instance
        before = owner.__mro__[: owner.__mro__.index(self.owner)]
        if any(self.old in vars(each) for each in before):  # a subclass has a descriptor too, so this is a super() call
            target = super(before[-1], target)
        return getattr(target, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        warnings.warn(self.message, DeprecationWarning, stacklevel=2)
        setattr(instance, self.new, value)


class RenamedMembers:
    """A base of classes that users subclass: for one version, they may define, set, read and call renamed members by
    their old names, with a DeprecationWarning.

    renamed_members: the new name of each old one.
    """

    renamed_members: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the members that the class defines their other names, too."""
        super().__init_subclass__(**options)
        defined = dict(vars(cls))
        for old, new in cls.renamed_members.items():
            if old not in defined and new not in defined:
                continue
            renamed = RenamedMember(new)
            renamed.__set_name__(cls, old)
            setattr(cls, old, renamed)
            if new not in defined:
                warnings.warn(renamed.message, DeprecationWarning, stacklevel=2)
                setattr(cls, new, defined[old])
