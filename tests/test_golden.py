"""Golden prints of each stage of three small programs, kept in tests/golden: a refactor leaves them unchanged.

After a change that is meant to show, `pytest tests/test_golden.py --update-golden` writes the files anew; review the
difference before you commit it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge.api.functional import Direct
from forge.ir import Trace

GOLDEN = Path(__file__).parent / "golden"


def mlp_with_a_loss(x: Any, w1: Any, b1: Any, w2: Any, target: Any) -> Any:
    hidden = F.relu(F.linear(x, w1, b1))
    return F.mse_loss(F.linear(hidden, w2), target)


def view_and_inplace_change(x: Any, y: Any) -> Any:
    shown = (x * 2).view(2, 6)
    shown[:, 1:3].add_(y)
    y.mul_(0.5)
    return shown.transpose(0, 1), shown


def normalisation(x: Any, weight: Any) -> Any:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


PROGRAMS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "mlp_with_a_loss": (
        mlp_with_a_loss,
        lambda: (torch.randn(3, 4), leaf(8, 4), leaf(8), leaf(2, 8), torch.randn(3, 2)),
    ),
    "view_and_inplace_change": (view_and_inplace_change, lambda: (torch.randn(3, 4), torch.randn(2, 2))),
    "normalisation": (normalisation, lambda: (leaf(2, 3, 8, dtype=torch.bfloat16), leaf(8))),
}


def stages(name: str) -> Iterator[Trace]:
    """Yield every stage of the program, forward and backward, on torch's executor."""
    function, inputs = PROGRAMS[name]
    direct = Direct(function, ["torch"])
    outputs = direct(*inputs())
    flowing = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.requires_grad]
    if flowing:
        torch.autograd.backward(flowing, [torch.ones_like(out) for out in flowing])
    ((_, compiled),) = direct.compiled.values()
    yield from (*compiled.traces, *compiled.backward_traces)


def printed(name: str) -> str:
    """Return the stages' text; the first includes its decomposition."""
    texts = [trace.show(2 if number == 0 else 1) for number, trace in enumerate(stages(name))]
    return "\n".join(texts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_stage_prints_as_before(name: str, pytestconfig: pytest.Config) -> None:
    path = GOLDEN / f"{name}.py.txt"
    text = printed(name)
    if pytestconfig.getoption("--update-golden"):
        path.write_text(text)
    assert path.exists(), f"{path} is missing: write it with --update-golden"
    assert text == path.read_text(), "run with --update-golden, and read what changed before you commit it"


@pytest.mark.parametrize("name", PROGRAMS)
def test_printing_does_not_depend_on_what_was_traced_before(name: str) -> None:
    assert printed(name) == printed(name)


def test_every_golden_file_belongs_to_a_program() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.py.txt" for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_last_stages_are_programs_that_run(name: str) -> None:
    for trace in stages(name):
        if trace.stage == "lifetimes":
            scope: dict[str, Any] = {}
            exec(str(trace), scope)
            assert callable(scope[trace.name])
