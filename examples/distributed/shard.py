import torch
import torch.distributed as dist
from torch import nn

import forge
from forge.distributed import ShardPolicy, shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
policy = ShardPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, bucket_mb=0.01)
model = nn.Sequential(*[Block(16) for _ in range(3)])
model = forge.jit(shard(model, policy=policy))

torch.manual_seed(dist.get_rank())
model(torch.randn(8, 16)).square().mean().backward()
gradient = model[0].up.weight.grad
norm = gradient.full_tensor().norm()
if dist.get_rank() == 0:
    print(f"gradient {gradient.placements} {gradient.dtype}, norm {norm:.2f}")
    for traces in (forge.last_traces(model), forge.last_backward_traces(model)):
        text = str(traces[-1])
        print(f"{text.count('start_unshard(')} messages gather, {text.count('start_reduce(')} reduce")
dist.destroy_process_group()
