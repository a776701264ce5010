"""The executor of kernels: the order in which they are tried, and the identity on which its programs depend."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from forge.executors.executor import Decision, Declined, Implementation, OperatorExecutor, decline
from forge.executors.fingerprint import Fingerprint
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.kernels import Kernel, implementation
from forge.hub.manifest import candidates
from forge.ir import Symbol, check
from forge.patterns import Pattern, builtin


class KernelVerifier(Protocol):
    """Interface of kernel verifiers; forge's implementation is in verification/verification_cache.py."""

    def verdict(self, kernel: Kernel, args: tuple, kwargs: dict) -> Decision:
        """Return True, or Declined with the sample on which the kernel failed."""

    def identity(self, kernels: Iterable[Kernel]) -> str | Declined:
        """Return a key of everything but the kernels that determines their verdicts; Declined if it may change."""

    def has_warned_of(self, reason: str) -> bool:
        """Return whether a kernel failed for this reason, and the failure was reported as a warning."""


class HubExecutor(OperatorExecutor):
    """Executor of symbols by kernels: the matching kernel of highest priority, then the most specific one.

    checked: whether the kernels' constraints are checked; faster: whether a kernel declines calls for which it is not
    known to be faster. builtin_kernels: returns kernels that are appended when they are first needed. verifier:
    decides whether a kernel is correct for a call; without one all are trusted.
    """

    def __init__(
        self,
        name: str = "hub",
        verifier: KernelVerifier | None = None,
        *,
        checked: bool = True,
        faster: bool = True,
        builtin_kernels: Callable[[], Iterable[Kernel]] = tuple,
    ) -> None:
        super().__init__(name)
        self.checked = checked
        self.faster = faster
        self._builtin_kernels: Callable[[], Iterable[Kernel]] | None = builtin_kernels
        self.verifier = verifier
        self._kernels: list[Kernel] = []
        self._by_symbol: dict[str, list[Implementation]] = {}
        self._patterns: tuple[Pattern, ...] = ()

    @property
    def kernels(self) -> list[Kernel]:
        """Return all kernels, in the order in which they were added."""
        self._add_builtin_kernels()
        return self._kernels

    @property
    def patterns(self) -> Sequence[Pattern]:  # type: ignore[override]  # read-only: what the kernels say
        """Return the patterns that find calls for them."""
        self._add_builtin_kernels()
        return self._patterns

    def _add_builtin_kernels(self) -> None:
        builtin_kernels, self._builtin_kernels = self._builtin_kernels, None
        if builtin_kernels is not None:
            self.add(builtin_kernels())

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Add kernels; a manifest's `replace` removes the kernels of earlier sources.

        Raises: ValueError if the symbol already has a kernel of the same name.
        """
        all_kernels = list(self._kernels)
        for kernel in kernels:
            if kernel.entry.replaces:
                all_kernels = [each for each in all_kernels if not _is_replaced(each, kernel)]
            is_duplicate = any(
                each.target.symbol is kernel.target.symbol and each.name == kernel.name for each in all_kernels
            )
            check(
                not is_duplicate,
                lambda kernel=kernel: (
                    f"{self.name}: kernel {kernel.name} of {kernel.target.symbol.id} is there already"
                ),
            )
            all_kernels.append(kernel)
        self._kernels = all_kernels
        self._by_symbol = {}
        verdict = None if self.verifier is None else self.verifier.verdict
        for kernel in in_order(all_kernels):
            self._by_symbol.setdefault(kernel.target.symbol.id, []).append(
                implementation(kernel, verdict, checked=self.checked, faster=self.faster)
            )
        self._patterns = _patterns_in_order(
            {kernel.pattern for kernel in all_kernels if isinstance(kernel.pattern, Pattern)}
        )

    def without_speed_hints(self) -> "HubExecutor":
        """Return the same kernels without their speed hints, for callers that select the executor by timing."""
        same = HubExecutor(self.name, self.verifier, checked=self.checked, faster=False)
        same.add(self.kernels)
        return same

    def candidates(self, symbol: Symbol) -> list[Implementation]:
        """Return the kernels of a symbol, in the order in which they are tried."""
        self._add_builtin_kernels()
        return self._by_symbol.get(symbol.id, [])

    def identity(self) -> str | Declined:
        """Return the kernels' hashes, whether each kernel is verified, and whether constraints are checked."""
        if not self.kernels:
            return ""
        verified = None if self.verifier is None else self.verifier.identity(self.kernels)
        if isinstance(verified, Declined):
            return verified
        rows = []
        for kernel in self.kernels:
            if kernel.extension is not None:
                return decline(f"kernel {kernel.name} is a class's, and what it loads is known to this process only")
            subject = fingerprint(kernel)
            if not subject.is_lasting:
                return decline(f"kernel {kernel.name} is known to this process only")
            rows.append((subject.digest, kernel.builtin))
        return repr([self.checked, self.faster, verified, rows])

    def fingerprint(self, implementation: Implementation) -> Fingerprint:
        """Return the fingerprint of its kernel."""
        kernels = (each for each in self.kernels if each.name == implementation.name)
        return fingerprint(next(each for each in kernels if each.target.symbol.id == implementation.symbol.id))

    def named_functions(self) -> Iterator[tuple[tuple[str, ...], Callable]]:
        """Yield the functions of each kernel, by the kernel's symbol and name and by the function's role."""
        for kernel in self.kernels:
            for role in ("function", "forward", "backward"):
                function = getattr(kernel, role)
                if function is not None:
                    yield (kernel.target.symbol.id, kernel.name, role), function


def _is_replaced(earlier: Kernel, kernel: Kernel) -> bool:
    return earlier.target.symbol is kernel.target.symbol and earlier.origin != kernel.origin


def in_order(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return kernels in the order in which they are tried."""
    by_entry = {kernel.entry: kernel for kernel in kernels}
    return [by_entry[entry] for entry in candidates(by_entry)]


def _patterns_in_order(patterns: set[Pattern]) -> tuple[Pattern, ...]:
    """Return the patterns of repositories first, larger references before smaller ones, which they may contain; then
    the builtin ones in their order (a residual's add before a norm must not match a rotary embedding's)."""
    order = {each: index for index, each in enumerate(builtin.ALL)}
    return tuple(sorted(patterns, key=lambda each: (order.get(each, -1), -each.size, each.name)))
