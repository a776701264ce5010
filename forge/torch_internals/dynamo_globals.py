"""Globals of functions whose module cannot be imported by its name: code that exec made, a module that was loaded
without sys.modules, or one that another has taken the place of.

Dynamo finds the globals of a function that it inlines by importing the module that they name. Such a module's it finds
here: by an object that reads them.
"""

import sys
from types import ModuleType
from typing import Any

from forge.torch_internals.dynamo import AttrSource, GlobalSource, InliningInstructionTranslator, VariableBuilder
from forge.torch_internals.patch import Scope, patch


class _Scope(ModuleType):
    """A module whose attributes are the globals of functions."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(str(names.get("__name__")))
        vars(self)["_names"] = names

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("__dict__").get("_names", {})
        return names[name] if name in names else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_names"][name] = value

    def __delattr__(self, name: str) -> None:
        del vars(self)["_names"][name]


@patch(
    InliningInstructionTranslator,
    "get_globals_source_and_value",
    why="the globals of a function whose module is not in sys.modules are another module's, or not found",
    issue="https://github.com/pytorch/pytorch/issues/181243",
    upstream="torch/_dynamo/symbolic_convert.py:6164@2.13.0, get_globals_source_and_value",
    before=(2, 14),
)
def _globals(self: InliningInstructionTranslator, name: str) -> tuple:
    """Return the place of a global of a function that Dynamo inlines: (the module, its variable, the source)."""
    module = sys.modules.get(self.f_globals.get("__name__", ""))
    if getattr(module, "__dict__", None) is self.f_globals:
        return _globals.original(self, name)
    scopes = vars(self.output).setdefault("_forge_scopes", {})  # by the id of the globals, which each keeps
    if id(self.f_globals) not in scopes:
        scopes[id(self.f_globals)] = _Scope(self.f_globals)
    scope = scopes[id(self.f_globals)]
    source = GlobalSource(self.output.install_global_by_id("__scope", scope))
    return scope, VariableBuilder(self, source)(scope), AttrSource(source, name)
