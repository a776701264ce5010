import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import forge


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = nn.Sequential(*[Block(16) for _ in range(3)])
names = list(model.state_dict())
for i, block in enumerate(model):
    model[i] = fully_shard(forge.jit(block), mp_policy=policy)
fully_shard(model, mp_policy=policy)

torch.manual_seed(dist.get_rank())
model(torch.randn(8, 16)).square().mean().backward()
gradient = model[0].up.weight.grad
norm = gradient.full_tensor().norm()
saved = get_model_state_dict(model)
if dist.get_rank() == 0:
    print(f"gradient {gradient.placements} {gradient.dtype}, norm {norm:.2f}")
    print("the names of a checkpoint are the model's:", list(saved) == names)
dist.destroy_process_group()
