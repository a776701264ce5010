"""Per-thread state of recording: the current trace, and the language of operators."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Recorder(Protocol):
    """The target of recorded symbol calls: a trace (forge/ir/trace.py)."""

    tags: frozenset[Any]

    def record(self, bound: Any) -> None:
        """Append a call to the innermost open scope."""

    def open_scope(self) -> list[Any]:
        """Open a scope and return its list: calls recorded until `close_scope` go there."""

    def close_scope(self) -> None: ...

    def set_tags(self, tags: Iterable[Any]) -> AbstractContextManager[None]:
        """Set the tags of calls recorded in this context to exactly `tags`."""

    @property
    def last_call(self) -> Any:
        """The last call recorded into the innermost open scope; None if there is none."""


class LanguageContext:
    """The meaning of `a + b`, `a.sum()` and `torch.f(a)` for proxies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.methods: dict[str, Callable[..., Any]] = {}
        self.call_torch_function: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"LanguageContext({self.name})"


class _State(threading.local):
    trace: Recorder | None = None
    language: LanguageContext | None = None


state = _State()


def recorder() -> Recorder:
    """Return the recorder of symbol calls. Raises RuntimeError outside of a trace."""
    if state.trace is None:
        raise RuntimeError("a forge symbol was called outside of a trace; use forge.trace(fn, *args) or forge.jit(fn)")
    return state.trace


@contextmanager
def set_language(language: LanguageContext) -> Iterator[None]:
    """Give operators and methods on proxies the meaning of `language` in this context."""
    before = state.language
    state.language = language
    try:
        yield
    finally:
        state.language = before
