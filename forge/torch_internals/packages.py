"""Packages of exported programs: their archives, and what runs those of AOTInductor."""

import torch
from torch.export.pt2_archive._package import PT2ArchiveWriter as PackageWriter

RunnerOfCpu = torch._C._aoti.AOTIModelContainerRunnerCpu
RunnerOfCuda = getattr(torch._C._aoti, "AOTIModelContainerRunnerCuda", None)  # in builds for CUDA
