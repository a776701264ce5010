"""The weights folded by forge.jit(freeze=True), and the effects of a changed weight."""

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import forge
from forge.capture.handles import handle_of
from forge.runtime import cuda_recorder
from forge.runtime.parameter_aliases import open_aliases
from tests.executors.test_cuda_graphs import Double
from tests.markers import slow_except
from tests.models.test_models import build, difference, outputs
from tests.models.zoo import MODELS


@pytest.fixture(autouse=True)
def _without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Convolved(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=bias)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Projected(nn.Module):
    """The projections of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.v = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x).view(x.shape[0], 2, 4).transpose(0, 1)[0], self.k(x) * 2, self.v(x)], -1)


def settled(model: nn.Module) -> nn.Module:
    """Return the model in evaluation, with its own statistics."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2) if name.endswith("var") else buffer.normal_()
    return model.eval()


IMAGE = torch.linspace(-2, 2, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 48).view(6, 8)


def folded_times(jitted: Callable) -> int:
    """Return the number of times values were computed from weights."""
    return sum(each.times for each in handle_of(jitted).folded_weights())


def operations(jitted: Callable) -> list[str]:
    return [row.operation for row in forge.explain(jitted).rows]


def same(jitted: Callable, model: Callable, *args: torch.Tensor, **tolerance: float) -> None:
    made, wanted = jitted(*args), model(*args)
    torch.testing.assert_close(made, wanted, **tolerance)
    assert made.stride() == wanted.stride()


# folded calls


class Layers(nn.Module):
    """A layer before a batch norm."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * 2


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6, affine=False), (2, 4, 7, 7)),
        (nn.Conv2d(4, 6, 3, padding="same", dilation=2), nn.BatchNorm2d(6, eps=0.1), (2, 4, 7, 7)),
        (nn.Conv3d(2, 3, 2, padding=1), nn.BatchNorm3d(3), (2, 2, 4, 4, 4)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (2, 4, 5)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.Linear(4, 6), nn.BatchNorm1d(6), (5, 4)),
        (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), (5, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.one_in(3)
def test_a_batch_norm_is_folded(layer: nn.Module, norm: nn.Module, shape: tuple, dtype: torch.dtype) -> None:
    model = settled(Layers(copy.deepcopy(layer), copy.deepcopy(norm))).to(dtype)
    jitted = forge.jit(model, freeze=True)
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).view(shape)
    # in bfloat16 the folded weights are rounded once more, which causes a difference of that size in each product
    same(jitted, model, x, **({"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}))
    assert "torch.nn.functional.batch_norm" not in operations(jitted)
    assert any("batch norm norm in the weights of layer" in each for each in forge.explain(jitted).frozen)


def test_linear_layers_of_one_input_are_one() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    assert operations(jitted).count("torch.nn.functional.linear") == 1
    assert "q, k, v: one product with 16 columns" in str(forge.explain(jitted))


class Scaled(nn.Module):
    """A module with a weight that each call recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("scale", torch.rand(4, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.scale / torch.linalg.norm(self.weight, dim=1, keepdim=True)).relu()


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    model = Scaled()
    jitted = forge.jit(model, freeze=True)
    for _ in range(3):
        same(jitted, model, ROWS)
    assert operations(jitted) == ["torch.nn.functional.linear", "torch.relu"]
    assert folded_times(jitted) == 1


def test_casts_of_autocast_are_made_once() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            torch.testing.assert_close(jitted(ROWS), model(ROWS), rtol=0.02, atol=0.02)
    casts = [row for row in forge.explain(jitted).rows if row.operation == "torch.Tensor.to"]
    assert len(casts) == 1 and folded_times(jitted) == 1  # of the rows


def test_a_batch_norm_under_autocast_is_folded_into_the_weights_before_their_cast() -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(jitted(IMAGE), model(IMAGE), rtol=0.05, atol=0.05)
    assert "torch.nn.functional.batch_norm" not in operations(jitted)


def test_parametrized_weights_are_computed_once() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    jitted = forge.jit(model, freeze=True)
    for _ in range(2):
        same(jitted, model, ROWS)
    assert operations(jitted) == ["torch.nn.functional.linear"]
    model.parametrizations.weight.original0.mul_(3)
    same(jitted, model, ROWS)


def test_as_strided_sees_the_strides_that_torch_gives() -> None:
    class Strided(Projected):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, v = self.q(x), self.v(x)
            rows, columns = q.stride()
            return q.as_strided((2, 4), (2 * rows, columns)) * 2 + v.view(-1).as_strided((2, 4), (4, 1))

    model = Strided().eval()
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    assert any("one product" in each for each in forge.explain(jitted).frozen)


def test_lengths_may_change() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True, dynamic=True)
    for rows in (3, 5, 2):
        same(jitted, model, torch.randn(rows, 8))
    assert forge.explain(jitted).graphs == 1 and folded_times(jitted) == 1


def test_regions_of_inductor_read_folded_weights() -> None:
    model = nn.Sequential(Projected(), nn.GELU(), nn.Linear(12, 4)).eval()
    jitted = forge.jit(model, freeze=True, executors=["inductor", "torch"])
    same(jitted, model, torch.randn(6, 8))
    model[0].k.weight.mul_(2)
    same(jitted, model, torch.randn(6, 8))
    assert "inductor" in {row.executor for row in forge.explain(jitted).rows}


# calls that are not folded


def test_a_batch_norm_in_training_is_not_folded() -> None:
    model, twin = Convolved(), Convolved()
    twin.load_state_dict(model.state_dict())
    jitted = forge.jit(model, freeze=True)
    for _ in range(2):
        same(jitted, twin, IMAGE)
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
    assert any("norm_running_mean: the program changes it" in each for each in forge.explain(jitted).unfrozen)
    jitted.eval(), twin.eval()
    same(jitted, twin, IMAGE)
    assert any("batch norm norm" in each for each in forge.explain(jitted).frozen)


def test_a_weight_that_the_program_changes_is_not_folded() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8))
            self.register_buffer("scale", torch.full((8,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * (self.count + 1) * (self.scale + 1)
            self.count += 1
            return y

    model, twin = Counting(), Counting()
    jitted = forge.jit(model, freeze=True)
    for _ in range(3):
        same(jitted, twin, ROWS)
    assert folded_times(jitted) == 1


def test_where_gradients_are_needed_nothing_is_folded_and_one_warning_says_so() -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    with torch.enable_grad(), pytest.warns(UserWarning, match=r"folds no weights.*requires grad.*no_grad") as warned:
        jitted(IMAGE).sum().backward()
        jitted(IMAGE[:1]).sum().backward()
    assert len(warned) == 1
    assert model.conv.weight.grad is not None and not forge.explain(jitted).frozen
    same(jitted, model, IMAGE)
    assert forge.explain(jitted).frozen


def test_without_parameters_that_require_grad_nothing_is_needed() -> None:
    model = settled(Convolved()).requires_grad_(False)
    jitted = forge.jit(model, freeze=True)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        same(jitted, model, IMAGE)
    assert forge.explain(jitted).frozen


def test_inference_tensors_have_no_version_and_are_not_folded() -> None:
    with torch.inference_mode():
        model = settled(Scaled())
    jitted = forge.jit(model, freeze=True)
    with torch.inference_mode():
        same(jitted, model, ROWS)
        model.weight.mul_(2)
        model.scale.mul_(2)
        same(jitted, model, ROWS)
    assert not forge.explain(jitted).frozen
    assert any("no version" in each for each in forge.explain(jitted).unfrozen)


def test_under_inference_mode_weights_are_folded_for_no_grad_too() -> None:
    model = Scaled()
    jitted = forge.jit(model, freeze=True)
    with torch.inference_mode():
        same(jitted, model, ROWS)
        model.weight.mul_(2)
        same(jitted, model, ROWS)
    same(jitted, model, ROWS)


def test_what_is_returned_is_not_shared_between_calls() -> None:
    class Shown(Scaled):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scaled = self.weight * self.scale
            return F.linear(x, scaled), scaled, self.weight.t(), self.weight

    model = Shown()
    jitted = forge.jit(model, freeze=True)
    for _ in range(2):
        made, wanted = jitted(ROWS), model(ROWS)
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other)
        made[1].zero_()
    assert made[3] is model.weight and made[2].data_ptr() == model.weight.data_ptr()


# changes


def assign(model: nn.Module) -> None:
    model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))


def load(model: nn.Module) -> None:
    model.load_state_dict(settled(Convolved()).state_dict())


def load_and_assign(model: nn.Module) -> None:
    model.load_state_dict(settled(Convolved()).state_dict(), assign=True)


def in_place(model: nn.Module) -> None:
    model.norm.running_var.mul_(3)


def through_a_view(model: nn.Module) -> None:
    model.conv.weight[0].zero_()


def another_memory(model: nn.Module) -> None:
    model.conv.weight.data = torch.randn_like(model.conv.weight)


def through_data(model: nn.Module) -> None:
    model.conv.weight.data.add_(1)


def added_to_data(model: nn.Module) -> None:
    model.conv.weight.data += torch.randn_like(model.conv.weight)


def through_numpy(model: nn.Module) -> None:
    model.norm.bias.numpy()[...] = 3


def round_trip(model: nn.Module) -> None:
    model.half().float()


def swapped(model: nn.Module) -> None:
    torch.utils.swap_tensors(model.conv.weight, nn.Parameter(torch.randn_like(model.conv.weight)))


def swapped_buffer(model: nn.Module) -> None:
    torch.utils.swap_tensors(model.norm.running_var, torch.full((4,), 3.0))


def converted_by_swaps(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def step(model: nn.Module, **options: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    with torch.enable_grad():
        model(IMAGE).square().sum().backward()
    optimizer.step()


def fused_step(model: nn.Module) -> None:
    step(model, fused=True)


def under_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model.conv.bias.add_(1)


CHANGES = [
    assign, load, load_and_assign, in_place, through_a_view, another_memory, through_data, added_to_data, through_numpy,
    round_trip, swapped, swapped_buffer, converted_by_swaps, step, fused_step, under_inference_mode,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.one_in(2)
def test_after_a_change_what_was_folded_is_computed_again(change: Callable[[nn.Module], None]) -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, IMAGE)
    before = model(IMAGE)
    change(model)
    assert not torch.equal(model(IMAGE), before)
    same(jitted, model, IMAGE)
    assert folded_times(jitted) == 2 and forge.explain(jitted).graphs == 1


class Kept(nn.Module):
    """A layer with a weight whose middle element a training step does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (self.weight[:2] * 2).exp())


@pytest.mark.parametrize("cleared", [True, False])
def test_a_step_that_nothing_counts_follows_a_gradient(cleared: bool) -> None:
    model = Kept()
    jitted = forge.jit(model, freeze=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    same(jitted, model, ROWS)
    version = model.weight._version
    for _ in range(2):
        with torch.enable_grad():
            model(ROWS).square().sum().backward()
        same(jitted, model, ROWS)
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
        same(jitted, model, ROWS)
    assert model.weight._version == version
    assert any("zero_grad" in each for each in forge.explain(jitted).unfrozen) is not cleared
    optimizer.zero_grad()
    before = folded_times(jitted)
    for _ in range(3):
        same(jitted, model, ROWS)
    assert folded_times(jitted) <= before + 1


def test_a_model_that_is_frozen_can_be_trained() -> None:
    model, twin = settled(Convolved()), settled(Convolved())
    twin.load_state_dict(model.state_dict())
    jitted = forge.jit(model, freeze=True, fullgraph=True)
    for _ in range(3):
        same(jitted, twin, IMAGE)
        for module, called in ((model, jitted), (twin, twin)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                called(IMAGE).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(jitted, twin, IMAGE)
    assert forge.explain(jitted).graphs == 2


def test_weights_carry_no_hooks_once_what_was_made_of_them_is_gone() -> None:
    model = Kept()
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    assert len(model.weight._post_accumulate_grad_hooks) == 1
    same(jitted, model, ROWS)
    model.weight.add_(1)
    same(jitted, model, ROWS)
    assert len(model.weight._post_accumulate_grad_hooks) == 1
    forge.refold(jitted)
    assert not model.weight._post_accumulate_grad_hooks


def test_a_joined_weight_follows_each_of_its_parts() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    for weight in model.parameters():
        same(jitted, model, ROWS)
        weight.add_(1)
        same(jitted, model, ROWS)


def test_tied_weights_follow_the_one_tensor() -> None:
    model = Projected().eval()
    model.v.weight = model.k.weight
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    model.k.weight.add_(1)
    same(jitted, model, ROWS)
    model.v.weight = nn.Parameter(torch.randn(4, 8))
    same(jitted, model, ROWS)


def test_another_dtype_is_another_program() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    model.double()
    same(jitted, model, ROWS.double())
    assert sum(len(each._states) for each in handle_of(jitted).folded_weights()) == 1  # of the existing weights


def test_nothing_takes_the_place_of_memory_that_was_looked_at() -> None:
    """Otherwise a weight that moved twice could be back at its address with other values."""
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, ROWS)
    memory = StorageWeakRef(model.k.weight.untyped_storage())
    model.k.weight.data = torch.zeros(4, 8)
    assert not memory.expired()
    same(jitted, model, ROWS)
    assert memory.expired()


def test_refold_is_for_changes_that_nobody_sees() -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    jitted = forge.jit(model, freeze=True)
    before = jitted(x)
    model.weight.detach().numpy()[0] += 5
    torch.testing.assert_close(jitted(x), before)
    forge.refold(jitted)
    same(jitted, model, x)


def test_refold_names_what_was_not_jitted() -> None:
    with pytest.raises(TypeError, match=r"was not made by forge\.jit"):
        forge.refold(nn.Linear(2, 2))


# several programs, several models


class Broken(nn.Module):
    """Two blocks of one class, each with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).repeat(1, 2)
            torch._dynamo.graph_break()
        return x


def test_after_a_graph_break_layers_alike_keep_what_is_theirs() -> None:
    model = Broken()
    jitted = forge.jit(model, freeze=True)
    for _ in range(3):
        same(jitted, model, ROWS)
    assert folded_times(jitted) <= 2 * forge.explain(jitted).graphs
    model.blocks[1].weight.mul_(-1)
    same(jitted, model, ROWS)


def test_one_program_serves_several_modules() -> None:
    models = [Scaled(), Scaled(), Scaled()]
    jitted = forge.jit(lambda module, x: module(x), freeze=True)
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(jitted(model, ROWS), model(ROWS))
    assert folded_times(jitted) == 3


def test_two_models_of_a_class_share_nothing() -> None:
    first, second = settled(Convolved()), settled(Convolved())
    ours, theirs = forge.jit(first, freeze=True), forge.jit(second, freeze=True)
    for _ in range(2):
        same(ours, first, IMAGE)
        same(theirs, second, IMAGE)
    first.conv.weight.mul_(2)
    same(ours, first, IMAGE)
    assert (folded_times(ours), folded_times(theirs)) == (2, 1)


def test_a_jitted_module_in_a_jitted_module_is_part_of_it() -> None:
    model = nn.Sequential(settled(Convolved()), nn.Flatten())
    jitted = forge.jit(nn.Sequential(forge.jit(model[0]), model[1]), freeze=True)
    same(jitted, model, IMAGE)
    model[0].conv.weight.add_(1)
    same(jitted, model, IMAGE)
    assert folded_times(jitted) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_frozen_and_has_weights_of_its_own(copied: Callable) -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, IMAGE)
    twin = copied(jitted)
    twin.conv.weight.mul_(2)
    same(jitted, model, IMAGE)
    assert not torch.allclose(twin(IMAGE), model(IMAGE))
    assert forge.explain(twin).frozen


def test_state_dicts_are_the_originals() -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    jitted(IMAGE)
    file = io.BytesIO()
    torch.save(jitted.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file).items():
        torch.testing.assert_close(value, before[name])


# lifetime


def test_a_deleted_model_is_freed_with_what_was_folded() -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    jitted(IMAGE)
    (folded,) = handle_of(jitted).folded_weights()
    alive = [weakref.ref(model.conv.weight), *[weakref.ref(x) for each in folded._states.values() for x in each.values]]
    assert len(alive) > 1
    del model, jitted, folded
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_a_program_that_outlives_a_model_keeps_nothing_of_it() -> None:
    model = Scaled()
    jitted = forge.jit(lambda module, x: module(x), freeze=True)
    jitted(model, ROWS)
    (folded,) = handle_of(jitted).folded_weights()
    (state,) = folded._states.values()
    alive = [weakref.ref(model.weight), *map(weakref.ref, state.values)]
    del model, state
    gc.collect()
    assert not any(each() is not None for each in alive) and not folded._states


def test_programs_that_are_frozen_are_not_kept_on_disk(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, IMAGE)
    assert any("frozen program" in each for each in forge.explain(jitted).uncached)
    assert not any(tmp_path.rglob("*.program"))


@pytest.mark.parametrize("change", [in_place, assign, through_data], ids=lambda change: change.__name__)
def test_cuda_graphs_read_what_was_folded_last(change: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_recorder, "_recorder", Double())
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True, cuda_graphs=True)
    for _ in range(6):
        same(jitted, model, IMAGE)
    change(model)
    for _ in range(6):
        same(jitted, model, IMAGE)
    assert forge.explain(jitted).recorded == 1 and folded_times(jitted) == 2
    torch._dynamo.reset()


def test_a_weight_that_is_an_argument_too_is_one_tensor() -> None:
    class Given(Scaled):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * self.scale) + F.linear(x, weight * 2)

    model = Given()
    jitted = forge.jit(model, freeze=True)
    for _ in range(2):
        same(jitted, model, ROWS, model.weight)
        model.weight.add_(1)
    same(jitted, model, ROWS, torch.randn(4, 8))


def test_a_function_is_frozen_by_the_modules_that_it_reads() -> None:
    model = settled(Convolved())
    jitted = forge.jit(lambda x: model(x) * 2, freeze=True)
    same(jitted, lambda x: model(x) * 2, IMAGE)
    model.conv.weight.mul_(2)
    same(jitted, lambda x: model(x) * 2, IMAGE)
    assert folded_times(jitted) == 2


def test_threads_may_call_while_weights_change_between() -> None:
    model = Projected().eval()
    jitted = forge.jit(model, freeze=True)
    with ThreadPoolExecutor(4) as pool:

        def call(_: int) -> torch.Tensor:
            with torch.no_grad():
                return jitted(ROWS)

        for _ in range(3):
            wanted = model(ROWS)
            for made in pool.map(call, range(8)):
                torch.testing.assert_close(made, wanted)
            model.k.weight.add_(1)


WITHOUT = {"bloom", "mlp", "plain_attention"}  # nothing to fold; the weights of convolutions are laid out for oneDNN
FAST = ("llama", "vit", "resnet")
OURS = [name for name, make in MODELS.items() if make.__module__ == "tests.models.zoo"]
ZOO = slow_except(OURS, *FAST)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.one_in(3)
def test_unmodified_models_follow_their_weights(name: str) -> None:
    model, arguments = build(name, False)
    jitted = forge.jit(model, freeze=True)
    for factor in (1, 0.9):
        for parameter in model.parameters():
            parameter.mul_(factor)
        torch.manual_seed(1)
        made = outputs(jitted(**arguments))
        torch.manual_seed(1)
        wanted = outputs(model(**arguments))
        assert len(made) == len(wanted)
        # float32: products of other sizes are summed in another order
        assert max(map(difference, made, wanted)) < 1e-5
    assert bool(forge.explain(jitted).frozen) is (name not in WITHOUT)


def test_it_is_an_option_of_the_backend_too() -> None:
    model = settled(Convolved())
    compiled = torch.compile(model, backend="forge", options={"freeze": True})
    same(compiled, model, IMAGE)
    model.conv.weight.mul_(2)
    same(compiled, model, IMAGE)


# reported bugs


class Doubled(nn.Module):
    """A weight computed from another, which does not depend on a part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layer.weight * 2)


def gradient(model: nn.Module) -> torch.Tensor:
    """Return the gradient of all columns but the middle one, which contains the checked element."""
    x = torch.randn(5, 16)
    x[:, 8] = 0
    with torch.enable_grad():
        return torch.autograd.grad(model(x).sum(), model.layer.weight)[0]


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("needed", [True, False])
def test_a_fused_step_is_followed_however_its_gradient_came(needed: bool, cleared: bool) -> None:
    model, x = Doubled().requires_grad_(needed), torch.randn(5, 16)
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model.requires_grad_(True)
        model.layer.weight.grad = gradient(model)
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
        model.requires_grad_(needed)
        same(jitted, model, x)


def test_a_step_of_another_model_drops_nothing() -> None:
    model, other, x = Doubled(), Doubled(), torch.randn(5, 16)
    jitted = forge.jit(model, freeze=True)
    jitted(x)
    other.layer.weight.grad = gradient(other)
    torch.optim.SGD(other.parameters(), lr=0.1, fused=True).step()
    jitted(x)
    assert folded_times(jitted) == 1


def test_a_weight_without_memory_is_read_in_each_call() -> None:
    model, x = Doubled(), torch.randn(5, 16)
    model.layer.weight.data = torch._efficientzerotensor(16, 16)
    same(forge.jit(model, freeze=True), model, x)


def test_a_weight_whose_middle_is_zero_is_seen_to_be_scaled() -> None:
    model, x = Doubled(), torch.randn(5, 16)
    model.layer.weight[8, 8] = 0
    jitted = forge.jit(model, freeze=True)
    jitted(x)
    model.layer.weight.detach().numpy()[...] *= 3
    same(jitted, model, x)


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = self.q(x), self.k(x)
        a[:, :2].add_(b[:, :2])
        b.t()[0].fill_(1)
        return a, b.view(5, 2, 4)


def test_a_part_that_is_changed_through_a_view_has_eagers_strides() -> None:
    model, x = Overwritten(), torch.randn(5, 8)
    found, expected = forge.jit(model, freeze=True)(x), model(x)
    torch.testing.assert_close(found, expected)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert [each.untyped_storage().nbytes() for each in found] == [160, 160]


@pytest.mark.parametrize("part", ["running_mean", "weight", "all"])
def test_a_batch_norm_of_dtypes_that_torch_refuses_is_refused(part: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).eval()
    if part == "all":
        model[1].double()
    else:
        setattr(model[1], part, type(getattr(model[1], part))(getattr(model[1], part).double()))
    x = torch.randn(2, 4, 9, 9)
    for each in (model, forge.jit(model, freeze=True)):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            each(x)


# writes without a version bump, to parts of a weight of which one element is compared


class Large(nn.Module):
    """A module with a weight of more bytes than are compared as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32 * 32).view(32, 32).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 2)


def a_row(weight: nn.Parameter) -> None:
    weight.data[0].zero_()


def bounds(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.5, 0.5)


def copied(weight: nn.Parameter) -> None:
    other = weight.detach().clone()
    other[1] = 5
    weight.data.copy_(other)


def other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.detach() * 3


def detached(weight: nn.Parameter) -> None:
    weight.detach()[0].mul_(3)


def array(weight: nn.Parameter) -> None:
    weight.numpy()[0] = 7


def view_of_an_array(weight: nn.Parameter) -> None:
    numpy.asarray(weight)[2:4].T[0] = 7


def each_of_a_list(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.data[:3], weight.data[5]], 3)


def twice_data(weight: nn.Parameter) -> None:
    weight.data.data.detach()[0].zero_()


def item(weight: nn.Parameter) -> None:
    weight.data[3, 4] = 9


def within_inference_mode(weight: nn.Parameter) -> None:
    with torch.inference_mode():
        weight.data[0].zero_()


def many_reads_and_a_write(weight: nn.Parameter) -> None:
    weight.data[0].zero_()
    for _ in range(200):
        weight.data.sum()


@forge.jit
def _in_a_program(weight: nn.Parameter) -> None:
    weight.data[0].mul_(3)


def in_a_program(weight: nn.Parameter) -> None:
    _in_a_program(weight)


def step_on_data(weight: nn.Parameter) -> None:
    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def apply(self) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each.data[1].sub_(0.5)

    Optimizer([weight]).apply()


WRITES = [
    a_row, bounds, copied, other_memory, detached, array, view_of_an_array, each_of_a_list, twice_data, item,
    within_inference_mode, many_reads_and_a_write, in_a_program, step_on_data,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_to_a_part_of_a_parameter_is_noticed(write: Callable[[nn.Parameter], None]) -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, x)
    for _ in range(2):
        before = model(x)
        write(model.weight)
        assert not torch.equal(model(x), before)
        same(jitted, model, x)
        model.weight.add_(0.25)
        same(jitted, model, x)


ALIASES = {"data": lambda x: x.data, "view": lambda x: x.data[:4].t(), "array": lambda x: x.numpy()}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_of_a_parameter_is_followed_while_it_lives(alias: str) -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    jitted = forge.jit(model, freeze=True)
    jitted(x)
    held = ALIASES[alias](model.weight)
    for _ in range(3):
        same(jitted, model, x)
        held[0] += 1
        same(jitted, model, x)
    del held
    same(jitted, model, x)
    times = folded_times(jitted)
    same(jitted, model, x)
    assert folded_times(jitted) == times and not open_aliases


def test_an_alias_that_is_not_written_to_changes_nothing() -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    jitted = forge.jit(model, freeze=True)
    jitted(x)
    data = model.weight.data
    for _ in range(3):
        same(jitted, model, x)
    assert folded_times(jitted) == 1 and type(data) is torch.Tensor and data._version == 0


def test_what_is_handed_out_of_parameters_lives_no_longer_than_in_eager() -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    jitted = forge.jit(model, freeze=True)
    jitted(x)
    data, array = model.weight.data, model.weight.numpy()
    alive = [weakref.ref(data), weakref.ref(array), weakref.ref(model.weight)]
    del data, array, model, jitted
    gc.collect()
    assert not any(each() is not None for each in alive) and not open_aliases


def test_all_of_a_small_buffer_is_compared() -> None:
    model = settled(Convolved())
    jitted = forge.jit(model, freeze=True)
    same(jitted, model, IMAGE)
    model.norm.running_var.data[0] = 9
    same(jitted, model, IMAGE)
    model.norm.running_mean.numpy()[3] = 9
    same(jitted, model, IMAGE)
    assert folded_times(jitted) == 3


def test_programs_read_the_data_of_parameters_that_are_watched() -> None:
    model, x = Large(), torch.linspace(-1, 1, 64).view(2, 32)
    forge.jit(model, freeze=True)(x)
    program = forge.jit(lambda x: x @ model.weight.data, fullgraph=True)
    torch.testing.assert_close(program(x), x @ model.weight)


def test_parameters_that_were_swapped_are_watched_where_they_are() -> None:
    first, second = settled(Convolved()), settled(Convolved())
    programs = [(forge.jit(model, freeze=True), model) for model in (first, second)]
    for program in programs:
        same(*program, IMAGE)
    torch.utils.swap_tensors(first.conv.weight, second.conv.weight)
    for program in programs:
        same(*program, IMAGE)
    first.conv.weight.data[0].zero_()
    second.conv.bias.data[0] = 3
    for program in programs:
        same(*program, IMAGE)
