"""Fake tensors."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject as FakeScriptObject
from torch._subclasses import fake_impls as fake_impls
from torch._subclasses import fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.meta_utils import MetaTensorDescriber

from forge.torch_internals.patch import Replaced


def call_on_fake_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors, of any dtype that its kernel takes.

    torch's fake implementation of a grouped product takes bfloat16 alone, and pads rows as the kernel does only in a
    build for CUDA (torch/_meta_registrations.py:8611@2.13.0, _meta_grouped_mm_common).
    """
    if func is torch.ops.aten._grouped_mm.default:
        return _fake_grouped_mm(*args, **kwargs)
    return func(*args, **kwargs)


def _fake_grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any) -> torch.Tensor:
    """Source: create_grouped_gemm_output_tensor (aten/src/ATen/native/GroupedMMUtils.h)."""
    rows, columns = a.shape[-2], b.shape[-1]
    width = columns + -columns % (16 // a.element_size())
    if a.ndim != b.ndim:
        return a.new_empty_strided((rows, columns), (width, 1))
    groups = a.shape[0] if offs is None else offs.shape[0]
    return a.new_empty_strided((groups, rows, columns), (rows * width, width, 1))


def meta_tensors_on(device: torch.device) -> AbstractContextManager[None]:
    """Have the fake tensors that stand for meta tensors be on a device: Dynamo captures the program of that device."""
    describe = MetaTensorDescriber.describe_tensor

    def describe_on_device(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        description = describe(self, tensor, **options)
        return dataclasses.replace(description, device=device) if description.device.type == "meta" else description

    return Replaced(MetaTensorDescriber, "describe_tensor", describe_on_device)
