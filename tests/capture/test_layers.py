"""Layers: classes whose forward replaces that of a jitted model's modules if both compute the same."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.executors.hubex.layers import LayerExecutor, read_layers
from forge.executors.hubex.verification.process import can_fork
from forge.hub import HubNotice, NotFoundError
from tests.hub.kernels import metadata, write

kernels = pytest.importorskip("kernels")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "cache"))


class RMSNorm(nn.Module):
    """An RMSNorm written as in Llama."""

    def __init__(self, size: int = 8, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.eps = eps
        self.exact = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Fused(nn.Module):
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.library.custom_op("forge_test_layers::norm", mutates_args=())
def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple:
    with torch.enable_grad():
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        y = F.rms_norm(x, weight.shape, weight, ctx.eps)
    return (*torch.autograd.grad(y, [x, weight], grad), None)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *saved, ctx.eps = inputs
    ctx.save_for_backward(*saved)


norm.register_autograd(_backward, setup_context=_setup)


class Called(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.eps)


class Forgetful(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, None, self.eps)


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.detach(), self.eps)


class Inference(nn.Module):
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), RMSNorm(eps=1e-6), nn.Linear(8, 8), RMSNorm(eps=1e-2))


def jitted(target: Any, layers: Any, **options: Any) -> Any:
    return forge.jit(target, layers=layers, executors=["torch"], **{"cache": False, **options})


def uses(compiled: Any) -> list[tuple[str | None, str]]:
    return [(use.how, use.reason) for use in forge.explain(compiled).layers]


def infers(compiled: Any, target: nn.Module, *args: Any) -> list[tuple[str | None, str]]:
    """Check a call without gradients against eager, and return the uses of its layers."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), target(*args))
    assert not forge.explain(compiled).graph_breaks
    return uses(compiled)


def trains(compiled: Any, target: nn.Module, *args: Any) -> list[tuple[str | None, str]]:
    """Check a call like infers, with gradients."""
    found = []
    for each in (compiled, target):
        y = each(*args)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(target.parameters()))))
    torch.testing.assert_close(*found)
    return uses(compiled)


def operations(compiled: Any) -> list[str]:
    return [row.operation for row in forge.explain(compiled).rows]


TRACED, CALLED = ("traced", ""), ("one call", "")
X = torch.randn(4, 8)


def test_a_layer_of_torch_code_is_traced_in_the_place_of_the_modules_forward() -> None:
    target = model()
    compiled = jitted(target, {"RMSNorm": Fused})
    assert infers(compiled, target, X) == [TRACED, TRACED]
    assert operations(compiled).count("torch.nn.functional.rms_norm") == 2
    assert "torch.rsqrt" not in operations(compiled)
    compiled = jitted(target, {"RMSNorm": Fused})
    assert trains(compiled, target, X) == [TRACED, TRACED]
    assert "torch.rsqrt" not in operations(compiled)
    assert str(forge.explain(compiled).layers[0]) == "1 (RMSNorm) by Fused: traced, verified"


def test_a_layer_that_calls_an_operator_is_one_call_with_its_gradient() -> None:
    target = model()
    compiled = jitted(target, {"RMSNorm": Called})
    assert infers(compiled, target, X) == [CALLED, CALLED]
    rows = [(row.operation, row.executor) for row in forge.explain(compiled).rows if "linear" not in row.operation]
    assert rows == [("layer.RMSNorm_1", "Called"), ("layer.RMSNorm", "Called")]
    compiled = jitted(target, {"RMSNorm": Called})
    assert trains(compiled, target, X) == [CALLED, CALLED]
    assert [name for name in operations(compiled) if "Called" in name] == [
        *["hub.Called.forward"] * 2,
        *["hub.Called.backward"] * 2,
    ]
    assert not forge.explain(compiled).opaque_calls


def test_the_model_and_its_other_programs_stay_as_they_are() -> None:
    target = model()
    before = {name: id(value) for name, value in target.state_dict(keep_vars=True).items()}
    compiled, other = jitted(target, {"RMSNorm": Fused}), jitted(target, {})
    assert infers(compiled, target, X) == [TRACED, TRACED]
    assert infers(other, target, X) == []
    assert "torch.rsqrt" in operations(other)
    third = jitted(target, {"RMSNorm": Called})
    assert infers(third, target, X) == [CALLED, CALLED]
    assert all("forward" not in vars(each) and type(each) is not Fused for each in target.modules())
    assert {name: id(value) for name, value in compiled.state_dict(keep_vars=True).items()} == before


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
def test_a_layer_that_is_not_as_the_modules_forward_is_not_used() -> None:
    target = model()
    (how, reason), _ = infers(jitted(target, {"RMSNorm": Forgetful}), target, X)
    assert how is None
    assert reason.startswith("failed verification on weight: float32[8], x: float32[4, 8]: values differ by up to")


def test_a_layer_without_a_right_gradient_is_used_where_none_is_needed() -> None:
    target = model()
    assert infers(jitted(target, {"RMSNorm": Detached}), target, X) == [TRACED, TRACED]
    with pytest.warns(HubNotice, match="the gradient of weight"):
        (how, reason), _ = trains(jitted(target, {"RMSNorm": Detached}), target, X)
    assert how is None
    assert "the gradient of weight" in reason
    assert infers(jitted(target, {"RMSNorm": Inference}), target, X) == [TRACED, TRACED]
    reason = "Inference has has_backward = False, and a gradient is needed"
    assert trains(jitted(target, {"RMSNorm": Inference}), target, X) == [(None, reason)] * 2


@pytest.mark.skipif(not can_fork(), reason="without a fork, what cannot be pickled is tried in this process")
def test_a_layer_that_ends_its_process_costs_itself_its_place() -> None:
    class Ends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                os._exit(1)
            return norm(x, self.weight, self.eps)

    target = RMSNorm()
    with pytest.warns(HubNotice, match="is not used"):
        ((how, reason),) = infers(jitted(target, {"RMSNorm": Ends}), target, X)
    assert how is None
    assert "ended" in reason or "exit" in reason


def test_what_a_layer_alone_reads_of_a_module_is_guarded() -> None:
    class Reads(nn.Module):
        exact: bool

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
            return y if self.exact else y * 2

    target = RMSNorm()
    compiled = jitted(target, {"RMSNorm": Reads})
    assert infers(compiled, target, X) == [TRACED]
    target.eps = 0.5
    assert infers(compiled, target, X) == [TRACED, TRACED]
    target.exact = False
    with pytest.warns(HubNotice, match="values differ"):
        assert infers(compiled, target, X)[-1][0] is None
    with torch.no_grad():
        target.weight.mul_(3)
    target.weight = nn.Parameter(torch.rand(8))
    infers(compiled, target, X)


def _read(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if module.exact else x * 2


class Helped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _read(self, F.rms_norm(x, self.weight.shape, self.weight, self.eps))


class WithinBlock(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0, *, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y = F.silu(self.up(self.norm(x))) * scale + pair[0] - pair[1]
        return y if self.norm.exact else y * 2


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
@pytest.mark.parametrize(("name", "layer"), [("RMSNorm", Helped), ("Block", WithinBlock)])
def test_what_a_layer_reads_elsewhere_of_a_module_is_guarded_too(name: str, layer: type) -> None:
    target = Model()
    compiled = jitted(target, {name: layer})
    assert infers(compiled, target, X) == [TRACED]
    target.block.norm.exact = False
    assert infers(compiled, target, X)[-1][0] is None


def test_a_number_that_only_the_modules_forward_reads_is_a_constant_of_its_layer() -> None:
    class Ignores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    target = RMSNorm()
    compiled = jitted(target, {"RMSNorm": Ignores}, dynamic=True)
    assert infers(compiled, target, X) == [TRACED]
    for eps in (0.5, 0.25):
        target.eps = eps
        with pytest.warns(HubNotice, match="values differ"):
            infers(compiled, target, X)


def test_a_module_with_hooks_keeps_its_own_forward() -> None:
    target, seen = model(), []
    compiled = jitted(target, {"RMSNorm": Fused})
    assert infers(compiled, target, X) == [TRACED, TRACED]
    target[1].register_forward_hook(lambda module, args, output: seen.append(output.shape) or output + 1)
    assert infers(compiled, target, X)[-2:] == [(None, "it has hooks"), TRACED]
    assert seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.silu(self.up(self.norm(x))) * scale + pair[0] - pair[1]


class FusedBlock(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0, *, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y = F.rms_norm(x, (8,), self.norm.weight, self.norm.eps)
        return scale * F.silu(F.linear(y, self.up.weight, self.up.bias)) + (pair[0] - pair[1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x, 2.0, pair=(x, x + 1)), pair=(x, x * 2))


@pytest.mark.filterwarnings("ignore::forge.hub.HubNotice")
def test_of_two_layers_one_within_the_other_the_outer_one_is_taken_where_it_is_right() -> None:
    class WrongBlock(nn.Module):
        def forward(
            self, x: torch.Tensor, scale: float = 1.0, *, pair: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            return x

    target = Model()
    compiled = jitted(target, {"Block": FusedBlock, "RMSNorm": Fused})
    assert trains(compiled, target, X) == [TRACED]
    assert "torch.rsqrt" not in operations(compiled)
    compiled = jitted(target, {"Block": WrongBlock, "RMSNorm": Called})
    assert sorted(how or "" for how, _ in trains(compiled, target, X)) == ["", "one call"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_lengths_that_are_symbols_are_verified_at_odd_ones_too(checkpointed: bool) -> None:
    target = RMSNorm()
    call = target
    if checkpointed:
        call = lambda x: torch.utils.checkpoint.checkpoint(target, x, use_reentrant=False)
    compiled = jitted(call, {"RMSNorm": Called}, dynamic=True)
    for rows in (4, 9):
        assert trains(compiled, target, torch.randn(rows, 8)) == [CALLED]


@pytest.mark.parametrize(("layer", "how"), [(Fused, TRACED), (Called, CALLED)])
def test_a_layer_right_after_a_region_without_gradients_has_its_own(layer: type, how: tuple) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.sum()
            return self.norm(x) + scale

    target = Scaled()
    assert trains(jitted(target, {"RMSNorm": layer}), target, X) == [how]


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, -1)[0]


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


class Lists(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + 1}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Identity(), "what it returns shares memory with what it is given"),
        (Halves(), "what it returns shares memory with what it is given"),
        (Doubles(), "it changes a tensor that others see"),
        (Lists(), "it returns something else than tensors"),
        (nn.BatchNorm1d(8), "its own forward may change its statistics"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_a_layer_could_not_do_in_the_same_way_is_left_to_the_module(module: nn.Module, reason: str) -> None:
    class Other(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + 0

    def call(x: torch.Tensor) -> Any:
        y = module(x)
        return (y["x"] if isinstance(y, dict) else y) * 3

    compiled = jitted(call, {type(module): Other})
    given = X.clone(), X.clone()
    torch.testing.assert_close(compiled(given[0]), call(given[1]))
    torch.testing.assert_close(*given)
    assert uses(compiled) == [(None, reason)]


def test_a_module_under_autocast_keeps_its_own_forward() -> None:
    target = model()
    compiled = jitted(target, {"RMSNorm": Fused})
    with torch.autocast("cpu", torch.bfloat16):
        assert infers(compiled, target, X)[0] == (None, "it is called under torch.autocast")


def test_two_threads_with_different_layers_get_their_own() -> None:
    target, found = model(), {}

    def run(layer: type) -> None:
        compiled = jitted(target, {"RMSNorm": layer})
        while not forge.explain(compiled).graphs:  # a module that is called while another thread compiles runs in eager
            found[layer] = infers(compiled, target, X)

    threads = [threading.Thread(target=run, args=(layer,)) for layer in (Fused, Called)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {Fused: [TRACED] * 2, Called: [CALLED] * 2}


def test_traced_layers_are_part_of_the_key_of_a_program_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    target = model()
    for layer, cached in ((Fused, 0), (Fused, 1), (Inference, 0), (None, 0)):
        torch._dynamo.reset()
        compiled = jitted(target, {"RMSNorm": layer} if layer else {}, cache=True)
        assert len(infers(compiled, target, X)) == (2 if layer else 0)
        assert forge.explain(compiled).cached == cached, forge.explain(compiled).uncached
    compiled = jitted(target, {"RMSNorm": Called}, cache=True)
    infers(compiled, target, X)
    assert forge.explain(compiled).uncached == ["layer Called is one call, which is of one process"]


# which layer


SOURCE = """
import torch
from torch import nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Stateful(RMSNorm):
    def __init__(self):
        super().__init__()
        self.calls = 0


class Other(nn.Module):
    def forward(self, x, residual):
        return x
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"__init__.py": "from . import layers\n", "layers.py": SOURCE, "metadata.json": metadata("norms", "_n_1")}
    return write(tmp_path / "norms", {f"torch-universal/{path}": text for path, text in files.items()})


@pytest.fixture
def unregistered() -> Iterator[None]:
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        yield


def test_layers_of_a_repository_are_for_modules_of_their_names(folder: Path) -> None:
    target = model()
    compiled = jitted(target, [folder])
    assert infers(compiled, target, X) == [TRACED, TRACED]
    assert forge.explain(compiled).layers[0].layer == "norms.RMSNorm"
    repository = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    for value in (f"{folder}:RMSNorm", str(folder), repository, {"cpu": repository}):
        assert infers(jitted(target, {"RMSNorm": value}), target, X) == [TRACED, TRACED]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("Stateful", "norms.Stateful: it has a constructor of its own, and a layer has no state"),
        ("Other", "norms.Other: its forward takes (x, residual), and that of the module (x: torch.Tensor)"),
    ],
)
def test_a_layer_that_is_none_for_a_module_says_why(folder: Path, layer: str, reason: str) -> None:
    target = RMSNorm()
    assert infers(jitted(target, {"RMSNorm": f"{folder}:{layer}"}), target, X) == [(None, reason)]


def test_a_source_that_cannot_be_used_is_an_error_of_jit(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no layer LayerNorm; there are: Other, RMSNorm, Stateful"):
        forge.jit(model(), layers={"LayerNorm": str(folder)})
    with pytest.raises(TypeError, match="layers: 'RMSNorm' is given 3, which is no layer, repository or folder"):
        forge.jit(model(), layers={"RMSNorm": 3})
    with pytest.raises(ValueError, match=r"^forge\.jit: layers is 'RMSNorm', but must be a mapping"):
        forge.jit(model(), layers="RMSNorm")
    forge.jit(model(), layers={"RMSNorm": {"npu": "./nowhere"}})  # for no device of this machine


def test_modules_that_the_librarys_decorators_name_get_what_is_registered(folder: Path, unregistered: None) -> None:
    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Decorated(RMSNorm):
        pass

    @kernels.use_kernel_forward_from_hub("RMSNorm", condition=lambda module: False)
    class Conditional(RMSNorm):
        pass

    target = nn.Sequential(Decorated(), Conditional())
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": kernels.LocalLayerRepository(folder, layer_name="RMSNorm")}}):
        compiled = jitted(target, "registered")
    assert infers(compiled, target, X) == [TRACED, (None, "the condition of its decorator says no")]
    assert infers(jitted(target, "registered"), target, X) == []


def test_a_decorated_function_is_a_layer_too() -> None:
    @kernels.use_kernel_forward_from_hub("rotated")
    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    class Rotated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((b.neg(), a), -1)

    class Turns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rotate(x) * 2

    target = Turns()
    assert infers(jitted(target, {"rotated": Rotated}), target, X) == [TRACED]


def test_the_mode_of_a_call_chooses_among_layers() -> None:
    mode = kernels.Mode
    offers = read_layers({"RMSNorm": {"cpu": {mode.INFERENCE | mode.TORCH_COMPILE: Inference, mode.TRAINING: Fused}}})
    executor, cpu = LayerExecutor(offers), torch.device("cpu")
    assert executor.find(RMSNorm(), cpu, training=False).kind is Inference
    assert executor.find(RMSNorm(), cpu, training=True).kind is Fused
    assert executor.find(RMSNorm(), torch.device("cuda"), training=True).reason == "no layer is for cuda"
    only = LayerExecutor(read_layers({"RMSNorm": {"cpu": {mode.INFERENCE: Fused}}}))
    assert only.find(RMSNorm(), cpu, training=False).kind is Fused
    assert only.find(RMSNorm(), cpu, training=True).reason == "no layer is for training"


@pytest.mark.parametrize(("capability", "layer"), [((7, 0), Fused), ((9, 0), Called), ((8, 0), Called)])
def test_the_capability_of_the_tensors_device_chooses(
    capability: tuple[int, int], layer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = kernels.CUDAProperties(min_capability=80, max_capability=90)
    narrow = kernels.Device("cuda", properties=properties)
    offers = read_layers({"RMSNorm": {"cuda": Fused, narrow: Called}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert LayerExecutor(offers).find(RMSNorm(), torch.device("cuda:1"), training=False).kind is layer
