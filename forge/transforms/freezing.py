"""The weights of a frozen program (forge.jit(freeze=True)): constant inputs, and a record of those folded or not."""

from collections.abc import Collection
from dataclasses import dataclass, field

from forge.ir import BoundSymbol, Trace
from forge.transforms.fold_constants import independent_calls
from forge.transforms.makers import Makers

_KINDS = ("_weight", "_bias", "_running_mean", "_running_var")


@dataclass
class Freezing:
    """State of freezing one program. `weights` names the inputs that are constant until someone changes them.
    `folds` records what was folded, `misses` what was not, and why."""

    weights: Collection[str]
    folds: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def calls(self, trace: Trace) -> list[BoundSymbol]:
        """Return the calls that depend on weights and constants alone."""
        return independent_calls(trace, self.weights)

    def values(self, trace: Trace) -> set[str]:
        """Return the names of the weights, of constants, and of the values computed from them alone."""
        return {*self.weights, *trace.constants, *(name for bound in self.calls(trace) for name in bound.outputs)}

    def owner(self, name: str, makers: Makers) -> str:
        """Return the user's name for the layer that a value belongs to, by the first weight that it depends on."""
        while name not in self.weights and (bound := makers.calls.get(name)) is not None and bound.inputs:
            name = bound.inputs[0]
        for kind in _KINDS:
            name = name.removesuffix(kind)
        return name
