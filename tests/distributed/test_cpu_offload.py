"""Parameters offloaded to host memory: gathered on the device, their gradients reduced there and copied back."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed
from distributed_programs import Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import forge
from forge import prims
from forge.compiler.passes import MESSAGES
from forge.distributed import ShardPolicy, shard
from forge.torchlang.host_copies import _stream
from forge.transforms import bucket_collectives
from forge.transforms.collective_schedule import find_parameters

HOST, DEVICE = torch.device("cpu"), torch.device("cuda:0")
_GROUP = 2, "group", None


def test_messages_are_on_the_device_and_results_where_the_policy_has_them() -> None:
    def step(part: Any) -> Any:
        whole = prims.unshard(part, 8, torch.bfloat16, DEVICE, None, _GROUP, None)
        return prims.reduce_to_shard(prims.sin(whole), 4, torch.float32, HOST, torch.float32, _GROUP)

    trace = forge.trace(step, torch.empty(4, 3))
    messages = bucket_collectives(trace, find_parameters(trace), MESSAGES)
    devices = {bound.symbol.name.rpartition(".")[2]: bound.output[0].device for bound in messages.bound_symbols[:2]}
    devices |= {bound.symbol.name.rpartition(".")[2]: bound.output[0].device for bound in messages.bound_symbols[3:]}
    assert devices == {
        "start_unshard": DEVICE,
        "finish_unshard": DEVICE,
        "start_reduce": HOST,  # the memory that it fills
        "finish_reduce": HOST,
    }


def test_messages_of_several_devices_are_apart() -> None:
    def gather(x: Any, y: Any) -> Any:
        parts = zip((x, y), (HOST, DEVICE), strict=True)
        return [prims.unshard(part, 8, torch.float32, device, None, _GROUP, None) for part, device in parts]

    trace = forge.trace(gather, torch.empty(4, 3), torch.empty(4, 3))
    messages = bucket_collectives(trace, find_parameters(trace), MESSAGES).bound_symbols
    assert sum(bound.symbol is MESSAGES.start_unshard for bound in messages) == 2


def test_a_policy_that_is_no_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="cpu_offload is 'cpu', but must be a bool"):
        ShardPolicy(cpu_offload="cpu")  # type: ignore[arg-type]


# on a GPU, a group of one process copies like any other


def _train(model: Any, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator, results = torch.Generator().manual_seed(0), []
    for step in range(2 * steps):
        tokens = torch.randint(32, (2, 8), generator=generator).cuda()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        results.append(loss.detach().cpu())
        if step % 2:  # gradients accumulate
            results += [each.grad.to_local().cpu() for each in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return results


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("mixed", [True, False], ids=["bfloat16", "float32"])
def test_training_gives_what_it_gives_without(jitted: bool, mixed: bool, nccl: None) -> None:
    torch.manual_seed(0)
    mesh, model, trained = init_device_mesh("cuda", (1,)), Llama(), []
    for offload in (False, True):
        policy = ShardPolicy(
            bucket_mb=0.004,
            prefetch_mb=0.004,
            cpu_offload=offload,
            param_dtype=torch.bfloat16 if mixed else None,
            reduce_dtype=torch.float32 if mixed else None,
        )
        sharded = shard(copy.deepcopy(model), mesh, policy)
        trained.append(_train(forge.jit(sharded) if jitted else sharded))
        for parameter in sharded.parameters():
            assert parameter.device.type == ("cpu" if offload else "cuda")
            assert parameter.to_local().is_pinned() is offload
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-4)  # Adam on CPUs rounds differently


def test_parameters_may_change_once_a_forward_ended(nccl: None) -> None:
    """The process waits for copies from host memory, to which an optimizer or a checkpoint may write."""
    torch.manual_seed(0)
    wide = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    model = forge.jit(shard(wide, init_device_mesh("cuda", (1,)), ShardPolicy(cpu_offload=True, bucket_mb=16)))
    x = torch.ones(1, 2048, device="cuda")
    with torch.no_grad():
        expected = model(x).clone()
        parts = [each.to_local() for each in model.parameters()]
        kept = [part.clone() for part in parts]
        for _ in range(5):
            with torch.cuda.stream(_stream(x.device, "upload")):
                torch.cuda._sleep(10**8)  # copies start later than the process would go on
            found = model(x)
            for part in reversed(parts):  # the last is copied last
                part.zero_()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            for part, values in zip(parts, kept, strict=True):
                part.copy_(values)
