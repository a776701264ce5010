"""The versions of torch: which one runs, and which forge is tested with."""

import warnings

import torch

OLDEST, NEWEST = (2, 11), (2, 14)  # the whole test suite passes with both and with what is between; README.md says so


def parse(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


TORCH = parse(torch.__version__)


def warn_if_untested(version: tuple[int, int] = TORCH) -> None:
    """Says that torch is newer than what forge is tested with, where it is."""
    if version <= NEWEST:
        return
    shown, oldest, newest = (".".join(map(str, each)) for each in (version, OLDEST, NEWEST))
    warnings.warn(f"forge is tested with torch {oldest} to {newest}, and this is {shown}", stacklevel=3)
