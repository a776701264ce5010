"""The random numbers of DTensors on devices whose generators have an offset: each process draws from its part's offset,
so that all parts together equal the draw of a single process.

Source: torch.distributed.tensor's OffsetBasedRNGTracker.
"""

import torch

from forge.ir import Dim
from forge.torch_internals.distributed import sync_generators

_before: dict[torch.device, int] = {}  # the offset of a generator before the draw of a part


def part_offsets(numel: Dim, part_numel: Dim, index: int) -> tuple[Dim, Dim]:
    """Return the generator offsets of the beginning of a part and of the end of the whole."""
    return _whole_blocks(part_numel * index), _whole_blocks(numel)


def _whole_blocks(count: Dim) -> Dim:
    return (count + 3) // 4 * 4  # a generator on a GPU draws four numbers at once


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a GPU."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = torch.get_device_module(device).default_generators[index]
    return generator


def begin_partial_draw(device: torch.device, offset: int) -> None:
    """Move a device's generator to an offset, that of this process's part."""
    sync_generators(device.type)
    generator = generator_of(device)
    _before[device] = generator.get_offset()
    generator.set_offset(_before[device] + offset)


def end_partial_draw(device: torch.device, offset: int) -> None:
    """Move a device's generator to an offset, behind all parts, relative to the beginning of the draw."""
    generator_of(device).set_offset(_before.pop(device) + offset)
