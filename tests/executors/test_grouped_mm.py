"""Grouped products: copies of operands, strides of results, second derivatives, fusion and CUDA graphs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forge
from forge import clang, prims
from forge.api.functional import Direct
from forge.compiler.claim import claim_calls, in_order
from forge.compiler.cuda_graph_partition import why_not
from forge.compiler.layout import Layouts
from forge.executors.inductorex.operators import takes
from forge.executors.torchex import linalg as torchex_linalg
from forge.executors.torchex.core import torchex
from forge.executors.torchex.linalg import grouped_mm
from forge.ir import TensorProxy, Trace
from forge.ir.trace import recording

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def offsets() -> torch.Tensor:
    return torch.tensor([2, 2, 8], dtype=torch.int32)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


ROWS: dict[str, tuple[Callable, int]] = {
    "rows": (lambda dtype: torch.randn(8, 16, dtype=dtype), 0),
    "columns": (lambda dtype: torch.randn(16, 8, dtype=dtype).t(), 0),
    "rows of a wider matrix": (lambda dtype: torch.randn(8, 32, dtype=dtype)[:, 8:24], 0),
    "unaligned rows": (lambda dtype: torch.randn(8, 17, dtype=dtype)[:, :16], 1),
    "an unaligned address": (lambda dtype: torch.randn(8, 24, dtype=dtype)[:, 1:17], 1),
    "an expanded row": (lambda dtype: torch.randn(1, 16, dtype=dtype).expand(8, 16), 1),
    "an expanded number": (lambda dtype: torch.randn((), dtype=dtype).expand(8, 16), 1),
    "every other element": (lambda dtype: torch.randn(8, 16, 2, dtype=dtype)[..., 1], 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROWS)
def test_operands_are_copied_where_torchs_kernel_refuses_them_alone(case: str, dtype: torch.dtype) -> None:
    make, copies = ROWS[case]
    a, b, offs = make(dtype), torch.randn(3, 24, 16, dtype=dtype).mT, offsets()
    expected = F.grouped_mm(a.clone(memory_format=torch.contiguous_format), b, offs=offs)
    with Operators() as operators:
        found = grouped_mm.op(a, b, offs)
    torch.testing.assert_close(found, expected)
    assert operators.seen[-1] is aten._grouped_mm.default
    assert len([each for each in operators.seen[:-1] if not each.is_view]) == copies


UNALIGNED: dict[str, tuple[tuple, Callable, int]] = {
    "rows": ((8, 13), lambda x: (x, torch.randn(3, 13, 24)), 0),
    "contraction, a": ((16, 9), lambda x: (x[:, :8], torch.randn(8, 24)), 1),
    "contraction, transposed a": ((8, 13), lambda x: (x.t(), torch.randn(8, 24)), 1),
    "contraction, b": ((8, 13), lambda x: (torch.randn(16, 8), x), 0),
    "columns": ((16, 13), lambda x: (torch.randn(3, 24, 16), x[:, :8]), 1),
}


@pytest.mark.parametrize("case", UNALIGNED)
def test_groups_of_a_copied_operand_lie_one_after_another(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel crashes if uneven groups are adjacent."""
    shape, operands, axis = UNALIGNED[case]
    a, b = operands(torch.randn(shape))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torchex_linalg, "torch_grouped_mm", lambda a, b, offs: seen.extend((a, b)))
    torchex_linalg._grouped_mm(a, b, offsets())
    (copied,) = [ours for ours, theirs in zip(seen, (a, b), strict=True) if ours is not theirs]
    assert copied.stride(-1 - axis) == 1 and copied.stride(axis - 2) % 4 == 0
    torch.testing.assert_close(copied, a if copied is seen[0] else b)


CASES: dict[str, Callable[[int], tuple]] = {
    "rows": lambda n: ((8, 16), (3, 16, n)),
    "contraction": lambda n: ((16, 8), (8, n)),
    "columns": lambda n: ((3, 16, 8), (8, 8)),
    "batch": lambda n: ((3, 16, 8), (3, 8, n)),
}


def offsets_of(shapes: tuple) -> tuple:
    """Return the offsets as an argument, if a case has any."""
    return () if len(shapes[0]) == len(shapes[1]) == 3 else (offsets(),)


def multiply_groups(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """Return grouped_mm computed by a product for each group, which takes operands of any layout."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in groups])
    if a.ndim == 2:
        return torch.cat([a[i:j] @ each for (i, j), each in zip(groups, b, strict=True)])
    return torch.cat([each @ b[:, i:j] for (i, j), each in zip(groups, a, strict=True)], 1)


def recorded(shapes: tuple, device: str, dtype: torch.dtype) -> Trace:
    """Return a call of proxies."""
    trace = Trace()
    where = torch.device(device)
    operands = [TensorProxy(name, shape, dtype, where) for name, shape in zip("ab", shapes, strict=True)]
    ends = [TensorProxy("offs", x.shape, x.dtype, where) for x in offsets_of(shapes)]
    inputs = [trace.add_input(each) for each in (*operands, *ends)]
    with recording(trace, clang.language):
        trace.output = prims.grouped_mm(*inputs)
    return trace


def claimed(shapes: tuple, device: str, dtype: torch.dtype) -> Trace:
    """Return a call of proxies, claimed by the torch executor."""
    return claim_calls(recorded(shapes, device, dtype), [torchex], {}, in_order)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [24, 13])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_strides_of_results_are_known_before_they_run(case: str, device: str, n: int, dtype: torch.dtype) -> None:
    """torch's fake tensors accept bfloat16 only, and do not pad rows in a CPU build."""
    shapes = CASES[case](n)
    trace = claimed(shapes, device, dtype)
    (call,) = trace.bound_symbols
    expected = grouped_mm.op(*[torch.randn(shape, dtype=dtype) for shape in shapes], *offsets_of(shapes))
    layouts = Layouts(trace.inputs)
    reads_back = device == "cuda" and dtype != torch.bfloat16 and case != "batch"
    assert layouts.run(call).is_exact is not reads_back
    if not reads_back:
        assert layouts.strides()[trace.output.name] == expected.stride()


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_reads_no_offsets_back_may_be_in_a_cuda_graph(case: str) -> None:
    for dtype in DTYPES:
        (call,) = claimed(CASES[case](24), "cuda", dtype).bound_symbols
        reads_back = dtype != torch.bfloat16 and case != "batch"
        assert why_not(call) == ("the call reads values back to Python" if reads_back else None)


@pytest.mark.parametrize("whole_program", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_region_leaves_it_to_torch(case: str, whole_program: bool) -> None:
    """Inductor changes the layout of a program's operands to one that the kernel refuses."""
    (call,) = recorded(CASES[case](24), "cpu", torch.bfloat16).bound_symbols
    assert "aten._grouped_mm.default is left to torch" in takes(call, whole_program=whole_program).reason


@pytest.mark.parametrize("executor", ["torch", "torch-prims"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_second_gradients_of_operands_that_torch_refuses(case: str, executor: str) -> None:
    """Rows of 13 numbers, gradients that are expanded, transposed operands."""
    torch.manual_seed(0)
    shapes = CASES[case](13)
    operands = [torch.randn(shape).mT.contiguous().mT.requires_grad_() for shape in shapes]
    ends = offsets_of(shapes)

    def flow(function: Callable) -> list[torch.Tensor]:
        out = function(*operands, *ends)
        first = torch.autograd.grad(out.sum() + out.square().sum(), operands, create_graph=True)
        return [out, *first, *torch.autograd.grad(sum(each.square().sum() for each in first), operands)]

    ours = Direct(lambda a, b, *ends: F.grouped_mm(a, b, offs=ends[0] if ends else None), executors=[executor])
    for found, expected in zip(flow(ours), flow(multiply_groups), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SPELLINGS: dict[str, Callable] = {
    "torch.nn.functional.grouped_mm": lambda a, b, offs: F.grouped_mm(a, b, offs=offs),
    "torch._grouped_mm": lambda a, b, offs: torch._grouped_mm(a, b, offs),
    "torch.ops.aten._grouped_mm": lambda a, b, offs: torch.ops.aten._grouped_mm.default(a, b, offs),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_jitted_function_has_no_opaque_call(name: str, dynamic: bool) -> None:
    """bfloat16 is accepted by Dynamo; weights are transposed, and the first gradient of the result is expanded."""
    torch.manual_seed(0)

    def function(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return SPELLINGS[name](x * 2, weight.mT, offs).relu() + 1

    x, weight = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((8, 16), (3, 24, 16)))
    jitted = forge.jit(function, strict=True, fullgraph=True, dynamic=dynamic, cache=False)
    expected = function(x, weight, offsets())
    found = jitted(x, weight, offsets())
    torch.testing.assert_close(found, expected)
    gradients, wanted = (torch.autograd.grad(out.sum(), (x, weight)) for out in (found, expected))
    torch.testing.assert_close(gradients, wanted)
    assert forge.explain(jitted).opaque_calls == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_converts_nothing(dtype: torch.dtype) -> None:
    a, b = torch.randn(8, 16, dtype=dtype), torch.randn(3, 16, 24, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = Direct(F.grouped_mm)(a, b, offs=offsets())
        assert torch.equal(found, F.grouped_mm(a, b, offs=offsets()))
