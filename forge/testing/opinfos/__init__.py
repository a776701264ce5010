"""Every OpInfo, by family. Importing this registers those of every file beside it."""

import importlib
import pkgutil

import torch

from forge.testing.opinfo import add_dtype
from forge.testing.opinfos.complex import DIFFERENTIATED

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
add_dtype(DIFFERENTIATED, torch.complex64)
