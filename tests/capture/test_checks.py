"""Checks of numbers that are known only at run time raise eager's errors, in the default configuration."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge


@pytest.fixture(autouse=True)
def _default_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


class TooMany(Exception):
    pass


def length(x: torch.Tensor) -> torch.Tensor:
    n = x.nonzero().shape[0]
    torch._check(n >= 3)
    return x * 2


def length_in_a_message(x: torch.Tensor) -> torch.Tensor:
    n = x.nonzero().shape[0]
    torch._check_index(n >= 3, lambda: f"only {n:03d} of {x.shape}, mean {x.mean()}, {{}}")
    return x * 2


def item(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().item()
    torch._check_value(n >= 3, lambda: "{} < {least}".format(n, least=3))  # noqa: UP032
    return x * 3


def size(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().int().item()
    torch._check_is_size(n, lambda: f"{n} is no size", max=5)
    return x.new_zeros(n) + 1


def numbers_of_a_list(x: torch.Tensor) -> torch.Tensor:
    a, b = x.int().tolist()[:2]
    torch._check(a != b, lambda: f"{a} is {b}")
    torch._check_not_implemented(a + b < 5, lambda: f"{a} + {b} = {a + b}")
    return x.new_ones(a, b)


def all_elements(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x >= 0, lambda: "negative")
    return x.sqrt()


def an_exception_of_the_users(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().item()
    torch._check_with(TooMany, n < 4, lambda: n)
    return x * 2


ASSERTIONS: dict[str, Any] = {"torch": torch}  # pytest would rewrite them in this file
exec(
    """
def assertions(x):
    n = x.sum().item()
    assert n > -10
    assert n > 2, "too few"
    torch._assert(n != 4, "four")
    torch._assert(x.max() < 5, "large")
    return x * 2
""",
    ASSERTIONS,
)


def a_bool(x: torch.Tensor) -> torch.Tensor:
    torch._check_type((x > 0).any().item(), lambda: "nothing")
    return x * 2


def equal(x: torch.Tensor) -> torch.Tensor:
    n = x.sum().item()
    torch._check(n == 4, lambda: f"{n}")
    return x * n


def in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(item, x, use_reentrant=False)


def after_random_numbers(x: torch.Tensor) -> torch.Tensor:
    n = F.dropout(x.abs(), 1e-9, training=True).sum().int().item()
    torch._check_value(n < 4, lambda: f"{n}")
    return x.new_zeros(n) + 1


INPUTS = ((1.0, 2.0, 0.0), (1.0, 0.0, 0.0), (2.0, 2.0, 0.0), (0.0, 1.0, 2.0), (9.0, 1.0, 1.0), (-2.0, 0.0, -9.0))
FUNCTIONS = (
    length,
    length_in_a_message,
    item,
    size,
    numbers_of_a_list,
    all_elements,
    an_exception_of_the_users,
    ASSERTIONS["assertions"],
    a_bool,
    equal,
    in_a_checkpoint,
    after_random_numbers,
)


def outcome(function: Callable, *args: Any) -> Any:
    try:
        result = function(*args)
    except Exception as error:
        return type(error), str(error)
    return result.tolist(), result.requires_grad and torch.autograd.grad(result.sum(), args[0])[0].tolist()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_check_raises_as_in_eager_and_its_program_is_one_graph(function: Callable, grad: bool) -> None:
    jitted = forge.jit(function, fullgraph=True)
    outcomes = set()
    for values in INPUTS:
        x = torch.tensor(values, requires_grad=grad)
        expected = outcome(function, x)
        assert outcome(jitted, x) == expected
        outcomes.add(isinstance(expected[0], type))
    explained = forge.explain(jitted)
    assert (outcomes, explained.graphs, explained.eager) == ({False, True}, 1, [])
    assert all("nonzero" in each for each in explained.opaque_calls)  # a check is not one


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_check_that_the_shape_decides_raises_as_in_eager(dynamic: bool | None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._check_index(x.shape[0] > 2, lambda: f"{x.shape[0]} rows")
        return x * 2

    jitted = forge.jit(function, fullgraph=True, dynamic=dynamic)
    for count in (3, 4, 2, 5):
        x = torch.ones(count)
        assert outcome(jitted, x) == outcome(function, x)


def test_an_exception_that_the_program_raises_is_its_own_under_fullgraph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 1:
            raise LookupError(f"{x.ndim} dims")
        return x * 2

    with pytest.raises(LookupError, match="2 dims"):
        forge.jit(function, fullgraph=True)(torch.ones(2, 2))


def test_a_check_that_the_program_catches_is_part_of_its_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            torch._check_value(x.shape[0] == 4, lambda: f"{x.shape[0]} rows")
        except ValueError:
            return x + 1
        return x * 2

    jitted = forge.jit(function, fullgraph=True)
    for count in (4, 3, 5):
        torch.testing.assert_close(jitted(torch.ones(count)), function(torch.ones(count)))


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[x > 0] * 2 + y.cos() + y).relu() - 1


def viewed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.view(y.sum().int().item(), -1) * 2


def made(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(y.sum().int().item()) + 1


def narrowed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, y.sum().int().item(), 1) + 1


ASSUMING = {  # and arguments for which Dynamo's assumption holds, and does not
    joined: [((1, 2, 3, -1), (1, 2, 3)), ((1, 2, 3, 4), (1, 2, 3)), ((-1, -1, -1, 2, 3), (1, 2, 3))],
    viewed: [((1, 2, 3, 4), (2,)), ((1, 2, 3, 4), (3,)), ((1, 2, 3, 4), (0,))],
    made: [((1, 2), (3,)), ((1, 2), (-3,))],
    narrowed: [((1, 2, 3), (2,)), ((1, 2, 3), (4,)), ((1, 2, 3), (3,))],
}


@pytest.mark.parametrize("function", ASSUMING, ids=lambda function: function.__name__)
def test_where_an_assumption_of_dynamos_does_not_hold_torch_raises(function: Callable) -> None:
    jitted = forge.jit(function, fullgraph=True)
    for arguments in ASSUMING[function]:
        given = [torch.tensor(each, dtype=torch.float32) for each in arguments]
        assert outcome(jitted, *given) == outcome(function, *given)
    assert forge.explain(jitted).eager == []


def test_what_eager_takes_and_the_program_does_not_is_an_error() -> None:
    jitted = forge.jit(joined, fullgraph=True)
    y = torch.ones(3)
    jitted(torch.tensor([1.0, 2.0, 3.0, -1.0]), y)
    with pytest.raises(RuntimeError, match="u0 >= 3"):  # eager would broadcast
        jitted(torch.tensor([1.0, -2.0, -3.0, -1.0]), y)


def test_what_one_program_assumes_of_a_number_another_one_does_not() -> None:
    """The symbols that Dynamo makes for both have the same name."""

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[x > 0], y]).relu()

    forge.jit(narrowed, fullgraph=True)(torch.ones(3), torch.ones(2))
    jitted, y = forge.jit(joined, fullgraph=True), torch.ones(5)
    for count in (3, 2):
        x = torch.tensor([1.0] * count + [-1.0] * (5 - count), requires_grad=True)
        assert outcome(jitted, x, y) == outcome(joined, x, y)
