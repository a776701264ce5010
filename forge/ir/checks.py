"""The functions that raise a user's mistakes, and errors of others: in one line, without their frames."""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any


def check(ok: bool, message: Callable[..., str], error: type[Exception] = ValueError) -> None:
    """Raise `error(message())` unless `ok`.

    The message is a lambda, so a passing check formats nothing. It names the op, the argument, what came,
    what was wanted and, where there is one, the way out.
    """
    if not ok:
        raise error(message())


def check_list(value: Any, what: str, of: str) -> None:
    """Raise TypeError where `value`, which the user knows as `what`, is not a list or tuple: a string is a list of
    letters, and a function of nothing."""
    advice = f": [{value!r}]" if isinstance(value, str) else ""
    requirement = f"must be a list of {of}{advice}"
    check(isinstance(value, (list, tuple)), lambda: f"{what} is {value!r}, but {requirement}", TypeError)


def check_flag(value: Any, what: str, choices: Sequence[bool | str | None] = (True, False)) -> None:
    """Raise TypeError where `value`, which the user knows as `what`, is none of `choices`: 1 and "no" are no bools."""
    *others, last = (repr(each) for each in choices)
    listed = f"{', '.join(others)} or {last}"
    is_known = any(value is each or (isinstance(value, str) and value == each) for each in choices)
    check(is_known, lambda: f"{what} is {value!r}, but must be {listed}", TypeError)


def check_integer(value: Any, what: str, least: int, most: int | None = None) -> None:
    """Raise TypeError where `value`, which the user knows as `what`, is no integer, and ValueError where it is none
    from `least` to `most`."""
    requirement = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    check(is_integer, lambda: f"{what} is {value!r}, but must be {requirement}", TypeError)
    fits = least <= value and (most is None or value <= most)
    check(fits, lambda: f"{what} is {value!r}, but must be {requirement}")


def check_number(value: Any, what: str, requirement: str = "a positive number", *, zero: bool = False) -> None:
    """Raise TypeError where `value`, which the user knows as `what`, is no real number, and ValueError where it is not
    finite and positive. zero: whether it may be zero."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    check(is_number, lambda: f"{what} is {value!r}, but must be {requirement}", TypeError)
    fits = math.isfinite(value) and (value > 0 or (zero and value == 0))
    check(fits, lambda: f"{what} is {value!r}, but must be {requirement}")


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the first line of what it says, with those that end in a colon the next one: what
    follows are frames of C++, or a compiler's output, of which the first error is given."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    compilers = next((line.rpartition(" error: ")[2] for line in lines[count:] if ": error: " in line), None)
    messages = [" ".join(lines[:count]), *([] if compilers is None else [compilers])] if lines else []
    return ": ".join([type(error).__name__, *messages])


def without_frames(error: BaseException) -> None:
    """Let go of the frames of an error that is kept, and of those that it came of: they hold what the program held."""
    errors = [error]
    for each in errors:
        each.__traceback__ = None
        errors += [one for one in (each.__cause__, each.__context__) if one is not None and one not in errors]
