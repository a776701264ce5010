"""Training engines over two processes, each with a model in eager and jitted: programs of
tests/distributed/test_engines.py, beside tests/distributed_programs.py.

Each program trains for some steps, evaluates, saves, trains on, loads what it saved and repeats the steps. It returns
the losses, the weights, the names that the engine saved, and forge's report on the jitted model.
"""

import contextlib
import copy
import functools
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as checkpoints
from distributed_programs import whole
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

WORDS, LENGTH = 32, 8

# the model


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return queries or keys of shape (batch, length, heads, width), rotated by their position."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (f(angles[: x.shape[1]]).unsqueeze(1) for f in (torch.cos, torch.sin))
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    """An attention with two heads of queries for each head of keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (_rotate(q, angles), _rotate(k, angles), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), angles))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A small Llama, whose weights and rotary angles `init_weights` makes, so that it may be built on the meta
    device."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = width // heads
        self.embeddings = nn.Embedding(WORDS, width)
        self.register_buffer("angles", self.make_angles(), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(width, heads, dropout) for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def make_angles(self) -> torch.Tensor:
        return torch.outer(torch.arange(LENGTH), 10_000.0 ** (-torch.arange(0, self.head, 2) / self.head))

    @torch.no_grad()
    def init_weights(self) -> None:
        torch.manual_seed(0)
        self.angles = self.make_angles()
        for name, parameter in self.named_parameters():
            nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def _model(**options: Any) -> Transformer:
    model = Transformer(**options)
    model.init_weights()
    return model


def _jit_blocks(model: nn.Module) -> nn.Module:
    layers = model.layers if hasattr(model, "layers") else model.model.layers
    for name, block in list(layers.named_children()):
        block = forge.jit(block)
        layers.register_module(name, block)
    return model


def _compile_blocks(model: nn.Module) -> nn.Module:
    """Compile the blocks like torchtitan, with forge's backend."""
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(block, backend="forge", fullgraph=True))
    return model


JITTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "model": forge.jit,
    "blocks": _jit_blocks,
    "torch.compile": _compile_blocks,
}


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def _rows(count: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [whole(each.detach()).clone() for each in model.parameters()]


def _compared(train: Callable[[Callable[[nn.Module], nn.Module]], tuple[dict[str, Any], Any]], jitted: str) -> Any:
    """Return the results of training a model in eager and a jitted one, and forge's report on the latter."""
    found = {}
    for name, jit in (("eager", lambda model: model), ("forge", JITTED[jitted])):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found[name], model = train(jit)
    told = forge.explain(model)
    return {
        **found,
        "graphs": told.graphs,
        "broken": told.graph_breaks + told.eager + told.skipped,
        "warned": [str(each.message) for each in warned if "forge" in str(each.message)],
        "regions": len(told.regions),
    }


@contextlib.contextmanager
def _launched(rank: int) -> Iterator[pytest.MonkeyPatch]:
    """Set the variables that torchrun sets."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, str(rank))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "2")
        for name, value in {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
            patch.setenv(name, value)
        yield patch


def _names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a file of safetensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return sorted(name for name in json.loads(data[8 : 8 + length]) if name != "__metadata__")


def _names_of(folder: Path) -> list[str]:
    """Return the names in a distributed checkpoint."""
    return sorted(checkpoints.FileSystemReader(folder).read_metadata().state_dict_metadata)


# Accelerate, and transformers' Trainer, which runs on it


def _reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@contextlib.contextmanager
def _accelerate(rank: int, *, sharded: bool) -> Iterator[None]:
    """Run Accelerate anew. sharded: make it use FSDP on a CPU, where it silently falls back to DistributedDataParallel,
    although torch supports both."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    prepare = AcceleratorState.__init__

    def prepare_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        prepare(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    with _launched(rank) as patch:
        if sharded:
            patch.setattr(AcceleratorState, "__init__", prepare_sharded)
        patch.setenv("ACCELERATE_USE_FSDP", "false")  # restored afterwards: Accelerate sets it
        _reset_accelerate()
        yield
        _reset_accelerate()


def accelerated(
    rank: int, folder: str, jitted: str, *, sharded: bool = False, mixed_precision: str = "no"
) -> dict[str, Any]:
    """Train with Accelerate: gradient accumulation, clipping, evaluation, and checkpoints, including dropout's
    generator. The last batch of one process is smaller."""
    import accelerate

    def train(jit: Callable) -> tuple[dict[str, Any], Any]:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TransformerBlock"],
        )
        with _accelerate(rank, sharded=sharded):
            accelerator = accelerate.Accelerator(
                cpu=True,
                gradient_accumulation_steps=2,
                mixed_precision=mixed_precision,
                fsdp_plugin=plugin if sharded else None,
                dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False),
            )
            return run(accelerator, jit)

    def run(accelerator: Any, jit: Callable) -> tuple[dict[str, Any], Any]:
        model = jit(_model(dropout=0.1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(_rows(22)), batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerate.utils.set_seed(rank)

        def epoch() -> list[Any]:
            found = []
            prepared.train()
            for (tokens,) in loader:
                with accelerator.accumulate(prepared):
                    loss = _loss(prepared, tokens)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        found.append(whole(accelerator.clip_grad_norm_(prepared.parameters(), 0.5)).item())
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
            prepared.eval()
            with torch.no_grad():
                found.append(accelerator.gather(_loss(prepared, _rows(4))).mean().item())
            return found

        losses = epoch()
        accelerator.save_state(folder)
        after = epoch()
        accelerator.load_state(folder)
        again = epoch()
        unwrapped = accelerator.unwrap_model(prepared)
        assert type(unwrapped).__name__.removeprefix("FSDP") == "Transformer"
        accelerator.save_model(prepared, folder)
        accelerator.wait_for_everyone()
        found = {
            "losses": losses,
            "after": after,
            "again": again,
            "weights": _weights(unwrapped),
            "sharded": [type(each).__name__ for each in unwrapped.layers.values()],
            "saved": [_names_in(Path(folder, "model.safetensors")), list(accelerator.get_state_dict(prepared))],
        }
        return found, prepared

    return _compared(train, jitted)


def refused_backend(rank: int) -> str:
    """Return Accelerate's error for a backend that it does not list."""
    import accelerate

    with _accelerate(rank, sharded=False), pytest.raises(ValueError) as found:
        accelerate.Accelerator(cpu=True, dynamo_backend="forge")
    return str(found.value)


def trained_by_trainer(
    rank: int, folder: str, jitted: str, *, sharded: bool = False, bf16: bool = False
) -> dict[str, Any]:
    """Train a Llama of transformers with its Trainer, which evaluates and saves meanwhile, and resume from the
    middle."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=WORDS, bos_token_id=None, eos_token_id=None, use_cache=False, attention_dropout=0.1
    )
    rows = [{"input_ids": row, "labels": row, "of no argument": row} for row in _rows(22)]
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.1,
        "adam_epsilon": 0.1,  # otherwise steps are as large for gradients that are only rounding error
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "bf16": bf16,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "accelerator_config": {"even_batches": False},
        "disable_tqdm": True,
        "report_to": [],
    }
    if sharded:
        options |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}

    def trained(jit: Callable, start: str | None = None) -> tuple[Any, list[Any]]:
        with _accelerate(rank, sharded=sharded):
            torch.manual_seed(0)
            model = jit(transformers.LlamaForCausalLM(config))
            trainer = transformers.Trainer(
                model,
                transformers.TrainingArguments(output_dir=folder, **copy.deepcopy(options)),
                train_dataset=rows,
                eval_dataset=rows[:8],
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=start)
            trainer.save_model(f"{folder}/final")
            torch.distributed.barrier()  # one process writes
        wanted = ("loss", "grad_norm", "eval_loss")
        logged = [entry[name] for entry in trainer.state.log_history for name in wanted if name in entry]
        return trainer, logged

    def train(jit: Callable) -> tuple[dict[str, Any], Any]:
        trainer, losses = trained(jit)
        resumed, again = trained(jit, f"{folder}/checkpoint-2") if jit is JITTED[jitted] else (trainer, losses)
        found = {
            "losses": losses,
            "after": [*losses, *_weights(trainer.model)],
            "again": [*again, *_weights(resumed.model)],
            "weights": _weights(trainer.model),
            "sharded": [type(each).__name__ for each in trainer.model.model.layers],
            "saved": [_names_in(Path(folder, place, "model.safetensors")) for place in ("checkpoint-4", "final")],
        }
        return found, trainer.model

    return _compared(train, jitted)


# Lightning


def trained_by_lightning(
    rank: int, folder: str, jitted: str, *, strategy: str = "ddp", precision: str = "32-true", inside: bool = True
) -> dict[str, Any]:
    """Train with Lightning's Trainer with batches of two sizes, evaluation and a checkpoint. inside: whether the module
    jits its model in `configure_model`; otherwise it is jitted itself."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategies = {
        "ddp": functools.partial(DDPStrategy, process_group_backend="gloo"),
        "fsdp2": functools.partial(
            ModelParallelStrategy, process_group_backend="gloo", data_parallel_size=2, tensor_parallel_size=1
        ),
    }

    class Module(lightning.LightningModule):
        def __init__(self, jit: Callable) -> None:
            super().__init__()
            self.model, self.jit, self.losses = _model(), jit, []

        def configure_model(self) -> None:
            jit, self.jit = self.jit, None
            if jit is None:  # it is called again
                return
            self.model = jit(self.model)
            if strategy == "fsdp2":
                for layer in self.model.layers.values():
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = _loss(self, batch[0])
            self.losses.append(loss.detach())
            self.log("loss", loss, sync_dist=True)
            return loss

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(jit: Callable, epochs: int, start: str | None = None) -> tuple[Any, Any]:
        module = Module(jit if inside else lambda model: model)
        module = module if inside else jit(module)
        loaders = [DataLoader(TensorDataset(_rows(count)), batch_size=4) for count in (22, 8)]
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy=strategies[strategy](),
            plugins=[TorchElasticEnvironment()],
            precision=precision,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, *loaders, ckpt_path=start)
        return trainer, module

    def names(path: Path) -> list[str]:
        return _names_of(path) if path.is_dir() else list(torch.load(path, weights_only=False)["state_dict"])

    def train(jit: Callable) -> tuple[dict[str, Any], Any]:
        path = f"{folder}/{jit.__name__}.ckpt"
        trainer, module = fit(jit, 2)
        again = module
        if jit is JITTED[jitted]:
            trainer, _ = fit(jit, 1)
            trainer.save_checkpoint(path)
            _, again = fit(jit, 2, path)
        else:
            trainer.save_checkpoint(path)
        count = len(again.losses) - 1  # the first of which is a check of the evaluation
        found = {
            "losses": torch.stack(module.losses).tolist(),
            "after": [*module.losses[-count:], *_weights(module)],
            "again": [*again.losses[1:], *_weights(again)],
            "weights": _weights(module),
            "sharded": [type(each).__name__ for each in module.model.layers.values()],
            "saved": names(Path(path)),
        }
        return found, module

    with _launched(rank):
        return _compared(train, jitted)


# torch's own wrappers


def _steps(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable, first: int) -> list[Any]:
    """Return the losses and norms of three steps."""
    found = []
    for step in range(first, first + 3):
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(100 * rank + step))
        loss = whole(_loss(model, tokens))
        loss.backward()
        found += [loss.item(), whole(clip()).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def fully_sharded(rank: int, folder: str, jitted: str) -> dict[str, Any]:
    """Train under FullyShardedDataParallel, with which Lightning's `fsdp`, which needs a GPU, wraps a model."""

    def train(jit: Callable) -> tuple[dict[str, Any], Any]:
        model = jit(_model())
        policy = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={type(model.layers["0"])}
        )  # as an engine finds the class by its name
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = _steps(rank, model, optimizer, lambda: model.clip_grad_norm_(0.5), 0)
        state = model.state_dict()
        found = {
            "losses": losses,
            "after": losses,
            "again": losses,
            "weights": list(state.values()),
            "sharded": [type(each).__name__ for each in model.layers.values()],
            "saved": list(state),
        }
        return found, model

    return _compared(train, jitted)


def collected(rank: int) -> bool:
    """Return whether a model whose blocks are jitted and sharded is freed."""
    import gc
    import weakref

    def weight() -> weakref.ref:
        model = _jit_blocks(_model())
        for layer in model.layers.values():
            fully_shard(layer)
        _loss(model, _rows(2)).backward()
        return weakref.ref(model.layers["0"].attention.q.weight)

    found = weight()
    gc.collect()
    return found() is None


# torchtitan's recipe


def _apply_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        "embeddings": rows(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": columns(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": columns() for name in "qkv"},
            "attention.o": rows(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.gate": columns(),
            "feed_forward.up": columns(),
            "feed_forward.down": rows(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def _apply_ac(model: nn.Module) -> None:
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def _apply_fsdp(model: nn.Module, mesh: DeviceMesh, **dtypes: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(**dtypes)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def titan(rank: int, folder: str, jitted: str, parallel: str, *, bf16: bool = False) -> dict[str, Any]:
    """Train in the order of torchtitan's recipe. parallel: tp, fsdp, or shard for forge.distributed.shard, whose eager
    counterpart is fully_shard."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}

    def built(jit: Callable | None) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            model: nn.Module = Transformer()
        if parallel == "tp":
            _apply_tp(model, mesh)
        _apply_ac(model)
        if jit is not None and jitted != "model":
            model = jit(model)
        if parallel == "fsdp" or (parallel == "shard" and jit is None):
            _apply_fsdp(model, mesh, **dtypes)
        elif parallel == "shard":
            policy = forge.distributed.ShardPolicy(**dtypes)
            model = forge.jit(forge.distributed.shard(model, mesh, policy))
        elif jit is not None and jitted == "model":
            model = jit(model)
        model.to_empty(device="cpu")
        model.init_weights()
        return model

    def train(jit: Callable) -> tuple[dict[str, Any], Any]:
        model = built(None if jit is not JITTED[jitted] else jit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.5, foreach=True)
        steps = functools.partial(_steps, 0 if parallel == "tp" else rank, model, optimizer, clip)
        with loss_parallel() if parallel == "tp" else contextlib.nullcontext():
            losses = steps(0)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoints.save(state, checkpoint_id=folder)
            after = steps(1)
            checkpoints.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            again = steps(1)
        weights = _weights(model)  # evaluation leaves the root's gathered
        model.eval()
        with torch.no_grad():
            evaluated = whole(model(_rows(2))).float()
        assert not any(each.is_meta for each in model.parameters()) and math.isfinite(losses[0])
        found = {
            "losses": [*losses, evaluated],
            "after": after,
            "again": again,
            "weights": weights,
            "sharded": [type(each).__name__ for each in model.layers.values()],
            "saved": _names_of(Path(folder)),
        }
        return found, model

    return _compared(train, jitted)
