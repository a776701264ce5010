"""The choice of the build of a kernel that fits this system, with the reason against each of the others."""

from collections.abc import Iterable
from dataclasses import dataclass

from forge.hub import compat
from forge.hub.errors import HubError

BACKENDS = ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu")  # those that metadata may name


@dataclass(frozen=True)
class Choice:
    """The result of a choice. accepted: names of the variants that fit, the best first. rejected: (name, reason) of the
    others."""

    accepted: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]


def choose(names: Iterable[str], backend: str | None = None) -> Choice:
    """Sort variants by the Hub's rule: cpu and os exact, torch's minor version exact, a stable ABI not newer than
    torch, the same CUDA major and no newer minor; stable ABI first, then torch, no-arch, torch-universal.

    Raises: HubError for a backend that this torch does not have.
    """
    parsed, rejected = {}, []
    for name in sorted(set(names)):
        try:
            variant = compat.parse_variant(name)
        except ValueError as error:
            rejected.append((name, f"not the name of a variant: {error}"))
        else:
            parsed[id(variant)] = (name, variant)
    try:
        decisions = compat.decide_variants([variant for _, variant in parsed.values()], backend)
    except ValueError as error:
        raise HubError(f"backend={backend!r}: {error}") from error
    decided = {parsed[id(variant)][0]: reason for variant, reason in decisions}
    rejected += [(name, "the library does not offer it here") for name, _ in parsed.values() if name not in decided]
    rejected += [(name, reason) for name, reason in decided.items() if reason is not None]
    return Choice(tuple(name for name, reason in decided.items() if reason is None), tuple(rejected))


def describe(rejected: Iterable[tuple[str, str]]) -> str:
    """Return one indented line for each rejected variant."""
    lines = [f"\n  {name}: {reason}" for name, reason in rejected]
    return "".join(lines or ["\n  there is none; the place of one is build/<variant>/"])
