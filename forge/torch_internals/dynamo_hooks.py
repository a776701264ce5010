"""Patch of Dynamo: the hooks by which transformers' models collect hidden states and attention weights.

transformers/utils/output_capturing.py installs them at the first call that asks for these results, under a lock, which
Dynamo does not enter: each layer of that model would run as a program of its own at every call.
"""

from typing import Any

from forge.torch_internals.dynamo import UserFunctionVariable, exc
from forge.torch_internals.patch import patch

_INSTALL = ("transformers.utils.output_capturing", "maybe_install_capturing_hooks")
_INSTALLED = "_output_capturing_hooks_installed"


@patch(
    UserFunctionVariable,
    "call_function",
    why="a model that is asked for hidden states installs hooks under a lock, which breaks the graph at each layer",
    issue="not reported: Dynamo enters no locks on purpose; transformers could install its hooks with the model",
    upstream="torch/_dynamo/variables/functions.py:1656@2.13.0, UserFunctionVariable.call_function",
    not_probed="tests/capture/test_output_capturing.py has programs, which need transformers",
)
def _call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Install the hooks of a model as its first call in eager would, and capture the frame again, with them."""
    if (self.fn.__module__, self.fn.__name__) == _INSTALL and args:
        model = getattr(args[0], "value", None)
        if model is not None and not getattr(model, _INSTALLED, False):
            self.fn(model)
            raise exc.RestartAnalysis(restart_reason="a model installs the hooks that collect its outputs")
    return _call_function.original(self, tx, args, kwargs)
