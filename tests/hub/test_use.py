"""Kernels in models: the place of each, several side by side, and the unchanged rest."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge
from forge.executors.hubex import kernel_executor
from forge.hub import HubNotice
from tests.hub.kernels import metadata, process_restored, write
from tests.hub.repositories import GELU, Repository, claimed, declined, executor, gelu, run

HEADER = "import torch\nimport torch.nn.functional as F\n"


def executors_of(jitted: Any, name: str) -> list[str]:
    return [row.executor for row in forge.explain(jitted).rows if row.operation.endswith(name)]


# several kernels of one operation


SHIFTED = "def {name}(x):\n    return F.gelu(x) + {shift}\n\n\n"
TWO = """\
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.gelu
  type_alias: {T: [float32, float64], W: [float32]}
  kernels:
  - {name: default, kernel_name: default, arg_meta: {input: T}, args: {x: input}, where: "approximate == 'none'",
     tolerance: {float32: [0.5, 0.5], float64: [0.5, 0.5]}}
  - {name: wide, kernel_name: wide, arg_meta: {input: W}, shape: {input: "[..., 8*H]"}, args: {x: input},
     where: "approximate == 'none'", tolerance: {float32: [0.5, 0.5]}}
"""


@pytest.fixture
def gelus(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes repositories of gelus, each with its own shift."""

    def make(name: str, manifest: str, **shifts: float) -> Path:
        code = HEADER + "\n\n" + "".join(SHIFTED.format(name=each, shift=shift) for each, shift in shifts.items())
        files = {"__init__.py": code, "forge_kernels.yaml": manifest, "metadata.json": metadata(name, f"_{name}_ab12")}
        return write(tmp_path / name, {f"torch-universal/{path}": text for path, text in files.items()})

    return make


def test_a_default_and_a_specialised_kernel_are_picked_call_by_call(gelus: Callable) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(x), F.gelu(x[:, :7]), F.gelu(x.double()), F.gelu(x.bfloat16()), F.gelu(x, approximate="tanh")

    jitted = forge.jit(model, kernels=[gelus("two", TWO, default=0.1, wide=0.2)])
    x = torch.randn(3, 16)
    shifts = [(ours - theirs).double().mean().item() for ours, theirs in zip(jitted(x), model(x), strict=True)]
    assert shifts == pytest.approx([0.2, 0.1, 0.1, 0, 0], abs=1e-4)
    rows = [row for row in forge.explain(jitted).rows if row.operation == "torch.nn.functional.gelu"]
    assert [row.executor for row in rows[:3]] == ["acme.wide", "acme.default", "acme.default"]
    assert len(rows) == 5 and not any(row.executor.startswith("acme") for row in rows[3:])
    declined = [dict(row.declined).get("acme.wide") for row in rows]
    assert declined == [
        None,
        "shape [3, 7] does not fit [..., 8*H]",
        "dtype float64 not in W (float32)",
        "dtype bfloat16 not in W (float32)",
        "approximate = 'tanh' is not 'none'",
    ]


PARTIAL = """\
forge_kernels: 1
library: {name: other}
ops:
- op: torch.nn.functional.gelu
  kernels:
  - {name: wide, kernel_name: wide, priority: 1, arg_meta: {input: float32}, shape: {input: "[..., 8*H]"},
     args: {x: input}, where: "approximate == 'none'", tolerance: {float32: [0.5, 0.5]}}
"""


@pytest.mark.parametrize("replace", [False, True])
def test_a_partial_manifest_keeps_the_default_unless_it_replaces_it(gelus: Callable, replace: bool) -> None:
    partial = PARTIAL.replace("  kernels:", "  replace: true\n  kernels:") if replace else PARTIAL
    sources = [gelus("two", TWO, default=0.1, wide=0.2), gelus("partial", partial, wide=0.3)]

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(x), F.gelu(x[:, :7])

    jitted, x = forge.jit(model, kernels=sources), torch.randn(3, 16)
    shifts = [(ours - theirs).mean().item() for ours, theirs in zip(jitted(x), model(x), strict=True)]
    assert shifts == pytest.approx([0.3, 0 if replace else 0.1], abs=1e-4)
    assert executors_of(jitted, "gelu") == ["other.wide", "torch" if replace else "acme.default"]


RANKED = """\
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.gelu
  kernels:
  - {name: wrong, kernel_name: wrong, priority: 3, args: {x: input}, where: "approximate == 'none'"}
  - {name: narrow, kernel_name: right, priority: 2, args: {x: input}, where: [approximate == 'none', input.ndim == 9]}
  - {name: right, kernel_name: right, priority: 1, args: {x: input}, where: "approximate == 'none'"}
"""


def test_a_better_kernel_that_fails_gives_way_to_the_next(gelus: Callable) -> None:
    """ColossalAI tries nothing else when its first choice fails."""
    jitted, x = forge.jit(gelu, kernels=[gelus("ranked", RANKED, wrong=0.1, right=0.0)]), torch.randn(3, 5)
    with pytest.warns(HubNotice, match="kernel acme.wrong of .* is not used: failed verification"):
        torch.testing.assert_close(jitted(x), gelu(x))
    (row,) = [row for row in forge.explain(jitted).rows if row.operation == "torch.nn.functional.gelu"]
    assert row.executor == "acme.right"
    (first, why), (second, reason) = row.declined
    assert (first, second, reason) == ("acme.wrong", "acme.narrow", "input.ndim = 2 is not 9")
    assert why.startswith("failed verification on input: float32[") and "values differ by up to 0.1" in why


# gradients


@pytest.mark.parametrize("grad", ["", "grad: none"], ids=["absent", "none"])
def test_a_kernel_without_a_gradient_runs_in_inference_and_is_declined_in_training(
    repository: Callable, grad: str
) -> None:
    """hub-facts 3: most published kernels silently lose the gradient."""
    made = repository("forward_only", "def f(x):\n    return F.gelu(x.detach())", **GELU)
    manifest = made.folder / "forge_kernels.yaml"
    manifest.write_text(manifest.read_text().replace("grad: composite", grad or "priority: 0"))
    by = executor(made)
    assert claimed(run(gelu, torch.randn(4), by=by), made) == 1
    assert declined(run(gelu, torch.randn(4, requires_grad=True), by=by), made) == (
        "the implementation has no gradient, and one is needed"
    )
    jitted = forge.jit(gelu, executors=[by, "torch"])
    with torch.no_grad():
        jitted(torch.randn(4, requires_grad=True))
    assert claimed(forge.explain(jitted), made) == 1


FUNCTION = """
    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.gelu(x)

        @staticmethod
        def backward(ctx, grad_output):
            return {factor} * torch.ops.aten.gelu_backward(grad_output, *ctx.saved_tensors)

    def f(x):
        assert x.is_contiguous()
        return Gelu.apply(x)
"""


def test_an_autograd_function_inside_of_a_kernel_is_its_gradient(repository: Callable) -> None:
    made = repository("function", FUNCTION.format(factor=1), **GELU, grad="autograd", layout="contiguous")
    by = executor(made)
    explained = run(gelu, torch.randn(4, 6, requires_grad=True), by=by)
    assert [row.operation for row in explained.rows if row.executor == "acme.function"] == [
        "hub.acme.function.forward",
        "hub.acme.function.backward",
    ]
    assert claimed(run(gelu, torch.randn(6, 4, requires_grad=True).t(), by=by), made) == 2
    assert claimed(run(gelu, torch.randn(4), by=by), made) == 1
    model = Gelus()
    jitted = forge.jit(model, executors=[by, "torch"])
    same_training(jitted, model, list(model.parameters()), steps=2)
    assert claimed(forge.explain(jitted), made) == 4


def test_a_wrong_autograd_function_is_found(repository: Callable) -> None:
    made = repository("wrong_function", FUNCTION.format(factor=1.01), **GELU, grad="autograd", layout="contiguous")
    explained = run(gelu, torch.randn(4, requires_grad=True), by=executor(made))
    assert "the gradient of input: values differ by up to" in declined(explained, made)


def test_a_kernel_that_torchs_autograd_does_not_know_is_declined(repository: Callable) -> None:
    """hub-facts 3: training silently gives grad_fn None."""
    made = repository("no_graph", "def f(x):\n    return F.gelu(x.detach())", **GELU, grad="autograd")
    x = torch.randn(4, requires_grad=True)
    assert "raises RuntimeError: its result has no grad_fn" in declined(run(gelu, x, by=executor(made)), made)
    trusted = forge.jit(gelu, executors=[kernel_executor([made.folder], verify=False), "torch"])
    with pytest.raises(RuntimeError, match="its result has no grad_fn"):
        trusted(x)


def test_a_gradient_that_an_autograd_function_leaves_out_is_found(repository: Callable) -> None:
    code = """
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(w)
                return x * w

            @staticmethod
            def backward(ctx, grad_output):
                return grad_output * ctx.saved_tensors[0], None

        def f(x, w):
            return Scale.apply(x, w)
    """
    made = repository("left_out", code, **SCALE, grad="autograd", where="input.shape == other.shape")
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    assert "the gradient of other: values differ" in declined(run(torch.mul, x, w, by=executor(made)), made)


SCALE = {"op": "torch.mul", "arg_meta": "{input: T, other: T}", "args": "{x: input, w: other}"}
BOTH = """
    def f(x, w):
        return x * w

    def g(grad_output, x, w):
        return grad_output * w, grad_output * x
"""


def test_a_gradient_of_a_frozen_input_is_dropped(repository: Callable) -> None:
    grad = "{kernel_name: g, args: {grad_output: grad_output, x: input, w: other}, returns: [input, other]}"
    made = repository("frozen", BOTH, **SCALE, grad=grad, where="input.shape == other.shape")
    by = executor(made)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    for inputs in ((x, w), (w, x), (x, x.detach().clone().requires_grad_())):
        assert claimed(run(lambda a, b: a * b, *inputs, by=by), made) == 2


class Gelus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


GELU_BACKWARD = """
    def f(x):
        return F.gelu(x)

    def g(grad_output, x):
        return torch.ops.aten.gelu_backward(grad_output, x)
"""
GRAD = "{kernel_name: g, args: {grad_output: grad_output, x: input}, returns: [input]}"


@pytest.fixture
def trained(repository: Callable) -> Repository:
    """Return a repository with a gelu that has its own backward."""
    return repository("trained", GELU_BACKWARD, **GELU, grad=GRAD)


def same_training(ours: Callable, theirs: nn.Module, parameters: list, steps: int = 1) -> None:
    """Run both and compare the gradients, accumulated over `steps`, of their shared parameters."""
    found = []
    inputs = [torch.randn(3, 8) for _ in range(steps)]
    for function in (ours, theirs):
        for each in parameters:
            each.grad = None
        for x in inputs:
            function(x).square().mean().backward()
        found.append([None if each.grad is None else each.grad.clone() for each in parameters])
    torch.testing.assert_close(*found)


def test_gradients_add_up_over_steps(trained: Repository) -> None:
    model = Gelus()
    jitted = forge.jit(model, executors=[executor(trained), "torch"])
    same_training(jitted, model, list(model.parameters()), steps=3)
    assert claimed(forge.explain(jitted), trained) == 4


def test_frozen_weights_have_no_gradient_and_those_before_a_kernel_have_theirs(trained: Repository) -> None:
    model = Gelus()
    model.layers[1].requires_grad_(False)
    jitted = forge.jit(model, executors=[executor(trained), "torch"])
    same_training(jitted, model, list(model.parameters()))
    assert model.layers[1].weight.grad is None and model.layers[0].weight.grad is not None
    assert claimed(forge.explain(jitted), trained) == 4


KINDS = {
    "kernel": (GELU_BACKWARD, {"grad": GRAD}),
    "composite": ("def f(x):\n    return F.gelu(x)", {"grad": "composite"}),
    "autograd": (FUNCTION.format(factor=1), {"grad": "autograd", "layout": "contiguous"}),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_kernels_run_in_checkpointed_regions(repository: Callable, kind: str, dynamic: bool | None) -> None:
    class Checkpointed(Gelus):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda y, layer=layer: F.gelu(layer(y)), x, use_reentrant=False)
            return x

    code, entry = KINDS[kind]
    made, model = repository(f"checkpointed_{kind}", code, **GELU, **entry), Checkpointed()
    jitted = forge.jit(model, executors=[executor(made), "torch"], dynamic=dynamic)
    same_training(jitted, model, list(model.parameters()), steps=2)
    assert claimed(forge.explain(jitted), made) >= 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_kernels_run_where_gradients_are_off(trained: Repository, mode: Callable) -> None:
    model = Gelus()
    jitted = forge.jit(model, executors=[executor(trained), "torch"])
    x = torch.randn(3, 8)
    with mode():
        out = jitted(x)
        assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
        torch.testing.assert_close(out, model(x))
    assert claimed(forge.explain(jitted), trained) == 2
    same_training(jitted, model, list(model.parameters()))  # and then with gradients


def test_kernels_run_under_autocast(trained: Repository) -> None:
    model, x = Gelus(), torch.randn(3, 8)
    jitted = forge.jit(model, executors=[executor(trained), "torch"])
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = jitted(x), model(x)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    told = forge.explain(jitted)
    assert told.eager == []
    # the gelus run in bfloat16 there, which the kernel does not take
    assert {reason for row in told.rows for _, reason in row.declined} == {"dtype bfloat16 not in T (float32)"}


# state that a failed call leaves alone


def test_the_models_own_object_stays_as_it_was(trained: Repository) -> None:
    model = Gelus()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes, forward = set(vars(model)), model.forward
    modules = [(name, type(each)) for name, each in model.named_modules()]
    jitted = forge.jit(model, kernels=[trained.folder])
    x = torch.randn(3, 8)
    jitted(x).sum().backward()
    assert type(model) is Gelus and model.forward == forward and set(vars(model)) == attributes
    assert [(name, type(each)) for name, each in model.named_modules()] == modules
    assert model.state_dict().keys() == jitted.state_dict().keys() == before.keys()
    assert calls == ["hook"] and isinstance(jitted, Gelus)
    model(x)
    assert calls == ["hook", "hook"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    pickled = pickle.loads(pickle.dumps(Gelus().to(torch.float64)))
    assert type(pickled) is Gelus
    file = io.BytesIO()
    torch.save(jitted.state_dict(), file)
    file.seek(0)
    Gelus().load_state_dict(torch.load(file))
    assert claimed(forge.explain(jitted), trained) == 4
    copied = copy.deepcopy(jitted)
    assert claimed(explained(copied, x), trained) == 4


def explained(jitted: Callable, x: torch.Tensor) -> Any:
    jitted(x).sum().backward()
    return forge.explain(jitted)


# for the process


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the kernels that a test registers for the process afterwards."""
    with process_restored():
        yield


def test_kernels_of_the_process_serve_jit_and_torch_compiles_backend(
    trained: Repository, process: None, asked: list
) -> None:
    before = forge.jit(gelu)
    forge.use_kernels([trained.folder])
    x = torch.randn(4)
    jitted, compiled = forge.jit(gelu), torch.compile(gelu, backend="forge")
    torch.testing.assert_close([jitted(x), compiled(x)], [gelu(x)] * 2)
    assert claimed(forge.explain(jitted), trained) == 1
    assert len(asked) == 2
    torch.testing.assert_close(before(x), gelu(x))
    with pytest.raises(ValueError, match=r"kernel acme\.trained of torch\.nn\.functional\.gelu is there already"):
        forge.use_kernels([trained.folder])


# lengths that change


class HandWritten(nn.Module):
    """A norm as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


NORM = {
    "pattern": "rms_norm",
    "arg_meta": "{x: T, weight: T}",
    "shape": '{x: "[..., H]", weight: "[H]"}',
    "args": "{x: x, weight: weight, eps: eps}",
}


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.one_in(2)
def test_a_hand_written_norm_is_found_once_for_all_lengths(
    repository: Callable, training: bool, dynamic: bool | None
) -> None:
    """pattern-facts: eps becomes a separate input with symbolic shapes, and the norm was not matched."""
    code = "def f(x, weight, eps):\n    return F.rms_norm(x, weight.shape, weight, eps)"
    made = repository("lengths", code, **NORM)
    model = nn.Sequential(HandWritten(), nn.Linear(8, 8), HandWritten()).requires_grad_(training)
    jitted = forge.jit(model, executors=[executor(made), "torch"], dynamic=dynamic, fullgraph=True)
    for length in (3, 5, 6, 9):
        x = torch.randn(2, length, 8)
        actual, expected = jitted(x), model(x)
        torch.testing.assert_close(actual, expected)
        if training:
            g = torch.randn(2, length, 8)
            wanted = list(model.parameters())
            ours, theirs = (torch.autograd.grad(out, wanted, g) for out in (actual, expected))
            torch.testing.assert_close(ours, theirs)
    explained = forge.explain(jitted)
    assert explained.graphs == (1 if dynamic else 2)
    found = [row for row in explained.rows if row.operation == "pattern.rms_norm"]
    assert [row.executor for row in found] == ["acme.lengths"] * 2 * explained.graphs


def test_a_length_that_is_not_known_is_no_proof_of_a_condition(repository: Callable) -> None:
    made = repository(
        "even", "def f(x):\n    return F.gelu(x)", **{**GELU, "shape": '{input: "[S]"}', "where": '"S % 2 == 0"'}
    )
    jitted = forge.jit(gelu, executors=[executor(made), "torch"], dynamic=True)
    for length in (4, 5):
        x = torch.randn(length)
        torch.testing.assert_close(jitted(x), gelu(x))
    assert "S % 2" in declined(forge.explain(jitted), made)
