"""The optimizer forge.optim.AdamW against torch.optim.AdamW: results, state, GradScaler, and warnings if its kernel
does not run.

Without a GPU, the kernel runs in Triton's interpreter, in a separate process that runs this file; other tests use
torch's fused AdamW in its place.
"""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge import optim
from forge.hub import HubNotice
from tests.hub.test_examples import HAS_CUDA, INTERPRETED, ROOT, triton_is_missing

RUNS_KERNEL = HAS_CUDA or INTERPRETED
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
STEPS = 20
SHAPES = ((3,), (5, 7), (), (0, 4), (2048 * 8 + 5,))  # the last has more than one chunk
SMALL = ((3,), (5, 7))

MOMENTS = ("exp_avg", "exp_avg_sq")

kernel = pytest.mark.skipif(
    not RUNS_KERNEL, reason="there is no GPU; without one it runs in a process of its own, with TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def _notices_again() -> Iterator[None]:
    optim._notice.cache_clear()
    optim._kernel.cache_clear()
    with warnings.catch_warnings():
        if not RUNS_KERNEL:
            warnings.simplefilter("ignore", HubNotice)
        yield


def parameters(
    shapes: tuple[tuple[int, ...], ...] = SMALL, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the same parameters twice."""
    values = [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]
    first, second = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return first, second


def train(*runs: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]], steps: int = STEPS) -> None:
    """Run steps of each optimizer on its parameters, with the same gradients, which decrease."""
    for number in range(steps):
        for each in zip(*(params for _, params in runs), strict=True):
            grad = torch.randn_like(each[0]) * 0.7**number
            for param in each:
                param.grad = grad.clone()
        for optimizer, _ in runs:
            optimizer.step()


def assert_same(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    """Check parameters computed in float32 in another order, up to the effects of rounding in units of the dtype."""
    tolerance = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-4), torch.float64: (1e-12, 1e-12)}
    for one, other in zip(ours, theirs, strict=True):
        rtol, atol = tolerance[one.dtype]
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def ran_kernel(optimizer: forge.optim.AdamW) -> bool:
    return all(run.step is not None for run in optimizer._runs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"amsgrad": True, "maximize": True, "betas": (0.9, 0.5)},
        {"lr": torch.tensor(3e-3), "betas": (0.0, 0.0), "weight_decay": 0.0},
    ],
    ids=["defaults", "numbers", "amsgrad and maximize", "lr in a tensor"],
)
@kernel
def test_twenty_steps_of_the_kernel_are_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    ours, theirs = parameters(dtype=dtype)
    optimizer = forge.optim.AdamW(ours, **options)
    train((optimizer, ours), (torch.optim.AdamW(theirs, fused=True, **options), theirs))
    assert ran_kernel(optimizer)
    assert_same(ours, theirs)


@kernel
def test_each_step_in_bfloat16_is_torchs_within_its_rounding() -> None:
    """Each step starts from torch's state: Triton's interpreter rounds to bfloat16 towards zero, which accumulates."""
    ours, theirs = parameters(dtype=torch.bfloat16)
    optimizer, other = forge.optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for _ in range(STEPS):
        train((optimizer, ours), (other, theirs), steps=1)
        for one, theirs_ in zip(ours, theirs, strict=True):
            pairs = [(one, theirs_), *((optimizer.state[one][key], other.state[theirs_][key]) for key in MOMENTS)]
            for mine, exact in pairs:
                torch.testing.assert_close(mine, exact, rtol=2**-7, atol=1e-5)
                mine.data.copy_(exact)
    assert ran_kernel(optimizer)


@kernel
def test_parameters_of_any_size_and_memory_take_part() -> None:
    ours, theirs = parameters(SHAPES)
    ours.append(torch.nn.Parameter(torch.arange(12.0, device=DEVICE).view(4, 3).t()))  # no rows side by side
    ours.append(torch.nn.Parameter(torch.arange(9.0, device=DEVICE)[1:]))  # 16 does not divide its address
    theirs += [torch.nn.Parameter(each.detach().clone()) for each in ours[-2:]]
    optimizer, other = forge.optim.AdamW(ours), torch.optim.AdamW(theirs, fused=True)
    train((optimizer, ours), (other, theirs), steps=2)
    ours[-2].grad = torch.ones(3, 4, device=DEVICE)  # of other strides, which torch's takes on a CPU alone
    theirs[-2].grad = torch.ones_like(theirs[-2])
    for each in (optimizer, other):
        each.step()
    assert ran_kernel(optimizer)
    assert_same(ours, theirs)
    assert [optimizer.state[param]["step"].item() for param in ours] == [3] * len(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gradient_of_other_strides_is_read_as_what_it_is(dtype: torch.dtype) -> None:
    """They are read by the kernel, if it runs, and by torch's fused AdamW, which uses the parameter's strides."""
    values = torch.randn(4, 6, dtype=dtype, device=DEVICE)
    ours, theirs = (torch.nn.Parameter(values.t().clone(memory_format=torch.preserve_format)) for _ in range(2))
    assert not ours.is_contiguous()
    optimizer, other = forge.optim.AdamW([ours]), torch.optim.AdamW([theirs], foreach=False)
    for _ in range(3):
        theirs.grad = torch.randn(6, 4, dtype=dtype, device=DEVICE)
        ours.grad = theirs.grad.clone()
        optimizer.step(), other.step()
    assert_same([ours], [theirs])


def test_a_parameters_memory_format_may_change_between_steps() -> None:
    ours, theirs = (torch.nn.Conv2d(3, 4, 2).to(DEVICE) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = forge.optim.AdamW(ours.parameters(), lr=0.1, amsgrad=True)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.1, amsgrad=True, foreach=False)
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        for model in (ours, theirs):
            model.to(memory_format=memory_format)
        train((optimizer, list(ours.parameters())), (other, list(theirs.parameters())), steps=2)
    assert_same(list(ours.parameters()), list(theirs.parameters()))


@kernel
def test_moments_in_float32_lose_nothing_in_half_precision() -> None:
    """Their changes are smaller than bfloat16's steps, so they are compared with moments of a float32 copy."""
    ours, _ = parameters(dtype=torch.bfloat16)
    copies = [torch.nn.Parameter(param.detach().float()) for param in ours]
    optimizer, exact = forge.optim.AdamW(ours, moment_dtype=torch.float32), torch.optim.AdamW(copies)
    for _ in range(STEPS):
        for one, other in zip(ours, copies, strict=True):
            one.grad = torch.rand_like(one)
            other.grad = one.grad.float()
        optimizer.step(), exact.step()
    for one, other in zip(ours, copies, strict=True):
        for name in MOMENTS:
            assert optimizer.state[one][name].dtype == torch.float32
            torch.testing.assert_close(optimizer.state[one][name], exact.state[other][name])
    again = forge.optim.AdamW(ours, moment_dtype=torch.float32)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in ours:
        assert torch.equal(again.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


@kernel
def test_the_table_of_addresses_is_made_again_only_when_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = parameters()
    optimizer, other = forge.optim.AdamW(ours), torch.optim.AdamW(theirs, fused=True)
    train((optimizer, ours), (other, theirs), steps=1)
    module = sys.modules[type(optimizer._runs[0].step).__module__]
    made, make = [], module._launch_of
    monkeypatch.setattr(module, "_launch_of", lambda *args: made.append(args) or make(*args))
    for _ in range(3):
        optimizer.step(), other.step()
    assert not made
    kept = [param.grad for param in ours]  # so that their memory is not reused
    for one, theirs_ in zip(ours, theirs, strict=True):
        one.grad = theirs_.grad = torch.randn_like(one)
    optimizer.step(), other.step()
    assert len(made) == 1 and len(kept) == len(ours)
    assert_same(ours, theirs)


@kernel
@pytest.mark.parametrize("of", ["param", "exp_avg"])
def test_memory_given_to_a_tensor_between_steps_is_seen(of: str) -> None:
    ours, theirs = parameters()
    optimizer, other = forge.optim.AdamW(ours), torch.optim.AdamW(theirs, fused=True)
    train((optimizer, ours), (other, theirs), steps=2)
    moved = ours[0] if of == "param" else optimizer.state[ours[0]][of]
    before = moved.data
    moved.data = moved.data.clone()
    train((optimizer, ours), (other, theirs), steps=1)
    assert not torch.equal(before, moved) and ran_kernel(optimizer)
    assert_same(ours, theirs)


@kernel
def test_a_gradient_elsewhere_is_looked_at_again() -> None:
    module, _ = optim._kernel()
    tensors = {name: [torch.ones(3, device=DEVICE)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    tensors |= {"max_exp_avg_sqs": [], "steps": [torch.zeros((), device=DEVICE)]}
    step = partial(module.AdamWStep(), lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0)
    step(**tensors)
    with pytest.raises(RuntimeError, match=r"a gradient is \[2\] on .*, its parameter \[3\]"):
        step(**tensors | {"grads": [torch.ones(2, device=DEVICE)]})


@kernel
def test_groups_have_options_of_their_own_and_a_parameter_without_gradient_stays() -> None:
    ours, theirs = parameters(((3,), (4,), (5,)))
    runs = []
    for kind, (a, b, c) in ((forge.optim.AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind([{"params": [a], "lr": 0.1, "weight_decay": 0.0}, {"params": [b, c]}])
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
        optimizer.step()
        runs.append(optimizer)
    assert_same(ours, theirs)
    assert ran_kernel(runs[0]) and ours[2] not in runs[0].state


@kernel
def test_dtypes_may_be_mixed_in_a_group() -> None:
    (a, b), (c, d) = parameters()
    ours, theirs = ([one, torch.nn.Parameter(other.detach().half())] for one, other in ((a, b), (c, d)))
    optimizer = forge.optim.AdamW(ours)
    train((optimizer, ours), (torch.optim.AdamW(theirs, fused=True), theirs), steps=3)
    assert ran_kernel(optimizer)
    assert_same(ours, theirs)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_grad_scalers_scale_is_taken_and_a_step_that_overflows_is_left_out(overflows: bool) -> None:
    ours, theirs = parameters()
    values, before = [], [param.detach().clone() for param in ours]
    for optimizer, params in (
        (forge.optim.AdamW(ours), ours),
        (torch.optim.AdamW(theirs, fused=True), theirs),
    ):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
        scaler.scale(sum(param.square().sum() for param in params)).backward()
        if overflows:
            params[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        values.append((scaler.get_scale(), [optimizer.state[param]["step"].item() for param in params]))
        if not overflows:
            for param, value in zip(params, before, strict=True):  # the gradients have lost their scale
                torch.testing.assert_close(param.grad, 2 * value)
                torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.2 * value)
    assert values[0] == values[1] and values[0][1] == [0.0 if overflows else 1.0] * len(ours)
    assert_same(ours, theirs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_either_loads_the_others_state(ours_first: bool, fused: bool) -> None:
    """Three steps of one, then three of the other, equal six of torch's."""
    kinds = [forge.optim.AdamW, lambda params, **options: torch.optim.AdamW(params, fused=fused, **options)]
    first, second = kinds if ours_first else kinds[::-1]
    ours, theirs = parameters()
    options = {"lr": 1e-2, "amsgrad": True}
    one, reference = first(ours, **options), torch.optim.AdamW(theirs, **options)
    train((one, ours), (reference, theirs), steps=3)
    other = second(ours, lr=1.0, amsgrad=True)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    train((other, ours), (reference, theirs), steps=3)
    assert_same(ours, theirs)
    assert other.param_groups[0]["lr"] == 1e-2 and (ours_first or other.param_groups[0]["fused"])


def test_a_copy_and_a_pickle_go_on_where_it_was(tmp_path: Path) -> None:
    ours, theirs = parameters()
    optimizer, reference = forge.optim.AdamW(ours), torch.optim.AdamW(theirs)
    train((optimizer, ours), (reference, theirs), steps=2)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        params = again.param_groups[0]["params"]
        expected = copy.deepcopy(reference)
        train((again, params), (expected, expected.param_groups[0]["params"]), steps=2)
        assert_same(params, expected.param_groups[0]["params"])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    torch.load(tmp_path / "state", weights_only=True)


def test_hooks_run_once_and_a_closure_with_gradients() -> None:
    ours, _ = parameters()
    optimizer = forge.optim.AdamW(ours)
    ran = []
    optimizer.register_step_pre_hook(lambda *args: ran.append("before"))
    optimizer.register_step_post_hook(lambda *args: ran.append("after"))

    def closure() -> torch.Tensor:
        loss = sum(param.square().sum() for param in ours)
        loss.backward()
        return loss

    before = sum(param.square().sum() for param in ours)
    torch.testing.assert_close(optimizer.step(closure), before)
    assert ran == ["before", "after"]


def test_a_scheduler_changes_the_rate() -> None:
    ours, theirs = parameters()
    runs = []
    for optimizer, params in ((forge.optim.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(theirs, lr=0.1), theirs)):
        runs.append((optimizer, params))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer, _ in runs]
    for _ in range(3):
        train(*runs, steps=1)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"foreach": True}, "foreach=True asks for one of torch's own implementations: use torch.optim.AdamW"),
        ({"fused": False}, "fused=False asks for one of torch's own"),
        ({"differentiable": True}, "differentiable=True asks for one of torch's own"),
        ({"moment_dtype": torch.float16}, r"moment_dtype is torch\.float16, but must be torch\.float32, or None"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        forge.optim.AdamW(parameters()[0], **options)


def test_a_sparse_gradient_is_refused() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True, device=DEVICE)
    optimizer = forge.optim.AdamW(embedding.parameters())
    embedding(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a gradient is sparse, but must be dense; torch\.optim\.SparseAdam"):
        optimizer.step()


def test_where_the_kernel_cannot_run_torchs_does_with_one_notice() -> None:
    """The kernel never supports float64."""
    ours, theirs = ([torch.nn.Parameter(each.detach().double()) for each in params] for params in parameters())
    optimizer, reference = forge.optim.AdamW(ours), torch.optim.AdamW(theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train((optimizer, ours), (reference, theirs), steps=3)
    torch.testing.assert_close(ours, theirs)
    (notice,) = [each for each in caught if issubclass(each.category, HubNotice)]
    assert "forge.optim.AdamW runs torch's fused AdamW: " in str(notice.message)
    if RUNS_KERNEL:
        assert "a parameter is torch.float64" in str(notice.message)


def test_moments_of_another_dtype_are_refused_where_the_kernel_cannot_run() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=DEVICE))
    param.grad = torch.ones_like(param)
    with pytest.raises(
        NotImplementedError, match=r"moment_dtype=torch\.float32 for parameters of torch\.float64 needs"
    ):
        forge.optim.AdamW([param], moment_dtype=torch.float32).step()


@pytest.mark.skipif(not HAS_CUDA, reason="CUDA graphs need a GPU")
def test_a_step_in_a_cuda_graph_counts_and_reads_its_rate() -> None:
    ours, theirs = parameters()
    rate = torch.tensor(1e-2, device=DEVICE)
    optimizer, reference = forge.optim.AdamW(ours, lr=rate, capturable=True), torch.optim.AdamW(theirs, lr=1e-2)
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for number in range(3):
        rate.fill_(1e-2 / (number + 1))
        graph.replay()
    reference.step()
    for number in range(3):
        reference.param_groups[0]["lr"] = 1e-2 / (number + 1)
        reference.step()
    assert_same(ours, theirs)


@kernel
@pytest.mark.parametrize(
    ("name", "made", "text"),
    [
        ("grads", lambda: torch.ones(2, device=DEVICE), r"a gradient is \[2\] on .*, its parameter \[3\]"),
        (
            "grads",
            lambda: torch.ones(3, device=DEVICE).double(),
            r"a gradient is torch\.float64, but must be torch\.float32 or",
        ),
        (
            "exp_avgs",
            lambda: torch.ones(3, device=DEVICE).bfloat16(),
            r"a moment of a torch\.float32 parameter is torch\.bfloat16",
        ),
        (
            "exp_avg_sqs",
            lambda: torch.ones(6, device=DEVICE)[::2],
            "a moment must have the shape, the strides and the device",
        ),
        (
            "steps",
            lambda: torch.zeros((), device=DEVICE).double(),
            r"a step is torch\.float64 on .*, but must be one float32",
        ),
        ("params", lambda: torch.ones(3, device=DEVICE).double(), r"a parameter is torch\.float64"),
        ("params", lambda: torch.ones(1, device=DEVICE).expand(3), "a parameter's elements do not lie side by side"),
        ("grads", None, "as many gradients, moments and steps as parameters"),
    ],
)
def test_the_kernel_says_what_does_not_fit(name: str, made: Callable[[], torch.Tensor] | None, text: str) -> None:
    module, reason = optim._kernel()
    assert reason is None
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    lists = {each: [torch.ones(shape, device=DEVICE) for shape in SMALL] for each in names}
    lists |= {"max_exp_avg_sqs": [], "steps": [torch.zeros((), device=DEVICE) for _ in SMALL]}
    lists[name][:1] = [] if made is None else [made()]
    with pytest.raises(RuntimeError, match=text):
        module.AdamWStep()(**lists, lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0)


@pytest.mark.skipif(RUNS_KERNEL, reason="the kernel's tests run in this very process")
def test_the_kernel_in_tritons_interpreter() -> None:
    missing = triton_is_missing()
    if missing:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
