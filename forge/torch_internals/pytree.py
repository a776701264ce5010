"""Torch's pytrees."""

from torch.utils import _pytree as torch_pytree
