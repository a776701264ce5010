"""A process group of one process: what collectives return in it needs no other process, no thread and no network."""

from functools import cache
from typing import Any

import torch

from forge.torch_internals.distributed import make_fake_group, process_group, register_group

_NAME: Any = "forge_group_of_one"  # a str, for which newer stubs of torch have a type of their own


@cache
def _group() -> "torch.distributed.ProcessGroup":
    """Return the group, which torch refers to weakly."""
    return make_fake_group(_NAME)


def group_of_one() -> str:
    """Return the name under which torch knows the group, beside any that the program has.

    It is made on first use, and registered again where it has to be: ``torch.distributed.destroy_process_group``
    forgets every group, also those that it did not make.
    """
    if process_group(_NAME) is None:
        register_group(_NAME, _group())
    return _NAME
