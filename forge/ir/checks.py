"""The one function that raises a user's mistakes."""

from collections.abc import Callable


def check(ok: bool, message: Callable[[], str], error: type[Exception] = ValueError) -> None:
    """Raises `error(message())` unless `ok`.

    The message is a lambda, so a passing check formats nothing. It names the op, the argument, what came,
    what was wanted and, where there is one, the way out.
    """
    if not ok:
        raise error(message())
