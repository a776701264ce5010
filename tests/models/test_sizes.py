"""Unmodified models whose batches and lengths change between calls, in the default configuration: results, the keys and
values in a cache, every gradient."""

import copy
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import forge
from tests.markers import in_both_modes, slow_except
from tests.models import zoo
from tests.models.test_models import as_double, build, difference, loss_of, outputs
from tests.models.zoo import BATCH, LENGTH, MODELS

SIZES = ((BATCH, LENGTH), (BATCH, LENGTH + 4), (BATCH + 1, LENGTH + 4), (1, LENGTH - 3))
# one model of a kind, the others under the `slow` marker: `make models` runs all
TRAINED = set("llama convnext vae vq_vae radiance_field conv_lstm conv_net mlp message_passing graph_attention".split())
EVALUATED = {"unet", "plain_attention", "conv_net", "mlp"}
WITH_INDUCTOR = ("llama", "gpt2", "bart", "bert")
NEXT_TOKEN = ("llama", "mistral", "gemma2", "gpt2")  # a full cache, a sliding one, both, and that of an older model


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.fixture
def accelerate() -> Iterator[ModuleType]:
    """Yield the library in a fresh state: the process's mixed precision is that of the first Accelerator."""
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def resized(arguments: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """Return a model's arguments for another batch size, and another length if they have one; for a graph, with fewer
    edges."""
    if "edges" in arguments:
        count = batch * length
        fewer = {"edges": arguments["edges"][:, :count], "of_edges": arguments.get("of_edges", ())[:count]}
        return arguments | {name: each.contiguous() for name, each in fewer.items() if name in arguments}

    if "mems" in arguments:  # whose batches are columns
        rest = {name: each for name, each in arguments.items() if name != "mems"}
        columns = [resized({"mem": mem.transpose(0, 1)}, batch, length)["mem"] for mem in arguments["mems"]]
        return resized(rest, batch, length) | {"mems": [each.transpose(0, 1) for each in columns]}

    def resize(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim == 0 or x.shape[0] != BATCH:
            return x
        x = torch.cat([x, x.flip(0)])[:batch]
        x = torch.cat([x, x.flip(1)], 1)[:, :length] if x.ndim > 1 and x.shape[1] == LENGTH else x
        return x.contiguous()

    return _pytree.tree_map(resize, arguments)


def cached(result: Any) -> list[torch.Tensor]:
    """Return the tensors in a result's cache: keys and values, and the states of other layers."""
    cache = getattr(result, "past_key_values", None)
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder-decoder
    layers = [vars(layer) for layer in getattr(cache, "layers", ())]
    return [each for layer in layers for each in _pytree.tree_leaves(layer) if isinstance(each, torch.Tensor)]


def assert_same_results(ours: Any, theirs: Any, reference: Callable[[], Any] | None = None) -> None:
    """Check that each tensor is near eager's, or at most twice as far from the result in float64, which `reference`
    makes."""
    all_of = lambda result: [*outputs(result), *cached(result)]
    exact: list[torch.Tensor] = []
    for i, (one, other) in enumerate(zip(all_of(ours), all_of(theirs), strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype
        if difference(one.detach(), other.detach()) >= 1e-4:
            assert reference is not None, i
            exact = exact or all_of(reference())
            assert_within(one.detach(), other.detach(), exact[i].detach(), f"result {i}")


def assert_within(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    assert difference(ours, exact) <= 2 * difference(theirs, exact), name


def check_sizes(name: str, training: bool) -> None:
    model, arguments = build(name, training)
    config = getattr(model, "config", None)
    if not training and hasattr(config, "use_cache"):
        config.use_cache = True  # as the library has it
    eager, before = copy.deepcopy(model), copy.deepcopy(model)
    jitted = forge.jit(model)
    for place, size in enumerate(SIZES):
        inputs = resized(arguments, *size)
        torch.manual_seed(1)
        try:
            expected = eager(**inputs)
        except ValueError as error:  # a batch norm of one value, in the last size
            assert forge.explain(jitted).eager == []
            with pytest.raises(ValueError, match=re.escape(str(error))):
                jitted(**inputs)
            return
        torch.manual_seed(1)
        actual = jitted(**inputs)
        exact = functools.cache(lambda upto=place + 1: in_double(before, arguments, SIZES[:upto], training))
        assert_same_results(actual, expected, lambda exact=exact: exact()[0])
        if training:
            loss_of(expected).backward()
            loss_of(actual).backward()
            for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), key
                if theirs.grad is not None and difference(ours.grad, theirs.grad) >= 1e-3:
                    assert_within(ours.grad, theirs.grad, exact()[1][key], key)
    assert forge.explain(jitted).eager == []


def in_double(
    model: torch.nn.Module, arguments: dict[str, Any], sizes: Sequence[tuple[int, int]], training: bool
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the last result of a model in float64 after calls with each of the sizes, and the gradients."""
    model = copy.deepcopy(model).double()
    for size in sizes:
        torch.manual_seed(1)
        result = model(**as_double(resized(arguments, *size)))
        if training:
            loss_of(result).backward()
    return result, {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("name", "training"), in_both_modes(MODELS, TRAINED, EVALUATED))
@pytest.mark.one_in(4)
def test_batches_and_lengths_may_change(name: str, training: bool) -> None:
    check_sizes(name, training)


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize(("name", "training"), in_both_modes(WITH_INDUCTOR, ("llama",), ()))
def test_batches_and_lengths_may_change_in_compiled_regions(name: str, training: bool) -> None:
    check_sizes(name, training)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", slow_except(NEXT_TOKEN))
def test_prompts_of_several_lengths_are_continued(name: str, cache: str) -> None:
    model, arguments = build(name, False)
    arguments.pop("labels")
    eager, jitted = copy.deepcopy(model), forge.jit(model)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": True}
    options["cache_implementation"] = cache
    options["disable_compile"] = True  # otherwise generate makes torch.compile compile the model, too
    for batch, length in SIZES[:3]:
        inputs = resized(arguments, batch, length)
        assert torch.equal(jitted.generate(**inputs, **options), eager.generate(**inputs, **options))
    assert forge.explain(jitted).graphs


class Random(torch.utils.data.Dataset):
    """A dataset of token sequences, more than fill whole batches of four."""

    def __init__(self) -> None:
        self.tokens = torch.randint(3, zoo.VOCAB, (18, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


@pytest.mark.slow
@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_with_a_smaller_last_batch(bf16: bool, tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    losses = []
    for wrap in (forge.jit, lambda model: model):
        model, _ = build("llama", True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            eval_strategy="epoch", bf16=bf16, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(wrap(model), arguments, train_dataset=Random(), eval_dataset=Random())
        trainer.train()
        losses.append([each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history])
    ours, theirs = ([each for each in some if each is not None] for some in losses)
    assert len(theirs) == 12
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2 if bf16 else 1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # few workers, a logging interval
@pytest.mark.parametrize("precision", slow_except(["32-true", "bf16-mixed"]))
def test_lightning_with_a_smaller_last_batch(precision: str) -> None:
    lightning = importlib.import_module("lightning")

    class Language(lightning.LightningModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model
            self.history: list[float] = []

        def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.history.append(loss.item())
            return loss

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self._loss(batch)

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self._loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    losses = []
    for wrap in (forge.jit, lambda model: model):
        module = Language(wrap(build("llama", True)[0]))
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", precision=precision, num_sanity_val_steps=0, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, *(torch.utils.data.DataLoader(Random(), batch_size=4) for _ in range(2)))
        losses.append(torch.tensor(module.history))
    assert len(losses[1]) == 20
    torch.testing.assert_close(*losses, rtol=1e-4 if precision == "32-true" else 2e-2, atol=1e-4)


@pytest.mark.slow
def test_accelerate_with_a_smaller_last_batch(accelerate: ModuleType) -> None:
    losses = []
    for wrap in (forge.jit, lambda model: model):
        model, _ = build("llama", True)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Random(), batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(wrap(model), optimizer, loader)
        history = []
        for _ in range(2):
            for batch in loader:
                loss = prepared(**batch).loss
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                history.append(loss.item())
        losses.append(history)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-4)
