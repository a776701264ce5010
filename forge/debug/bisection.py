"""forge.bisect: find the transform, executor or kernel that makes a jitted function differ from eager."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.capture.handles import handle_of
from forge.debug.eager_check import copy_as_leaf, differs, largest, same_random_numbers, tolerance
from forge.executors.errors import CheckError
from forge.executors.registry import resolve_executors
from forge.ir.checks import in_one_line
from forge.torch_internals.pytree import torch_pytree


@dataclass(frozen=True)
class Difference:
    """The result of forge.bisect.

    Attributes:
        kind: "none" (no difference), "transform", "executor", "executors" (only in combination), or "forge" (capture,
            a decomposition, or one of forge's passes).
        name: The name of the transform or the executor.
        how: The first value that differs, or the error that eager does not raise.
        call: The first call whose result differs, as check="eager" reports it, or None.
    """

    kind: str
    name: str | None = None
    how: str | None = None
    call: str | None = None

    def __str__(self) -> str:
        if self.kind == "none":
            return "forge.bisect: results and gradients are eager's"
        who = f"the {self.kind} {self.name} makes" if self.name else f"{self.kind} make"
        who = "forge's own capture, decompositions or passes make" if self.kind == "forge" else who
        return f"forge.bisect: {who} the difference: {self.how}{f'{chr(10)}  {self.call}' if self.call else ''}"


def bisect(jitted: Any, *args: Any, **kwargs: Any) -> Difference:
    """Return the transform or executor that makes results or gradients for these inputs differ from eager.

    The target is jitted again with torch alone, then with each transform added, then with each executor added. The
    compared gradients are those of the sum of all results, with respect to inputs and parameters that require them.
    A module is copied for each run.

    Args:
        jitted: A result of forge.jit.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The name of the transform or executor, and the first difference that it makes.

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
    """
    again = handle_of(jitted, "forge.bisect").again
    assert again is not None, "forge.jit sets it"
    target, options = again.args[0], again.keywords
    bisected = _BisectionTarget(target, args, kwargs)
    executors = list(resolve_executors(options["executors"]))
    others = {"cache": False, "check": None}

    def variant(transforms: Sequence[Any], executors: Sequence[Any] | None, **more: Any) -> Callable[[Any], Any]:
        settings = {**options, **others, "transforms": transforms, "executors": executors, **more}
        settings = settings if executors != ["torch"] else {**settings, "kernels": (), "layers": ()}
        return lambda target: again.func(target, **settings)

    every = list(options["transforms"])
    how = bisected.differs(variant(every, options["executors"]))
    if how is None:
        return Difference("none")
    plain = bisected.differs(variant((), ["torch"]))
    if plain is not None:
        return Difference("forge", None, plain, bisected.call(variant((), ["torch"], check="eager")))
    for count in range(1, len(every) + 1):
        difference = bisected.differs(variant(every[:count], ["torch"]))
        if difference is not None:
            call = bisected.call(variant(every[:count], ["torch"], check="eager"))
            return Difference(
                "transform", getattr(every[count - 1], "__name__", repr(every[count - 1])), difference, call
            )
    for executor in [each for each in executors if each.name != "torch"]:
        difference = bisected.differs(variant(every, [executor, "torch"]))
        if difference is not None:
            call = bisected.call(variant(every, [executor, "torch"], check="eager"))
            return Difference("executor", executor.name, difference, call)
    return Difference("executors", None, how, bisected.call(variant(every, options["executors"], check="eager")))


class _BisectionTarget:
    """A target with inputs, and its results in eager."""

    def __init__(self, target: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._target = target
        self._inputs = args, kwargs
        self._expected = self._run(lambda target: target)

    def differs(self, jit: Callable[[Any], Any]) -> str | None:
        """Describe the difference of the compiled target's results from eager's; return None if there is none. An error
        is a difference, since eager raised none."""
        try:
            actual = self._run(jit)
        except Exception as error:
            return f"it raises {in_one_line(error)}"
        around = largest(self._expected.values())
        within = tolerance(each.dtype for each in self._expected.values())
        for name, expected in self._expected.items():
            reason = "missing" if name not in actual else differs(actual[name], expected, within, around)
            if reason is not None:
                return f"{name} is {reason}"
        return None

    def call(self, jit: Callable[[Any], Any]) -> str | None:
        """Return the first call that differs, or None if a comparison of each call finds none."""
        try:
            self._run(jit)
        except CheckError as error:
            return str(error)
        except Exception:  # `differs` reported it
            return None
        return None

    def _run(self, jit: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        """Return results and gradients by name."""
        target = copy.deepcopy(self._target) if isinstance(self._target, torch.nn.Module) else self._target
        args, kwargs = torch_pytree.tree_map_only(torch.Tensor, copy_as_leaf, self._inputs)
        with same_random_numbers():
            leaves = torch_pytree.tree_leaves(jit(target)(*args, **kwargs))
        results = [each for each in leaves if isinstance(each, torch.Tensor)]
        by_name = {f"result {index}": each.detach() for index, each in enumerate(results)}
        inputs = {f"of input {i}": each for i, each in enumerate(torch_pytree.tree_leaves((args, kwargs)))}
        inputs |= dict(target.named_parameters()) if isinstance(target, torch.nn.Module) else {}
        inputs = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor) and each.requires_grad}
        sums = [each.sum() for each in results if each.requires_grad]
        if inputs and sums:
            grads = torch.autograd.grad(sum(sums[1:], sums[0]), list(inputs.values()), allow_unused=True)
            by_name |= {f"gradient {name}": grad for name, grad in zip(inputs, grads, strict=True) if grad is not None}
        return by_name
