"""forge.load_kernel: a kernel to call directly, with the same checks as in a compiled model."""

from collections.abc import Callable, Sequence
from typing import Any

from forge import clang, hub
from forge.api.functional import Direct
from forge.capture.direct import input_tensors
from forge.compiler.report import CompileReport
from forge.executors.hubex import HubExecutor, Kernel, Source, gather, hubex, verifier
from forge.executors.hubex.registry import of_operation
from forge.executors.registry import unknown
from forge.hub.manifest import Checker, no_kernel
from forge.ir import check, set_language
from forge.patterns import Pattern


class LoadedKernel:
    """The kernels of one operator, called like the operator: the first that accepts a call runs it and its gradient.

    Attributes:
        kernels: Names in order of priority.
    """

    def __init__(self, op: str, kernels: list[Kernel], force: bool) -> None:
        self.op = op
        self._symbol = kernels[0].target.symbol
        executor = HubExecutor("kernels", None if force else verifier, checked=not force, faster=False)
        executor.add(kernels)
        self.kernels = [each.name for each in executor.candidates(self._symbol) if each.name is not None]
        self._by_name = {kernel.name: kernel for kernel in kernels}
        self._direct = Direct(self._call, [executor, "torch"])

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with set_language(clang.language):
            return self._symbol(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator on real tensors. Raises NotImplementedError with each kernel's reason if none accepts
        them."""
        executable, report = self._direct.compile(args, kwargs)
        if {claim.executor for claim in report.claims}.isdisjoint(self.kernels):
            reasons = {name: self._reasons(name, report, args, kwargs) for name in self.kernels}
            raise NotImplementedError(no_kernel(self.op, args, kwargs, reasons))
        return executable.call(*input_tensors(args, kwargs))

    def _reasons(self, name: str, report: CompileReport, args: tuple, kwargs: dict) -> list[str]:
        """Return every constraint that fails, else the kernel's other reason to decline."""
        kernel = self._by_name[name]
        unusable = kernel.unusable()
        if unusable is not None:
            return [unusable]
        declined = [reason for claim in report.claims for who, reason in claim.declined if who == name]
        failures = Checker(kernel.entry, kernel.signature).failures(**kernel.bind(args, kwargs))
        return failures or list(dict.fromkeys(declined))

    def __repr__(self) -> str:
        return f"<kernels of {self.op}: {', '.join(self.kernels)}>"


def load_kernel(
    op: str | Callable | Pattern,
    name: str | None = None,
    *,
    force: bool = False,
    kernels: Sequence[Source] | None = None,
    allow_imports: Sequence[str] = (),
) -> LoadedKernel:
    """Return the kernels of an operator as a callable with the operator's own arguments.

    Args:
        op: A torch function, its name, or "pattern:name".
        name: The name of one kernel, alone or as "library.name". By default, each call runs the kernel of the highest
            priority that accepts it.
        force: Skip the constraints, the verification and the availability check of each kernel. A kernel that cannot
            be loaded is still left out.
        kernels: Sources, as forge.jit takes them; by default the kernels of the process (forge.use_kernels).
        allow_imports: Modules that the kernels may import beyond the Hub's rules.

    Returns:
        A callable that runs the first kernel that accepts a call, and raises if none does.

    Raises:
        ValueError: For an unknown operator or name.
        KernelImportError: If `force` is set and no kernel can be loaded; it carries the reason of each.
    """
    available = (
        list(hubex.kernels)
        if kernels is None
        else gather(kernels, allow_imports=allow_imports, argument="forge.load_kernel: kernels")
    )
    operation, matches = of_operation(op, available, "forge.load_kernel")
    ops = {kernel.operation for kernel in available}
    check(bool(matches), lambda: f"forge.load_kernel: there is no kernel of {operation}; {_there_are(ops)}")
    if name is not None:
        names = [kernel.entry.name for kernel in matches]
        matches = [kernel for kernel in matches if name in (kernel.name, kernel.entry.name)]
        check(bool(matches), lambda: f"forge.load_kernel: {operation}: {unknown('kernel', name, names)}")
    return LoadedKernel(operation, _load_all(matches) if force else matches, force)


def _load_all(kernels: list[Kernel]) -> list[Kernel]:
    reasons = {kernel.name: kernel.load() for kernel in kernels}
    usable = [kernel for kernel in kernels if reasons[kernel.name] is None]
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    check(bool(usable), lambda: f"forge.load_kernel: {listed}", hub.KernelImportError)
    return usable


def _there_are(ops: set[str]) -> str:
    return f"there are kernels of {', '.join(sorted(ops))}" if ops else "forge.use_kernels([...]) adds some"
