"""Functions that raise for users' mistakes and for others' errors: in one line, without their frames."""

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any


def check(ok: bool, message: Callable[..., str], error: type[Exception] = ValueError) -> None:
    """Raise `error(message())` unless `ok`.

    The message is a lambda, so a passing check formats nothing. It names the op, the argument, the actual and the
    expected value and, if there is one, the remedy.
    """
    if not ok:
        raise error(message())


def check_list(value: Any, what: str, of: str) -> None:
    """Raise TypeError unless `value`, which the user knows as `what`, is a list or tuple: iterating a string would
    yield letters, and a function nothing."""
    advice = f": [{value!r}]" if isinstance(value, str) else ""
    requirement = f"must be a list of {of}{advice}"
    check(isinstance(value, (list, tuple)), lambda: f"{what} is {value!r}, but {requirement}", TypeError)


def check_flag(value: Any, what: str, choices: Sequence[bool | str | None] = (True, False)) -> None:
    """Raise TypeError unless `value`, which the user knows as `what`, is one of `choices`: 1 and "no" are not bools."""
    *others, last = (repr(each) for each in choices)
    listed = f"{', '.join(others)} or {last}"
    is_known = any(value is each or (isinstance(value, str) and value == each) for each in choices)
    check(is_known, lambda: f"{what} is {value!r}, but must be {listed}", TypeError)


def check_integer(value: Any, what: str, least: int, most: int | None = None) -> None:
    """Raise TypeError unless `value`, which the user knows as `what`, is an integer, and ValueError unless it is
    from `least` to `most`."""
    requirement = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    check(is_integer, lambda: f"{what} is {value!r}, but must be {requirement}", TypeError)
    fits = least <= value and (most is None or value <= most)
    check(fits, lambda: f"{what} is {value!r}, but must be {requirement}")


def check_number(value: Any, what: str, requirement: str = "a positive number", *, zero: bool = False) -> None:
    """Raise TypeError unless `value`, which the user knows as `what`, is a real number, and ValueError unless it is
    finite and positive. zero: whether it may be zero."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    check(is_number, lambda: f"{what} is {value!r}, but must be {requirement}", TypeError)
    fits = math.isfinite(value) and (value > 0 or (zero and value == 0))
    check(fits, lambda: f"{what} is {value!r}, but must be {requirement}")


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, with the next one after a line that ends in a colon;
    the rest is frames of C++, or a compiler's output, of which the first error is included."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    compilers = next((line.rpartition(" error: ")[2] for line in lines[count:] if ": error: " in line), None)
    messages = [" ".join(lines[:count]), *([] if compilers is None else [compilers])] if lines else []
    return ": ".join([type(error).__name__, *messages])


def without_frames(error: BaseException) -> None:
    """Drop the frames of a stored error, and of its causes: they keep the program's objects alive."""
    errors = [error]
    for each in errors:
        each.__traceback__ = None
        errors += [one for one in (each.__cause__, each.__context__) if one is not None and one not in errors]
