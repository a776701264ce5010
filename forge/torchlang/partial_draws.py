"""Random numbers of DTensors on devices whose generators have an offset: each process draws from where its part is in
the whole, so that all parts together are what one process would draw.

Source: torch.distributed.tensor's OffsetBasedRNGTracker.
"""

import torch

from forge.ir import Dim
from forge.torch_internals.distributed import sync_generators

_before: dict[torch.device, int] = {}  # the offset of a generator while a part is drawn


def part_offsets(numel: Dim, part_numel: Dim, index: int) -> tuple[Dim, Dim]:
    """Return the offsets of a generator at which the numbers of a part begin, and at which those of the whole end."""
    return _whole_blocks(part_numel * index), _whole_blocks(numel)


def _whole_blocks(count: Dim) -> Dim:
    return (count + 3) // 4 * 4  # a generator on a GPU draws four numbers at once


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a GPU."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = torch.get_device_module(device).default_generators[index]
    return generator


def begin_partial_draw(device: torch.device, offset: int) -> None:
    """Have a device's generator draw from an offset on: that of this process's part."""
    sync_generators(device.type)
    generator = generator_of(device)
    _before[device] = generator.get_offset()
    generator.set_offset(_before[device] + offset)


def end_partial_draw(device: torch.device, offset: int) -> None:
    """Move a device's generator to an offset from where the draw began: behind all parts."""
    generator_of(device).set_offset(_before.pop(device) + offset)
