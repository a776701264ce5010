"""The functions that `forge` exports, and the backend of torch.compile.

Start with jit.py (forge.jit); functional.py has trace, grad and vjp, backend.py the entry that Dynamo calls.
"""

from forge import executors
from forge.compiler.standalone import claim

vars(executors)["claim"] = claim  # its public name, forge.executors.claim: that package is below the compiler
