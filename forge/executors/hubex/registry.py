"""The kernels of the process, and executors of others."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.extension import is_extension
from forge.executors.hubex.gather import Source, gather, operators
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.listing import KernelTable, table_of
from forge.executors.hubex.operators import PATTERN
from forge.executors.hubex.shipped import shipped
from forge.executors.hubex.verification.verdicts import Verifier, verifier
from forge.executors.registry import register_executor
from forge.hub import Policy
from forge.hub.lockfile import Lock
from forge.hub.manifest import KernelEntry
from forge.hub.manifest.errors import did_you_mean
from forge.ir import check
from forge.ir.printing import qualified_name
from forge.patterns import Pattern

hubex = register_executor(HubExecutor("hub", verifier, later=lambda: shipped(verifier.trust)), default=True, first=True)


def use_kernels(
    sources: Sequence[Source],
    *,
    lock: Lock | str | None = None,
    policy: Policy | None = None,
    allow_imports: Sequence[str] = (),
    verify: bool = True,
) -> None:
    """Makes kernels known to the process: whatever is jitted from now on uses them where they fit.

    sources: as forge.jit(kernels=…). verify: whether each is compared with its reference before it is used; False
    trusts it. allow_imports: modules that these kernels may import beyond those that the Hub's rules allow.
    Raises HubError, ManifestError or TypeError; then none of them was added.
    """
    kernels = gather(sources, lock=lock, policy=policy, allow_imports=allow_imports)
    hubex.add(kernels)
    if not verify:
        verifier.trust(kernels)


def register_kernel(kernel: Any) -> Any:
    """Makes one kernel known to the process, and gives it back: a KernelExtension's class, an instance of one, or what
    forge.kernel made. It is asked, verified and listed as those of forge.use_kernels are; a class is not loaded before
    a call comes that it could take.

        @forge.register_kernel
        class Norm(forge.KernelExtension): ...

    Raises TypeError for anything else, or where the class lacks something; ManifestError with every problem of what it
    says; ValueError where its name is taken for the same operation. Then it was not registered.
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
    """An executor of these kernels alone. verify: whether, or by what, each is verified before it is used."""
    asked = verifier if verify is True else verify or None
    executor = HubExecutor("kernels", asked)
    executor.add(gather(sources, lock=lock, policy=policy, allow_imports=allow_imports))
    return executor


def kernels(sources: Sequence[Source] | None = None, *, op: str | Callable | None = None) -> KernelTable:
    """The kernels of the process, or of `sources`: what each is for, which calls it takes, and whether it was verified.

    op: those of one operator only: a torch function, its name, or "pattern:name". What is returned prints as a table.
    Raises ValueError for an operator that there is not, and what forge.use_kernels raises.
    """
    found = hubex.kernels if sources is None else gather(sources)
    if op is not None:
        _, found = of_operation(op, found)
    return table_of(found, verifier)


def of_operation(op: str | Callable | Pattern, kernels: Iterable[Kernel]) -> tuple[str, list[Kernel]]:
    """The name of an operator, and the kernels of it: by whichever of its names they are declared, as torch.add and
    aten::add.out. Raises ValueError where there is no such operator."""
    kernels = list(kernels)
    wanted = operation(op, kernels)
    named = [kernel for kernel in kernels if kernel.operation == wanted]
    target = named[0].target if named else None if wanted.startswith(PATTERN) else operators().target(wanted)
    if target is None:
        return wanted, named
    return wanted, [kernel for kernel in kernels if kernel.target.symbol is target.symbol]


def operation(op: str | Callable | Pattern, kernels: Iterable[Kernel]) -> str:
    """The name of an operator that these kernels, or others, may implement. Raises ValueError where there is none."""
    if isinstance(op, Pattern):
        return f"pattern:{op.name}"
    text = op if isinstance(op, str) else qualified_name(op) or repr(op)
    if any(kernel.operation == text for kernel in kernels):
        return text
    known = operators()
    signature = known.resolve(text)
    check(signature is not None, lambda: f"unknown operator {text!r}{did_you_mean(text, known.names())}")
    return text if text.startswith(PATTERN) else signature.name
