"""The versions of torch: which one runs, and which forge is tested with."""

import warnings

import torch

# The whole test suite was run with 2.13, most of it with 2.11, 2.14 and 2.15. README.md has the range.
OLDEST, NEWEST = (2, 11), (2, 15)


def parse(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


TORCH = parse(torch.__version__)

# Exceptions of torch for complex numbers where it wants real ones or the other way round, and for a wrong option.
WRONG_KIND, WRONG_OPTION = (TypeError, ValueError) if TORCH >= (2, 15) else (RuntimeError, RuntimeError)


def warn_if_untested(version: tuple[int, int] = TORCH) -> None:
    """Warn where torch is newer than what forge is tested with."""
    if version <= NEWEST:
        return
    current, oldest, newest = (".".join(map(str, each)) for each in (version, OLDEST, NEWEST))
    text = f"forge is tested with torch {oldest} to {newest}, and this is {current}"
    warnings.warn(text, stacklevel=4)  # where a name of forge is first used
