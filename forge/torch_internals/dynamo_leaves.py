"""Patches of Dynamo: intermediate tensors that are asked for gradients, as inputs of checkpointed layers are.

wav2vec 2.0's encoders and models with adapters do so, for torch.utils.checkpoint to differentiate layers behind frozen
ones. No gradient of a graph depends on it: the tensor is a leaf that nothing else reads. The graph is broken where the
caller would see the leaf or its gradient, or a result that requires gradients through it alone.
"""

from functools import partial
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    BuiltinVariable,
    ConstantVariable,
    TensorVariable,
    builtin,
    exc,
    wrap_fx_proxy,
)
from forge.torch_internals.dynamo import register_hook_op as _HOOK
from forge.torch_internals.patch import patch

_ISSUE = "https://github.com/pytorch/pytorch/issues/112087"
_WHY = "requires_grad_() on an intermediate tensor breaks the graph, and with it the frames around"
_HAS_CLASSES = hasattr(builtin, "SetAttrBuiltinVariable")  # of each builtin function
_BREAKS = "_forge_breaks_at_leaves"
_LEAVES = "_forge_leaves"


@patch(
    TensorVariable,
    "method_requires_grad_",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/tensor.py:2107@2.13.0, TensorVariable.method_requires_grad_",
)
def _requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
    """Replace the tensor by a leaf that shares its memory."""
    is_on = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
    example = self.as_proxy().node.meta["example_value"]
    is_new = is_on and not example.requires_grad and (example.is_floating_point() or example.is_complex())
    if not is_new or self.source or getattr(tx.speculation_log, _BREAKS, False):
        return _requires_grad_.original(self, tx, requires_grad)
    proxy = tx.output.create_proxy("call_method", "detach", (self.as_proxy(),), {})
    leaf = example.detach().requires_grad_()
    vars(self).update(vars(wrap_fx_proxy(tx, proxy, example_value=leaf)) | {"mutation_type": self.mutation_type})
    _leaves_of(tx.output).append(leaf)
    return self


@patch(
    getattr(builtin, "SetAttrBuiltinVariable", BuiltinVariable),
    "_call_setattr" if _HAS_CLASSES else "call_setattr",
    why=_WHY,
    issue=_ISSUE,
    upstream="torch/_dynamo/variables/builtin.py:3351@2.13.0, SetAttrBuiltinVariable._call_setattr",
    not_probed=None if _HAS_CLASSES else "torch 2.11 caches handlers of builtins; test_leaves.py has a program",
)
def _setattr(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
    if obj.is_tensor() and name.is_python_constant() and name.as_python_constant() == "requires_grad":
        obj.method_requires_grad_(tx, value)
        return ConstantVariable.create(None)
    return _setattr.original(self, tx, obj, name, value)


def _leaves_of(output: Any) -> list[torch.Tensor]:
    """Return the leaves of a graph, whose results are checked from the first one on."""
    if _LEAVES not in vars(output):
        leaves: list[torch.Tensor] = []
        vars(output)[_LEAVES] = leaves
        output.compile_and_call_fx_graph = partial(_compile_and_call, output, leaves, output.compile_and_call_fx_graph)
    return vars(output)[_LEAVES]


def _compile_and_call(
    output: Any, leaves: list[torch.Tensor], original: Any, tx: Any, results: list, *args: Any
) -> Any:
    """Capture the graph again, broken at its leaves, if one of them or what requires gradients through them alone is
    seen outside of it."""
    observed = [each.as_proxy().node for each in results if each.is_tensor()]
    observed += [each.args[0] for each in output.graph.nodes if each.op == "call_function" and each.target is _HOOK]
    if any(_leaks(each.meta.get("example_value"), leaves) for each in observed):
        setattr(tx.speculation_log, _BREAKS, True)
        raise exc.RestartAnalysis(restart_reason="a result requires gradients through an intermediate tensor alone")
    return original(tx, results, *args)


def _leaks(example: Any, leaves: list[torch.Tensor]) -> bool:
    """Return whether a tensor is one of the leaves, or requires gradients through them alone."""
    if not isinstance(example, torch.Tensor) or not example.requires_grad:
        return False
    ours = {id(each) for each in leaves}
    if example.grad_fn is None:
        return id(example) in ours
    waiting, visited = [example.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if id(getattr(node, "variable", None)) not in ours and not node.next_functions:
            return False
        waiting += [each for each, _ in node.next_functions if each is not None]
    return True
