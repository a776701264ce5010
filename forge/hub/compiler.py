"""A program that compiles one library and loads it once: python compiler.py < request.json, run by forge.hub.build.

It is a separate process so that a library which aborts on loading does not abort forge. Of forge it imports
torch_internals alone, which starts nothing.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from forge.torch_internals.dispatch import destroy_library, dispatch_get_all_op_names


def main(request: dict[str, Any]) -> None:
    """Write the operators that the library registers beside it. Exits with the message of torch or of the compiler."""
    from torch.utils import cpp_extension  # imports setuptools, which nothing else in this program needs

    before = set(dispatch_get_all_op_names())
    try:
        cpp_extension.load(is_python_module=False, **request)
    except OSError as error:  # from loading it: the system's message is the cause
        sys.exit(f"{error.__cause__ or error}")
    except Exception as error:
        sys.exit(f"{error}")
    operators = sorted(set(dispatch_get_all_op_names()) - before)
    namespaces = sorted({name.partition("::")[0] for name in operators})
    file = request["name"] + cpp_extension.LIB_EXT
    output = {"file": file, "operators": operators, "namespaces": [*filter(is_defined, namespaces)]}
    Path(request["build_directory"], "output.json").write_text(json.dumps(output))


def is_defined(namespace: str) -> bool:
    """Return whether a library owns the namespace (TORCH_LIBRARY); only one library in a process may."""
    try:
        destroy_library(torch.library.Library(namespace, "DEF"))
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main(json.load(sys.stdin))
