"""The one function that raises a user's mistakes, and errors of others in one line."""

from collections.abc import Callable


def check(ok: bool, message: Callable[[], str], error: type[Exception] = ValueError) -> None:
    """Raises `error(message())` unless `ok`.

    The message is a lambda, so a passing check formats nothing. It names the op, the argument, what came,
    what was wanted and, where there is one, the way out.
    """
    if not ok:
        raise error(message())


def in_one_line(error: BaseException) -> str:
    """An error's type and the first line of what it says: what follows are frames of C++, or a compiler's output."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
