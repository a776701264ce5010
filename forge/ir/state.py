"""What is being recorded, and in which language operators are read, per thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.ir.trace import Trace


class LanguageContext:
    """Decides what `a + b`, `a.sum()` and `torch.f(a)` mean while the operands are proxies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.methods: dict[str, Callable] = {}
        self.call_torch_function: Callable | None = None

    def __repr__(self) -> str:
        return f"LanguageContext({self.name})"


class _State(threading.local):
    trace: "Trace | None" = None
    language: LanguageContext | None = None


state = _State()


def current_trace() -> "Trace":
    """The trace that symbol calls record into. Raises RuntimeError outside of one."""
    if state.trace is None:
        raise RuntimeError("a forge symbol was called outside of a trace; use forge.trace(fn, *args) or forge.jit(fn)")
    return state.trace


@contextmanager
def recording(trace: "Trace", language: LanguageContext | None = None) -> Iterator["Trace"]:
    """Symbol calls inside record into `trace`; operators on proxies have `language`'s meaning."""
    before = state.trace, state.language
    state.trace, state.language = trace, language or state.language
    try:
        yield trace
    finally:
        state.trace, state.language = before


@contextmanager
def speaking(language: LanguageContext) -> Iterator[None]:
    """Operators and methods on proxies have `language`'s meaning inside."""
    before = state.language
    state.language = language
    try:
        yield
    finally:
        state.language = before
