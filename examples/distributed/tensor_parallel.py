import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forge


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
model = forge.jit(parallelize_module(MLP(16), mesh, plan))

x = torch.randn(8, 16)  # the same in both processes
model(x).square().mean().backward()
gradient = model.gate.weight.grad
norm = gradient.full_tensor().norm()
trace, backward = forge.last_traces(model)[0], forge.last_backward_traces(model)[0]
if dist.get_rank() == 0:
    print(f"gradient {gradient.placements}, {list(gradient.to_local().shape)} here, norm {norm:.3f}")
    print([bound.symbol.id for bound in trace.bound_symbols])
dist.destroy_process_group()
