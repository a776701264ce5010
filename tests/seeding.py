"""Random numbers of the tests."""

import torch


def seed(value: int) -> None:
    """Seed the generators of the CPU and of CUDA devices.

    torch.manual_seed formats the stack for each kind of device that was not used yet (torch.cuda._lazy_call), which
    would be a third of the time of the OpInfo tests.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
