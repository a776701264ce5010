"""A training step of Llama 70B on many GPUs, simulated by one process without any."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge.distributed import ShardPolicy, fake_processes, shard, simulate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
parser.add_argument("--layers", type=int, default=80)
parser.add_argument("--tokens", type=int, default=4096, help="of the one sequence of each rank")
parser.add_argument("--bucket-mb", type=float)
parser.add_argument("--prefetch-mb", type=float)
arguments = parser.parse_args()

config = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=arguments.layers,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    use_cache=False,
)
policy = ShardPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    bucket_mb=arguments.bucket_mb,
    prefetch_mb=arguments.prefetch_mb,
)
for ranks in arguments.ranks:
    with fake_processes(ranks):
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            tokens = torch.empty(1, arguments.tokens, dtype=torch.int64)
        jitted = forge.jit(shard(model, policy=policy))
        print(simulate(jitted, kwargs={"input_ids": tokens, "labels": tokens}))
