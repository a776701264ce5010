"""Python processes that forge starts: what they import is what this process would, and nothing that lies where it runs.

Neither the current folder nor a relative entry of a path is searched, no folder of this process's path runs its
sitecustomize.py at their start, and forge is the one that started them.
"""

import json
import os
import sys
from pathlib import Path

_PATHS = "PATH PYTHONPATH PYTHONPYCACHEPREFIX PYTHONUSERBASE LD_LIBRARY_PATH DYLD_LIBRARY_PATH".split()
_FORGE = str(Path(__file__).parents[2])
_BOOT = "import sys; import json; sys.path[:] = json.loads(sys.argv.pop(1)); import runpy; "
_MODULE = _BOOT + "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_FILE = _BOOT + "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as a program."""
    return [*_python(_MODULE), name, *arguments]


def run_file(path: str) -> list[str]:
    """Return the command that runs a file as a program; what lies beside it is not imported."""
    return [*_python(_FILE), path]


def _python(boot: str) -> list[str]:
    return [sys.executable, "-P", "-c", boot, json.dumps(search_path())]


def search_path() -> list[str]:
    """Return this process's module search path, without entries that depend on the current folder, and with forge's
    own."""
    paths = [each for each in sys.path if os.path.isabs(each)]
    return paths if _FORGE in paths else [*paths, _FORGE]


def environment() -> dict[str, str]:
    """Return this process's environment, without the relative entries of the paths in which programs, modules and
    libraries are found; an empty one is the current folder, too."""
    variables = dict(os.environ)
    for name in _PATHS:
        if name in variables:
            variables[name] = os.pathsep.join(filter(os.path.isabs, variables[name].split(os.pathsep)))
    return variables
