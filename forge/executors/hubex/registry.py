"""The process-wide kernels, and executors of other kernels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forge.executors.hubex.builtin import builtin_kernels
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.extension import is_extension
from forge.executors.hubex.gather import Source, gather, operators
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.listing import KernelTable, table_of
from forge.executors.hubex.operators import PATTERN
from forge.executors.hubex.verification.verification_cache import Verifier, verifier
from forge.executors.registry import register_executor
from forge.hub import Policy
from forge.hub.lockfile import Lock
from forge.hub.manifest import KernelEntry
from forge.hub.manifest.errors import did_you_mean
from forge.ir import check
from forge.ir.printing import qualified_name
from forge.patterns import Pattern

hubex = register_executor(HubExecutor("hub", verifier, builtin_kernels=lambda: builtin_kernels(verifier.trust)))


def use_kernels(
    sources: Sequence[Source],
    *,
    lock: Lock | str | None = None,
    policy: Policy | None = None,
    allow_imports: Sequence[str] = (),
    verify: bool = True,
) -> None:
    """Register kernels for the whole process: functions that are jitted from now on use them where they fit.

    Args:
        sources: Kernels as forge.jit(kernels=...) takes them.
        lock: A lockfile, or its path, that fixes the revision and hash of each repository.
        policy: The publishers that are trusted, and other rules of loading.
        allow_imports: Modules that these kernels may import beyond the Hub's rules.
        verify: Compare each kernel with its reference before it is used.

    Raises:
        HubError, ManifestError, TypeError: If a source cannot be used; none of the kernels is then registered.
    """
    kernels = gather(
        sources, lock=lock, policy=policy, allow_imports=allow_imports, argument="forge.use_kernels: sources"
    )
    hubex.add(kernels)
    if not verify:
        verifier.trust(kernels)


def register_kernel(kernel: Any) -> Any:
    """Register one kernel for the whole process and return it.

    The kernel is offered, verified and listed as those of forge.use_kernels are. A class is not loaded before the
    first call that it could take.

        @forge.register_kernel
        class Norm(forge.KernelExtension): ...

    Args:
        kernel: A subclass of KernelExtension, an instance of one, or a result of forge.kernel.

    Raises:
        TypeError: For another object, or a class that lacks a required attribute.
        ManifestError: With every problem of the declaration.
        ValueError: If another kernel of the operation has the name. The kernel is then not registered.
    """
    check(
        is_extension(kernel) or isinstance(kernel, (Kernel, KernelEntry)),
        lambda: (
            f"forge.register_kernel: {kernel!r} is no KernelExtension and nothing that forge.kernel made; "
            "forge.use_kernels takes repositories, folders and manifests"
        ),
        TypeError,
    )
    hubex.add(gather([kernel]))
    return kernel


def kernel_executor(
    sources: Sequence[Source],
    *,
    lock: Lock | str | None = None,
    policy: Policy | None = None,
    allow_imports: Sequence[str] = (),
    verify: bool | Verifier = True,
) -> HubExecutor:
    """Return an executor of these kernels only. verify: whether kernels are verified before use, or the verifier."""
    choice = verifier if verify is True else verify or None
    executor = HubExecutor("kernels", choice)
    executor.add(gather(sources, lock=lock, policy=policy, allow_imports=allow_imports, argument="forge.jit: kernels"))
    return executor


def kernels(sources: Sequence[Source] | None = None, *, op: str | Callable | None = None) -> KernelTable:
    """Return a table of kernels: the operator of each, the calls that it takes, and whether it was verified.

    Args:
        sources: Kernels as forge.jit(kernels=...) takes them; None for the kernels of the process.
        op: Restrict the table to one operator: a torch function, its name, or "pattern:name".

    Returns:
        The table, which prints as text; its rows stand in the order in which kernels are tried.

    Raises:
        ValueError: For an unknown operator.
        HubError, ManifestError, TypeError: As forge.use_kernels.
    """
    selection = hubex.kernels if sources is None else gather(sources, argument="forge.kernels: sources")
    if op is not None:
        _, selection = of_operation(op, selection, "forge.kernels")
    return table_of(selection, verifier)


def of_operation(op: str | Callable | Pattern, kernels: Iterable[Kernel], caller: str) -> tuple[str, list[Kernel]]:
    """Return the name of an operator and its kernels, under whichever alias they are declared, as torch.add and
    aten::add.out. Raises ValueError, which names the caller, for an unknown operator."""
    kernels = list(kernels)
    operation = _operation(op, kernels, caller)
    matches = [kernel for kernel in kernels if kernel.operation == operation]
    target = matches[0].target if matches else None if operation.startswith(PATTERN) else operators().target(operation)
    if target is None:
        return operation, matches
    return operation, [kernel for kernel in kernels if kernel.target.symbol is target.symbol]


def _operation(op: str | Callable | Pattern, kernels: Iterable[Kernel], caller: str) -> str:
    """Return the name under which these or other kernels may implement an operator."""
    if isinstance(op, Pattern):
        return f"pattern:{op.name}"
    text = op if isinstance(op, str) else qualified_name(op) or repr(op)
    if any(kernel.operation == text for kernel in kernels):
        return text
    resolver = operators()
    signature = resolver.resolve(text)
    if signature is None:
        advice = did_you_mean(text, resolver.names()) or "; name a torch function, an aten overload or 'pattern:NAME'"
        raise ValueError(f"{caller}: unknown operator {text!r}{advice}")
    return text if text.startswith(PATTERN) else signature.name
