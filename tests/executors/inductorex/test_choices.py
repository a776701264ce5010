"""Inductor's choices of how a Triton kernel reduces rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep
from torch.nn import functional as F

import forge
from forge import prims
from forge.executors.executor import Declined
from forge.executors.inductorex.aten_graph import claim_by_torch
from forge.executors.inductorex.operators import takes
from forge.torch_internals.inductor import persistent
from forge.torch_internals.inductor.persistent import RowChoices, is_matrix_vector_product

ROW, COLUMN = sympy.symbols("d0 d1", integer=True, nonnegative=True)


def read(name: str, index: Any, rows: int = 512, length: int = 2048) -> MemoryDep:
    return MemoryDep(name, sympy.sympify(index), (ROW, COLUMN), (sympy.Integer(rows), sympy.Integer(length)))


def features(*reads: MemoryDep, kind: str = "sum", rows: int = 512, length: int = 2048) -> Any:
    node = SimpleNamespace(
        node=SimpleNamespace(get_reduction_type=lambda: kind), read_writes=SimpleNamespace(reads=set(reads))
    )
    return SimpleNamespace(
        is_reduction=lambda: True,
        numel=sympy.Integer(rows),
        reduction_numel=sympy.Integer(length),
        reduction_nodes=lambda: [node],
    )


MATRIX, VECTOR = read("matrix", 2048 * ROW + COLUMN), read("vector", COLUMN)
KERNELS = {
    "a product": (features(MATRIX, VECTOR), True),
    "a product and a bias": (features(MATRIX, VECTOR, read("bias", ROW)), True),
    "sums of rows": (features(MATRIX), False),
    "a matrix that is transposed": (features(read("matrix", ROW + 512 * COLUMN), VECTOR), False),
    "maxima": (features(MATRIX, VECTOR, kind="max"), False),
    "few rows": (features(read("matrix", 2048 * ROW + COLUMN, 8), read("vector", COLUMN, 8), rows=8), False),
    "long rows": (
        features(read("matrix", 8192 * ROW + COLUMN, length=8192), read("vector", COLUMN, length=8192), length=8192),
        False,
    ),
    "short rows": (
        features(read("matrix", 64 * ROW + COLUMN, length=64), read("vector", COLUMN, length=64), length=64),
        False,
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_of_a_matrix_and_a_vector_have_blocks_of_their_own(kernel: str) -> None:
    of_kernel, expected = KERNELS[kernel]
    assert is_matrix_vector_product(of_kernel) is expected
    chosen = RowChoices().triton_kernel_kwargs(object, of_kernel, [{"x": 512, "r0_": 2048}], {"pid_cache": None})
    assert ("fixed_config" in chosen) is expected
    assert "pid_cache" in chosen
    tiled = RowChoices().triton_kernel_kwargs(object, of_kernel, [{"x": 16, "y": 32, "r0_": 2048}], {})
    assert "fixed_config" not in tiled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("length", [1536, 2048, 4096])
@pytest.mark.parametrize("rows", [300, 512])
def test_a_product_with_blocks_of_its_own_is_the_product(
    rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[bool] = []

    def decide(of_kernel: Any) -> bool:
        decided.append(is_matrix_vector_product(of_kernel))
        return decided[-1]

    monkeypatch.setattr(persistent, "is_matrix_vector_product", decide)
    x, weight = torch.randn(1, length, device="cuda").bfloat16(), torch.randn(rows, length, device="cuda").bfloat16()
    weight /= length**0.5  # eager rounds before the cosine
    jitted = forge.jit(lambda x, weight: F.linear(x.sin(), weight).cos(), cache=False)
    torch.testing.assert_close(jitted(x, weight), F.linear(x.sin(), weight).cos(), atol=0.02, rtol=0.02)
    assert True in decided


@pytest.mark.parametrize(("rows", "added", "few"), [(169, 2401, True), (1000, 2401, False), (600, 2401, True)])
def test_many_values_are_added_to_few_by_torch(rows: int, added: int, few: bool) -> None:
    """This is the gradient of a table of positions on a GPU; the meta device stands in for it."""

    def add(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return table.index_put((index,), values, accumulate=True)

    inputs = torch.empty(rows, 3, device="meta"), torch.empty(added, dtype=torch.long, device="meta")
    (call,) = forge.trace(add, *inputs, torch.empty(added, 3, device="meta")).bound_symbols
    decision = takes(call)
    assert isinstance(decision, Declined) == few
    assert not few or "adds many values to few" in decision.reason
    (call,) = forge.trace(
        lambda *given: given[0].index_put((given[1],), given[2]), *inputs, torch.empty(3, device="meta")
    ).bound_symbols
    assert not isinstance(takes(call), Declined)  # elements are replaced, not increased


def test_a_region_keeps_its_scatters_into_zeros() -> None:
    """A program writes to such zeros in place; a region has no in-place calls, so it keeps these."""

    def spread(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        zeros = prims.full((5, 3), 0, torch.float32, torch.device("cpu"))
        return prims.index_put(zeros, (index,), values, True) * 2

    trace = forge.trace(spread, torch.tensor([0, 3]), torch.randn(2, 3))
    calls = claim_by_torch(list(trace.bound_symbols))
    assert set(trace.output_names) <= {name for call in calls for name in call.outputs}
    assert not any("index_put_" in call.symbol.name for call in calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_scatters_sums_of_half_precision(dtype: torch.dtype) -> None:
    """The meta device stands in for a GPU."""
    x, index = torch.empty(4, 30, device="meta", dtype=dtype), torch.empty(4, 20, dtype=torch.long, device="meta")
    reads = {
        "sum": lambda x, index: x.scatter_add(1, index, x),
        "mean": lambda x, index: x.scatter_reduce(1, index, x, "mean"),
        "amax": lambda x, index: x.scatter_reduce(1, index, x, "amax"),
    }
    for name, read in reads.items():
        (call,) = forge.trace(read, x, index).bound_symbols
        decision = takes(call)
        is_left = name != "amax" and dtype != torch.float32
        assert is_left == (isinstance(decision, Declined) and "half precision" in decision.reason), (name, decision)
