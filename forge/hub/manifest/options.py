"""The options of a kernel that is declared in Python, as values: what a manifest's text cannot get wrong."""

from collections.abc import Mapping
from typing import Any

import torch

from forge.ir.checks import check, check_list

_TEXTS = {"where": "conditions", "faster": "conditions", "mutates": "the names of arguments", "result": "texts"}
_FUNCTIONS = ("assumes", "samples")


def check_options(name: str, fn: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError for the first option that is of a wrong kind, saying what came and what was wanted."""
    _check(fn, f"kernel {name}", callable(fn), "a function")
    _check_dtypes(options["dtypes"], f"kernel {name}: dtypes")
    if not isinstance(options["args"], (Mapping, type(None))):
        wanted = "arguments, or a mapping from the kernel's parameters to them"
        check_list(options["args"], f"kernel {name}: args", wanted)
    for option, what in _TEXTS.items():
        if not isinstance(options[option], (str, type(None))):
            check_list(options[option], f"kernel {name}: {option}", what)
    for option in _FUNCTIONS:
        given = options[option]
        _check(given, f"kernel {name}: {option}", given is None or callable(given), "a function")
    tolerance, library = options["tolerance"], options["library"]
    what = "a mapping from dtypes to [rtol, atol]"
    _check(tolerance, f"kernel {name}: tolerance", isinstance(tolerance, (Mapping, type(None))), what)
    _check(library, f"kernel {name}: library", isinstance(library, str), "text")


def _check_dtypes(given: Any, what: str) -> None:
    if given is None or isinstance(given, Mapping):
        return
    wanted = "dtypes, or a mapping from arguments to them"
    _check(given, what, not isinstance(given, torch.dtype), f"a list of {wanted}: [{given}]")
    check_list(given, what, wanted)
    _check(given, what, len(given) > 0, "a list of at least one dtype; left out, there is none that it must be")
    for i, each in enumerate(given):
        _check(each, f"{what}[{i}]", isinstance(each, (torch.dtype, str)), "a dtype")


def _check(given: Any, what: str, ok: bool, wanted: str) -> None:
    check(ok, lambda: f"{what} is {given!r}, but must be {wanted}", TypeError)
