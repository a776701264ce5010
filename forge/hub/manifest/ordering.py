"""The order of several kernels of one operator, and the detection of duplicates."""

from collections.abc import Hashable, Iterable, Iterator

from forge.hub.manifest.errors import Problem
from forge.hub.manifest.model import KernelEntry
from forge.support.dtypes import dtype_name


def candidates(entries: Iterable[KernelEntry]) -> list[KernelEntry]:
    """Sort the kernels in the order in which they are tried: by priority, then the more specific first, then as
    declared."""
    return sorted(entries, key=lambda entry: (-entry.priority, -entry.specificity))


def duplicates(entries: Iterable[KernelEntry]) -> Iterator[Problem]:
    """Yield a problem for each kernel with the same inputs or name as an earlier one of its library."""
    by_inputs: dict[Hashable, KernelEntry] = {}
    by_name: dict[Hashable, KernelEntry] = {}
    for entry in entries:
        first = by_inputs.setdefault((entry.library, entry.op, _inputs(entry)), entry)
        if first is not entry:
            yield Problem(
                entry.mark,
                f"duplicate kernel for {entry.op}: {_location(first, entry)} and {_location(entry, entry)} "
                "accept the same inputs; constrain one, or give them different priorities",
            )
            continue
        first = by_name.setdefault((entry.library, entry.op, entry.name), entry)
        if first is not entry and not (first.kernel_name == first.name and entry.kernel_name == entry.name):
            text = f"the name {entry.name!r} is taken by the kernel at {_place(first, entry)}"
            yield Problem(entry.mark, f"{text} of {entry.op}")


def _location(entry: KernelEntry, beside: KernelEntry) -> str:
    return f"{entry.name!r} ({_place(entry, beside)})"


def _place(entry: KernelEntry, beside: KernelEntry) -> str:
    file = "" if entry.mark.file == beside.mark.file else f"{entry.mark.file}, "
    return f"{file}line {entry.mark.line}"


def _inputs(entry: KernelEntry) -> Hashable:
    """Return the inputs that a kernel accepts, independent of the names of its aliases."""
    numbers: dict[str | None, int] = {None: -1}
    dtypes = tuple(
        (name, frozenset(map(dtype_name, alias.dtypes)), numbers.setdefault(alias.name, len(numbers)))
        for name, alias in sorted(entry.dtypes.items())
    )
    orders = tuple(
        (name, alias.orders, numbers.setdefault(alias.name, len(numbers)))
        for name, alias in sorted(entry.orders.items())
    )
    shape = tuple((name, str(pattern)) for name, pattern in sorted(entry.shape.items()))
    where = frozenset(condition.text for condition in entry.where)
    return entry.priority, entry.device, dtypes, orders, entry.optional, shape, where
