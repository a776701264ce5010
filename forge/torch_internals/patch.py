"""The table of patches: what of torch is another while forge captures or compiles, and why.

`PATCHES` has every one. Each says what is wrong without it, torch's issue, where torch does that, and for which
versions it is.
`ALTERNATIVES` has the supported ways of torch that are not used, and why.
"""

import inspect
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from forge.torch_internals.versions import TORCH

Version = tuple[int, int]
P = ParamSpec("P")
R = TypeVar("R")


class Replaced:
    """A context manager: an attribute of torch is replaced while any thread is inside, or is there only then."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner = owner
        self.name = name
        self.own = vars(owner).get(name)  # None where it is inherited, or is not there
        self.original = inspect.getattr_static(owner, name, None)
        self.replacement = replacement
        self.inside = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            setattr(self.owner, self.name, self.replacement)

    def __exit__(self, *raised: Any) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            if self.own is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.own)


class Scope(Enum):
    """When a patch is in force."""

    CAPTURE = "while Dynamo captures one of forge's frames"
    TRACE = "while a function is traced directly"
    MESSAGE = "while the message of a check is made"
    COMPILE = "while Inductor compiles a region, under a lock of the caller's"
    PROCESS = "from its first use to the end of the process"


class Patch(Replaced):
    """An attribute of torch that is another in a scope.

    Args:
        owner, name: the class or module, and its attribute.
        replacement: takes its place; it finds the attribute itself in `original`.
        scope: when it is in force.
        why: what goes wrong without it.
        issue: the URL of torch's issue or pull request, or "not reported: " and the reason.
        upstream: the file, line, version and function of torch that it corrects.
        since: the first version of torch that it is for.
        before: the first version that does not need it any more.
        not_probed: why no program of tests/capture/test_patches.py shows that it is needed, and which test does.
    """

    def __init__(  # noqa: PLR0913  a record's fields
        self,
        owner: Any,
        name: str,
        replacement: Any,
        *,
        why: str,
        issue: str,
        upstream: str,
        scope: Scope = Scope.CAPTURE,
        since: Version | None = None,
        before: Version | None = None,
        not_probed: str | None = None,
    ) -> None:
        if isinstance(inspect.getattr_static(owner, name, None), staticmethod):
            replacement = staticmethod(replacement)
        super().__init__(owner, name, replacement)
        self.scope = scope
        self.why = why
        self.issue = issue
        self.upstream = upstream
        self.since = since
        self.before = before
        self.not_probed = not_probed
        self.enabled = True  # tests show by the opposite that it is needed
        PATCHES.append(self)

    @property
    def applies(self) -> bool:
        """True if the torch that is installed needs the patch."""
        is_since = self.since is None or self.since <= TORCH
        is_before = self.before is None or self.before > TORCH
        return self.enabled and self.original is not None and is_since and is_before

    def __enter__(self) -> None:
        if self.applies:
            super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.applies:
            super().__exit__(*raised)

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner}.{self.name}"


PATCHES: list[Patch] = []


class Alternative(NamedTuple):
    """A supported way of torch that forge does not go."""

    name: str
    instead: str  # the module of forge that does the same
    why: str


ALTERNATIVES = (
    Alternative(
        "torch._inductor.standalone_compile, with CompiledArtifact.save and load",
        "forge/executors/inductorex/artifacts.py",
        "of six regions on a CPU (torch 2.13), it takes twice the time to compile, 13 times the bytes, 5 times as long "
        "to load, and 4 µs more for each call of 21, for AOTAutograd's wrapper",
    ),
    Alternative(
        "torch._inductor.compile_fx_ext, out-of-process compilation (TORCHINDUCTOR_FX_COMPILE_MODE)",
        "forge/executors/inductorex/out_of_process.py",
        "it is a setting of the whole process, whose worker compiles without the patches of torch_internals/inductor/; "
        "results depend on these",
    ),
)


class Hook(Generic[P, R]):
    """A function that a patch calls and a package above this one provides, as it is imported.

    Args:
        purpose: the function's task, for a reader and for the error where nobody has provided it.
    """

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.function: Callable[P, R] | None = None

    def provide(self, function: Callable[P, R]) -> Callable[P, R]:
        """Set the function, as a decorator."""
        assert self.function is None, f"two functions to {self.purpose}: {self.function} and {function}"
        self.function = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert self.function is not None, f"no function to {self.purpose}"
        return self.function(*args, **kwargs)


def patch(owner: Any, name: str, **about: Any) -> Callable[[Callable], Patch]:
    """Return a decorator that makes a Patch of the function that takes an attribute's place. Arguments as of Patch."""
    return lambda replacement: Patch(owner, name, replacement, **about)


def patches_of(scope: Scope) -> list[Patch]:
    """Return the patches of a scope that the torch that is installed needs."""
    return [each for each in PATCHES if each.scope is scope and each.applies]
