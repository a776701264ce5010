"""The user's policy for kernels: trusted publishers, required signatures, and size limits."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from forge.ir.checks import check, check_list
from forge.support.deprecation import RenamedMember

TRUST = ("locked", "publisher", "any")
SIGNATURES = ("off", "warn", "enforce")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy for the kernels that may be imported.

    trust: "locked" allows the kernels in a lock file; "publisher" also those of `repositories` ("org/name"), of
    `publishers` ("org") and, with `hub_publishers`, of organizations that the Hub marks as trusted; "any" all. local:
    whether local folders may be used without a lock. build: whether their sources may be compiled, if no prebuilt
    variant fits and the cache has none. signatures: the effect of a missing or bad signature. imports: modules that
    kernels may import besides the standard library, torch, triton and their declared dependencies (`allow_imports` of
    forge.jit and forge.use_kernels, `--allow-import` of the command line). max_file_bytes: the maximum size of a file.
    Raises: ValueError and TypeError for invalid values.
    """

    trust: Literal["locked", "publisher", "any"] = "publisher"
    repositories: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    hub_publishers: bool = True
    local: bool = False
    build: bool = True
    signatures: Literal["off", "warn", "enforce"] = "off"
    imports: tuple[str, ...] = ()
    max_file_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name, allowed in (("trust", TRUST), ("signatures", SIGNATURES)):
            choice = getattr(self, name)
            near = difflib.get_close_matches(str(choice), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            check(choice in allowed, lambda n=name, c=choice, a=allowed, h=hint: f"Policy: {n}={c!r} is not in {a}{h}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, tuple):
                check(
                    not isinstance(value, str),
                    lambda f=field, v=value: f"Policy: {f.name}={v!r} is one string, but must be a tuple of strings",
                    TypeError,
                )
                object.__setattr__(self, field.name, tuple(value))

    def with_imports(self, imports: Sequence[str]) -> "Policy":
        """Return this policy with these modules added to the allowed imports. Raises TypeError for one string."""
        check_list(imports, "allow_imports", "the names of modules")
        return replace(self, imports=(*self.imports, *imports)) if imports else self

    allowing = RenamedMember("with_imports")

    def names(self, repository: str) -> bool:
        """Return whether the policy itself trusts the repository, without the Hub's word on its publisher."""
        publisher = repository.split("/")[0]
        return self.trust == "any" or repository in self.repositories or publisher in self.publishers
