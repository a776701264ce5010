import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forge

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
wrapped = DistributedDataParallel(forge.jit(model))
optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)

torch.manual_seed(dist.get_rank())  # each process has data of its own
batches = [torch.randn(8, 16) for _ in range(3)]
for x in batches:
    optimizer.zero_grad()
    loss = (wrapped(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach_(), dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print(f"loss {loss.item() / 2:.3f}, gradient {model[0].weight.grad.norm():.3f}")
told = forge.explain(wrapped)
if dist.get_rank() == 0:
    print("graph breaks:", len(told.graph_breaks), "opaque calls:", told.opaque_calls)
dist.destroy_process_group()
