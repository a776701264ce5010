"""The Hub executor: kernels of the Hugging Face Kernel Hub, and a user's own, as implementations of forge's symbols."""

from collections.abc import Sequence

from forge.executors.executor import register_executor
from forge.executors.hubex.gather import Source, gather, operators
from forge.executors.hubex.kernels import HubExecutor, Kernel
from forge.executors.hubex.said import kernel
from forge.executors.hubex.verify import Verifier, verifier, verify_all
from forge.hub import Policy
from forge.hub.lockfile import Lock
from forge.ir import Symbol

hubex = register_executor(HubExecutor("hub", verifier.verdict), default=True, first=True)


def use_kernels(
    sources: Sequence[Source],
    *,
    lock: Lock | str | None = None,
    policy: Policy | None = None,
    verify: bool = True,
) -> None:
    """Makes kernels known to the process: whatever is jitted from now on uses them where they fit.

    sources: as forge.jit(kernels=…). verify: whether each is compared with its reference before it is used; False
    trusts it. Raises HubError, ManifestError or TypeError; then none of them was added.
    """
    kernels = gather(sources, lock=lock, policy=policy)
    hubex.add(kernels)
    if not verify:
        verifier.trust(kernels)


def kernel_executor(
    sources: Sequence[Source],
    *,
    lock: Lock | str | None = None,
    policy: Policy | None = None,
    verify: bool | Verifier = True,
) -> HubExecutor:
    """An executor of these kernels alone. verify: whether, or by what, each is verified before it is used."""
    asked = verifier if verify is True else verify or None
    executor = HubExecutor("kernels", asked and asked.verdict)
    executor.add(gather(sources, lock=lock, policy=policy))
    return executor


def kernels_of(symbol: Symbol) -> list[Kernel]:
    """The kernels that the process has for a symbol."""
    return [kernel for kernel in hubex.kernels if kernel.target.symbol is symbol]


__all__ = [
    "HubExecutor",
    "Kernel",
    "Verifier",
    "gather",
    "hubex",
    "kernel",
    "kernel_executor",
    "kernels_of",
    "operators",
    "use_kernels",
    "verifier",
    "verify_all",
]
