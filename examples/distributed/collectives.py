import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import forge

dist.init_process_group("gloo")
mean = forge.jit(lambda x: (functional.all_reduce(x * x, "sum", dist.group.WORLD) / 2).sqrt())
x = torch.full((3,), dist.get_rank() + 1.0, requires_grad=True)
result = mean(x)
result.sum().backward()
if dist.get_rank() == 0:
    print(result.tolist(), x.grad.tolist())
    print([bound.symbol.id for bound in forge.last_traces(mean)[0].bound_symbols])
dist.destroy_process_group()
