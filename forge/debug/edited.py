"""forge.jit(edit=folder): write the programs that run to files; the text of an edited file runs instead of the
generated text."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from forge.executors import FusionExecutor
from forge.ir import Trace
from forge.ir.printing import INSIDE, compile_function
from forge.support import logs

_HEAD = "# Edit this file: it runs in place of what forge generated, for as long as forge generates the same.\n"


class EditError(RuntimeError):
    """An edited program is not valid Python or does not define its function."""


def apply_edits(trace: Trace, folder: str | os.PathLike[str]) -> tuple[Callable, Trace]:
    """Return the callable of a trace, and the trace, with the text of the file if that was edited.

    The file's name has the program's name and a hash of the generated text, regions' calls included, so that an edited
    file never applies to another program. Raises EditError, and OSError if the file cannot be read or written.
    """
    code = trace.python_source()
    text, scope = trace.as_file(lambda bound: isinstance(bound.symbol.executor, FusionExecutor))
    inside = [line for line in text.splitlines() if line.startswith(INSIDE)]
    digest = hashlib.sha256("\n".join([*code.lines, *inside]).encode()).hexdigest()[:10]
    path = Path(folder) / f"{trace.name}-{digest}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_HEAD + text)
    content = path.read_text()
    if content == _HEAD + text:
        return compile_function(trace.name, code), trace
    try:
        exec(compile(content, str(path), "exec"), scope)
    except Exception as error:
        raise EditError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    function = scope.get(trace.name)
    if not callable(function):
        raise EditError(f"{path} defines no function {trace.name!r}, but must")
    logs.compile.warning("forge: %s runs in place of what was generated", path)
    trace = trace.derive(str(path), trace.bound_symbols)
    trace.text = content
    return function, trace
