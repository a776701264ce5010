"""Facts about a program's values from the fake tensors of Dynamo's graph: aliasing, layout and gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from forge import torchlang
from forge.capture.aliasing import Pair
from forge.compiler.kernel_strides import in_row_major_order
from forge.compiler.program import EagerFallback, Unsupported
from forge.ir import TensorProxy, current_trace, short_type, strides_of
from forge.ir.pytree import leaves, tree_map
from forge.ir.source import Source
from forge.ir.strides import is_expanded
from forge.prims.recurrent import KINDS
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket
from forge.torch_internals.tensors import storage_id

CHECK_META = False  # compare every value's metadata with Dynamo's fake value: an oracle for tests and for debugging

# operators whose kernels and fake implementations return different strides: for all operands, and for operands
# that are not row-major
_LAID_OUT_BY_KERNELS = frozenset((*KINDS, "log_sigmoid", "isin", "normal", "poisson", "rrelu", "_standard_gamma"))
_TURNED_BY_KERNELS = frozenset(
    "_log_softmax_backward_data binary_cross_entropy channel_shuffle hardsigmoid_backward hardswish_backward "
    "hardtanh_backward index_fill max_pool1d max_unpool2d native_dropout one_hot softplus_backward".split()
)


def fresh(example: Any) -> Any:
    """Return a pytree of fake tensors with a new proxy for each."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return current_trace().tensor(leaf.shape, leaf.dtype, leaf.device, strides=tuple(leaf.stride()))
        return leaf

    return tree_map(make, example)


def tensor_proxy(name: str, value: torch.Tensor) -> TensorProxy:
    """Return the proxy of an input."""
    return TensorProxy(
        name,
        tuple(value.shape),
        value.dtype,
        value.device,
        requires_grad=value.requires_grad,
        strides=strides_of(value),
        offset=value.storage_offset(),
    )


def is_laid_out_by_kernel(node: Node, example: torch.Tensor) -> bool:
    """Return whether torch's kernel may return other strides than the fake implementation: it is a known one, an index
    is not contiguous, or a row-major result was computed from an expanded tensor and from one that is not row-major."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _LAID_OUT_BY_KERNELS:
        return True
    read = [each.meta.get("example_value") for each in node.all_input_nodes]
    operands = [each for each in read if isinstance(each, torch.Tensor)]
    if all(map(in_row_major_order, operands)):
        return False
    if name.partition(".")[0] in _TURNED_BY_KERNELS:
        return True
    if name == "getitem":
        return any(not each.is_contiguous() for each in operands[1:])
    return (
        any(map(is_expanded, operands))
        and in_row_major_order(example)
        and any(not is_expanded(each) and not in_row_major_order(each) for each in operands)
    )


def is_batch_norm(node: Node) -> bool:
    """Return whether a node calls batch_norm."""
    return getattr(node.target, "__name__", "") == "batch_norm"


def ends_gradients(function: Any, operands: Sequence[Pair], example: Any) -> bool:
    """Return whether a Python function returns results without a history although arguments have one. For an operator
    only its kernel knows: the fake implementation has no part in autograd."""
    if isinstance(function, (OpOverload, OpOverloadPacket)) or not torch.is_grad_enabled():
        return False
    results = [leaf for leaf in leaves(example) if isinstance(leaf, torch.Tensor)]
    return any(fake.requires_grad for _, fake in operands) and not any(each.requires_grad for each in results)


def makes_tensors(example: Any) -> bool:
    """Return whether a result has tensors."""
    if isinstance(example, (tuple, list)):
        return any(makes_tensors(item) for item in example)
    return isinstance(example, torch.Tensor)


def memory_of(fake: torch.Tensor) -> int:
    """Return the identity of a fake tensor's storage."""
    return storage_id(fake)


def fake_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the fake tensors of a pytree."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def shares_memory(node: Node, example: Any) -> bool | None:
    """Return whether the first output aliases the first argument, from Dynamo's fake tensors."""
    first = example[0] if isinstance(example, (tuple, list)) and example else example
    base = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(first, torch.Tensor) or not isinstance(base, torch.Tensor):
        return None
    return memory_of(first) == memory_of(base)


def compare_meta(node: Node, proxy: TensorProxy, example: torch.Tensor) -> None:
    """Raise Unsupported if the known sizes of forge's meta function differ from torch's, EagerFallback if the
    dtype differs: Dynamo may have written its own into the graph (`y.to(x.dtype)`), so the frame must run in eager.

    With CHECK_META, unknown sizes and the device are compared too (AssertionError)."""
    sizes = zip(proxy.shape, example.shape, strict=False)
    sizes_match = all(ours == theirs for ours, theirs in sizes if type(ours) is type(theirs) is int)
    if not sizes_match or proxy.ndim != example.ndim or proxy.dtype != example.dtype:
        ours, theirs = short_type(proxy), short_type(example)
        reason = f"{torchlang.function_name(node.target)} gives {theirs}, but forge's symbol {ours}"
        unsupported = Unsupported(reason, "correct the symbol's meta function or decomposition")
        raise unsupported if proxy.dtype == example.dtype else EagerFallback(unsupported, Source.of(node))
    if CHECK_META:
        own, dynamos = (short_type(proxy), proxy.device), (short_type(example), example.device)
        assert own == dynamos, f"{node.format_node()}: forge says {own}, Dynamo says {dynamos}"
