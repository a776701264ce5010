"""A head and its loss become one call in all forms that models use, except if the logits are needed otherwise."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import forge
from forge import torchlang
from forge.capture.handles import handle_of
from forge.executors import OperatorExecutor
from forge.transforms import linear_cross_entropy

HEAD = "forge.linear_cross_entropy"
VOCABULARY = 50
Function = Callable[..., torch.Tensor | tuple]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 0)
    seven_rows = 4 * VOCABULARY * 7  # of float32
    monkeypatch.setattr("forge.executors.torchex.linear_cross_entropy.CPU_CHUNK_BYTES", seven_rows)


def arguments(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return hidden, weight, labels; some labels are ignored."""
    hidden, weight = torch.randn(3, 10, 8), torch.randn(VOCABULARY, 8)
    labels = torch.randint(0, VOCABULARY, (3, 10))
    labels[0, :4] = -100
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels]


def found(jitted: Callable) -> int:
    """Return the number of fused heads in the compiled program."""
    stage = next(
        stage
        for stage in reversed(forge.last_traces(jitted))
        if stage.stage in ("fold_constants", "fused_linear_cross_entropy", "cse")
    )
    return sum(bound.symbol.id == HEAD for bound in stage.bound_symbols)


def same(function: Function, *args: torch.Tensor, heads: int = 1, **options: object) -> Callable:
    """Return the jitted function, after comparing its outputs and gradients with eager's and its number of heads."""
    jitted = forge.jit(function, executors=["torch"], **options)
    actual, expected = jitted(*args), function(*args)
    torch.testing.assert_close(actual, expected)
    assert found(jitted) == heads
    wanted = [each for each in args if each.requires_grad]
    pairs = zip(*[each if isinstance(each, tuple) else (each,) for each in (actual, expected)], strict=True)
    flowing = [pair for pair in pairs if pair[1].requires_grad]
    if not flowing:
        return jitted
    for ours, theirs in zip(
        *[torch.autograd.grad([pair[i].sum() for pair in flowing], wanted) for i in (0, 1)], strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    return jitted


def flat(logits: torch.Tensor, labels: torch.Tensor, **options: object) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), **options)


def gpt2(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss as in GPT-2: the logits shift, and are copied."""
    logits = F.linear(hidden, weight)
    return flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def llama(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return ForCausalLMLoss with num_items_in_batch: the labels shift, the sum is divided."""
    logits = F.linear(hidden, weight).float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return flat(logits, shifted, ignore_index=-100, reduction="sum") / torch.tensor(17)


def gemma2(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(F.linear(hidden, weight) / 3.0) * 3.0
    return flat(logits.float(), labels)


def t5(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(F.linear(hidden * 8**-0.5, weight), labels, ignore_index=-100)


def cohere(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(0.0625 * F.linear(hidden, weight), labels)


def granite(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat((F.linear(hidden, weight) / 8.0).float(), labels)


def transposed(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).transpose(1, 2), labels)


def positions_first(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).transpose(0, 1)[1:]
    return F.cross_entropy(logits.permute(1, 2, 0), labels[:, 1:])


def log_softmax(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(F.linear(hidden, weight).flatten(0, 1), -1, dtype=torch.float32)
    return F.nll_loss(logs, labels.flatten())


def log_softmax_shown_as_rows(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    return F.nll_loss(logs[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[..., 1:].reshape(-1))


def log_softmax_of_positions_last(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(torch.log_softmax(F.linear(hidden, weight), -1).transpose(1, 2), labels, reduction="sum")


def smoothed(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(F.linear(hidden, weight), labels, label_smoothing=0.1)


def weighted(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    classes = torch.arange(VOCABULARY, dtype=hidden.dtype) / 10
    return flat(F.linear(hidden, weight), labels, weight=classes)


def ignoring_zero(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(F.linear(hidden, weight), labels.clamp(min=0), ignore_index=0, reduction="sum")


WRITTEN = (
    *(gpt2, llama, gemma2, t5, cohere, granite),
    *(log_softmax, log_softmax_shown_as_rows, log_softmax_of_positions_last),
    *(transposed, positions_first, smoothed, weighted, ignoring_zero),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("write", WRITTEN, ids=lambda function: function.__name__)
def test_a_head_is_found_as_models_write_it(write: Function, dtype: torch.dtype) -> None:
    same(write, *arguments(dtype))


@pytest.mark.parametrize("write", WRITTEN, ids=lambda function: function.__name__)
def test_in_bfloat16_gradients_are_as_near_to_the_exact_ones_as_in_eager(write: Function) -> None:
    args = arguments(torch.bfloat16)
    exact = [arg.detach().double().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    jitted = forge.jit(write, executors=["torch"])
    gradients = [
        torch.autograd.grad(function(*given), given[:2])
        for function, given in ((jitted, args), (write, args), (write, exact))
    ]
    assert found(jitted) == 1
    for ours, eager, true in zip(*gradients, strict=True):
        error, allowed = [(each.double() - true).norm() / true.norm() for each in (ours, eager)]
        assert error < 1.5 * allowed


def test_a_bias_is_part_of_the_head() -> None:
    bias = torch.randn(VOCABULARY, requires_grad=True)
    same(lambda h, w, y, b: flat(F.linear(h, w, b), y), *arguments(), bias)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_torchs_own_linear_cross_entropy_is_found() -> None:
    hidden, weight, labels = arguments()
    same(lambda h, w, y: F.linear_cross_entropy(h.flatten(0, 1), w, y.flatten()), hidden, weight, labels)


def test_two_heads_with_one_weight_are_two_calls() -> None:
    """This occurs with several predicted tokens: the weight's gradients add up."""
    same(lambda h, w, y: gpt2(h, w, y) + 0.3 * gpt2(h.sin(), w, y), *arguments(), heads=2)


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels = arguments()
    jitted = same(gpt2, hidden, weight.detach(), labels)
    assert "(True, False, False)" in str(forge.last_traces(jitted)[-1])


def test_a_loss_under_no_grad_is_found_even_if_it_is_not_reduced() -> None:
    args = [arg.detach() for arg in arguments()]
    same(lambda h, w, y: flat(F.linear(h, w), y, reduction="none"), *args)


def test_a_loss_of_each_position_keeps_their_shape() -> None:
    args = [arg.detach() for arg in arguments()]
    same(lambda h, w, y: F.cross_entropy(F.linear(h, w).transpose(1, 2), y, reduction="none"), *args)


# logits with other readers


def with_logits(write: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    def model(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple:
        logits = write(F.linear(hidden, weight))
        return flat(logits[:, :-1].float().contiguous(), labels[:, 1:].contiguous()), logits

    return model


@pytest.mark.parametrize(
    "write",
    [
        lambda logits: logits,
        lambda logits: logits.double(),
        lambda logits: torch.tanh(logits / 3.0) * 3.0,
        lambda logits: torch.tanh(logits * 0.5).double() / 0.1,
    ],
)
def test_logits_that_are_returned_are_eagers_and_have_a_gradient(write: Callable) -> None:
    jitted = same(with_logits(write), *arguments())
    args = arguments()
    assert torch.equal(jitted(*args)[1], with_logits(write)(*args)[1])


def test_the_loss_alone_may_be_differentiated_where_logits_are_returned() -> None:
    hidden, weight, labels = arguments()
    function = with_logits(lambda logits: torch.tanh(logits / 3.0) * 3.0)
    jitted = forge.jit(function, executors=["torch"])
    for ours, theirs in zip(
        *[torch.autograd.grad(each(hidden, weight, labels)[0], (hidden, weight)) for each in (jitted, function)],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_metric_of_the_logits_keeps_them() -> None:
    def model(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple:
        logits = F.linear(hidden, weight)
        return flat(logits, labels), (logits.detach().argmax(-1) == labels).float().mean()

    same(model, *arguments())


OTHERWISE: dict[str, Function] = {
    "another loss reads the logits": lambda h, w, y: (
        flat(F.linear(h, w), y) + F.linear(h, w).logsumexp(-1).square().mean()
    ),
    "the classes are cut": lambda h, w, y: flat(F.linear(h, w)[..., :40], y.clamp(max=39)),
    "the classes are joined with rows": lambda h, w, y: F.cross_entropy(
        F.linear(h, w).view(3, -1, 25), y[:, :1].expand(3, 25).clamp(0, 19)
    ),
    "rows are mixed": lambda h, w, y: flat(F.linear(h, w).cumsum(1), y),
    "a scale is learnt": lambda h, w, y: flat(F.linear(h, w) * w.mean(), y),
    "a bias is added to the scores": lambda h, w, y: flat(F.linear(h, w) + w.sum(1), y),
    "each row has a loss": lambda h, w, y: flat(F.linear(h, w), y, reduction="none"),
    "the target are probabilities": lambda h, w, y: (
        flat(F.linear(h, w), y)
        if y.is_floating_point()
        else F.cross_entropy(F.linear(h, w).flatten(0, 1), torch.ones(30, 50) / 50)
    ),
    "there is no linear layer": lambda h, w, y: flat(h, y.clamp(max=7)) + w.sum(),
    "a softmax of positions": lambda h, w, y: F.nll_loss(
        torch.log_softmax(F.linear(h, w), 1).view(-1, VOCABULARY), y.flatten()
    ),
    "log probabilities are read beside the loss": lambda h, w, y: (
        lambda logs: F.nll_loss(logs.view(-1, VOCABULARY), y.flatten()) + logs.square().mean()
    )(torch.log_softmax(F.linear(h, w), -1)),
    "log probabilities are read in another shape": lambda h, w, y: (
        lambda logs: F.nll_loss(logs, y.flatten()) + logs[:, 0].mean()
    )(torch.log_softmax(F.linear(h, w), -1).view(-1, VOCABULARY)),
    "gradients stop on the way": lambda h, w, y: flat(F.linear(h, w).detach(), y) + h.sum() + w.sum(),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_no_head_or_gains_nothing_stays(name: str) -> None:
    same(OTHERWISE[name], *arguments(), heads=0)


def test_a_small_head_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 3 * 10 * VOCABULARY * 4 + 1)
    same(t5, *arguments(), heads=0)


def test_a_head_in_a_checkpoint_stays() -> None:
    same(lambda h, w, y: checkpoint(t5, h, w, y, use_reentrant=False), *arguments(), heads=0)


def test_float16_is_left_alone_where_gradients_are_needed() -> None:
    hidden, weight, labels = arguments(torch.float16)
    jitted = forge.jit(t5, executors=["torch"])
    jitted(hidden, weight, labels)
    assert found(jitted) == 0
    jitted(hidden.detach(), weight.detach(), labels)
    assert found(jitted) == 1


@pytest.mark.parametrize("symbol", [torchlang.cross_entropy, torchlang.linear])
def test_a_call_for_which_another_kernel_was_named_stays(symbol: forge.ir.Symbol) -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(symbol, torchlang.torch_function_of(symbol))
    jitted = forge.jit(t5, executors=[mine, "torch"])
    jitted(*arguments())
    assert found(jitted) == 0


def test_a_users_function_on_the_way_is_not_looked_into() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return g * 5.0

    same(lambda h, w, y: flat(Twice.apply(F.linear(h, w)), y), *arguments(), heads=0)


def test_lengths_that_change_are_run_in_as_many_chunks_as_they_need() -> None:
    jitted = forge.jit(gpt2, executors=["torch"], dynamic=True)
    for length in (10, 3, 25):
        hidden = torch.randn(3, length, 8, requires_grad=True)
        weight = torch.randn(VOCABULARY, 8, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, (3, length))
        ours, theirs = jitted(hidden, weight, labels), gpt2(hidden, weight, labels)
        torch.testing.assert_close(ours, theirs)
        for one, other in zip(*[torch.autograd.grad(each, (hidden, weight)) for each in (ours, theirs)], strict=True):
            torch.testing.assert_close(one, other)
    assert found(jitted) == 1
    assert len(handle_of(jitted).reports) == 1


def test_autocast_casts_the_rows_and_the_weight() -> None:
    def under_autocast(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flat(F.linear(hidden, weight), labels)

    hidden, weight, labels = arguments()
    jitted = forge.jit(under_autocast, executors=["torch"])
    ours, theirs = jitted(hidden, weight, labels), under_autocast(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs)
    assert found(jitted) == 1
    for one, other in zip(*[torch.autograd.grad(each, (hidden, weight)) for each in (ours, theirs)], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_a_second_backward_is_differentiated_through_the_decomposition() -> None:
    hidden, weight, labels = arguments(torch.float64)
    jitted = forge.jit(gemma2, executors=["torch"])
    results = []
    for function in (jitted, gemma2):
        first = torch.autograd.grad(function(hidden, weight, labels), (hidden, weight), create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), (hidden, weight))])
    assert found(jitted) == 1
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
