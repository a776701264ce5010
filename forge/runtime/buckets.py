"""The size of a bucket of gradients: the bytes that DistributedDataParallel sends together."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from forge.torch_internals.distributed import active_ddp_module

_override: ContextVar[tuple[int | None] | None] = ContextVar("forge_bucket_bytes", default=None)


def bucket_bytes() -> int | None:
    """Return the bucket size of the model whose forward is running; None outside of DistributedDataParallel's
    forward."""
    override = _override.get()
    if override is not None:
        return override[0]
    wrapper = active_ddp_module() if torch.distributed.is_available() else None
    return None if wrapper is None else int(wrapper.bucket_bytes_cap)


@contextmanager
def bucket_bytes_at(value: int | None) -> Iterator[None]:
    """Set bucket_bytes() to `value` in this context."""
    token = _override.set((value,))
    try:
        yield
    finally:
        _override.reset(token)
