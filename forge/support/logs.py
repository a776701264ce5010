"""forge's loggers, and FORGE_LOGS, which says which of them write to stderr: `FORGE_LOGS=capture,+claim`.

Each is in Python's own tree, below "forge", and quiet unless a program configures it, for INFO too. A name writes what
a user may want to know (DETAIL, between DEBUG and INFO), a name with a plus everything (DEBUG); "all" is every one.

    capture      graph breaks, recompiles, what runs in eager
    compile      each compiled graph: its operations by executor, its seconds by stage
    claim        who runs each call; with a plus, who declined it and why
    cache        programs on disk
    select       what was measured of candidates
    inductor, nvfuser, cuda_graphs, hub    these executors
"""

import difflib
import logging
import os
import sys
import warnings

NAMES = ("capture", "compile", "claim", "cache", "select", "inductor", "nvfuser", "cuda_graphs", "hub")
VARIABLE = "FORGE_LOGS"
DETAIL = 15

capture, compile, claim = (logging.getLogger(f"forge.{name}") for name in NAMES[:3])


def set_up(setting: str) -> None:
    """Have the loggers that are named write to stderr. A name that there is not is a warning."""
    for word in filter(None, (each.strip() for each in setting.split(","))):
        name, level = word.lstrip("+"), logging.DEBUG if word.startswith("+") else DETAIL
        if name != "all" and name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            advice = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(NAMES)}, all"
            warnings.warn(f"{VARIABLE}: forge has no log {name!r}{advice}", stacklevel=2)
            continue
        log = logging.getLogger("forge" if name == "all" else f"forge.{name}")
        log.setLevel(level)
        _write(log)


def _write(log: logging.Logger) -> None:
    if any(isinstance(each, _Stderr) for each in log.handlers):
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    log.addHandler(handler)
    log.propagate = False


class _Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is when it writes."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, stream: object) -> None:
        """Ignore an assignment: the stream is looked up at each use."""


set_up(os.environ.get(VARIABLE, ""))
