"""Fake tensors."""

from torch._library.fake_class_registry import FakeScriptObject as FakeScriptObject
from torch._subclasses import fake_impls as fake_impls
from torch._subclasses import fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
