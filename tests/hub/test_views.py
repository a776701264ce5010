"""Kernels called with views of an operator's arguments, or whose results' views are the operator's."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.hub.manifest import Argument, View
from forge.hub.manifest.views import NotAView, parse_view
from tests.hub.manifests import entry, problems
from tests.hub.repositories import Repository, claimed, declined, executor, run

ATTENTION = {
    "op": "torch.nn.functional.scaled_dot_product_attention",
    "arg_meta": "{query: T, key: T, value: T}",
    "shape": '{query: "[B, H, L, D]", key: "[B, H, S, D]", value: "[B, H, S, D]"}',
    "where": '["attn_mask is None", "dropout_p == 0", "not is_causal", "scale is None"]',
    "args": '{q: "query.transpose(1, 2)", k: "key.transpose(1, 2)", v: "value.transpose(1, 2)"}',
}
ROWS_FIRST = """
def weights(q, k):
    return torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5, -1)

def f(q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", weights(q, k), v)

def b(dout, q, k, v):
    p = weights(q, k)
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    grads = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
    return [None, *grads, torch.einsum("bhqk,bqhd->bkhd", p, dout)]
"""
BACKWARD = (
    '{kernel_name: b, args: ["grad_output.transpose(1, 2)", "query.transpose(1, 2)", "key.transpose(1, 2)", '
    '"value.transpose(1, 2)"], returns: [query, key, value], '
    'result: ["result[1].transpose(1, 2)", "result[2].transpose(1, 2)", "result[3].transpose(1, 2)"]}'
)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("grad", ["autograd", "composite", BACKWARD], ids=["autograd", "composite", "kernel"])
def test_attention_of_rows_before_heads(tmp_path: Path, grad: str) -> None:
    made = Repository(tmp_path, "rows", ROWS_FIRST, grad=grad, result="result.transpose(1, 2)", **ATTENTION)
    inputs = [torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7)]
    assert claimed(run(attend, *inputs, by=executor(made)), made)


def test_the_views_are_part_of_what_is_verified(tmp_path: Path) -> None:
    made = Repository(tmp_path, "rows", ROWS_FIRST, grad="autograd", **ATTENTION)  # without its result's view
    assert "[" in declined(run(attend, *(torch.randn(2, 3, 5, 8) for _ in range(3)), by=executor(made)), made)


def test_a_function_of_matrices_serves_tensors_of_any_dims(tmp_path: Path) -> None:
    made = Repository(
        tmp_path,
        "matrix",
        "def f(rows):\n    assert rows.ndim == 2\n    return rows, torch.softmax(rows, -1)",
        op="torch.nn.functional.softmax",
        arg_meta="{input: T}",
        where='["dim == -1", "dtype is None", "input.ndim >= 2"]',
        args='{rows: "input.flatten(0, -2)"}',
        result='"result[1].view_as(input)"',
    )
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    assert claimed(run(lambda x: F.softmax(x, -1), x, by=executor(made)), made)


def test_results_in_another_order() -> None:
    kernel = forge.kernel(
        torch.var_mean,
        lambda x: (x.mean(), "a text", x.var()),
        name="both",
        dtypes=[torch.float32],
        where=["dim is None", "keepdim == False", "correction is None"],
        args={"x": "input"},
        result=["result[2]", "result[0]"],
    )
    x = torch.randn(3, 4)
    jitted = forge.jit(lambda x: torch.var_mean(x), kernels=[kernel])
    torch.testing.assert_close(jitted(x), torch.var_mean(x))
    assert "both" in forge.explain(jitted).executors


@pytest.mark.parametrize("out", [0, 1, "y"])
def test_memory_that_is_written_to_may_stand_anywhere(out: int | str) -> None:
    def f(*args: torch.Tensor, **kwargs: torch.Tensor) -> None:
        y, x = (args[out], args[1 - out]) if isinstance(out, int) else (kwargs["y"], args[0])
        torch.mul(x[0].t(), torch.sigmoid(x[0].t()), out=y)

    kernel = forge.kernel(
        F.silu, f, name="into", dtypes=[torch.float32], shape={"input": "[A, B]"},
        args=["input.transpose(0, 1).unsqueeze(0)"], out=out, grad="composite",
    )  # fmt: skip
    x = torch.randn(3, 4)
    jitted = forge.jit(lambda x: F.silu(x), kernels=[kernel])
    torch.testing.assert_close(jitted(x), F.silu(x))
    assert "into" in forge.explain(jitted).executors


def test_what_is_assumed_is_asked_of_the_operators_arguments() -> None:
    seen = []

    def assumes(input: torch.Tensor) -> bool:
        seen.append(tuple(input.shape))
        return bool((input > 0).all())

    kernel = forge.kernel(
        F.relu, lambda x: x.squeeze(-1).unsqueeze(-1), name="same", dtypes=[torch.float32], assumes=assumes,
        args={"x": "input.unsqueeze(-1)"}, result="result.squeeze(-1)", grad="autograd",
    )  # fmt: skip
    jitted = forge.jit(lambda x: F.relu(x), kernels=[kernel])
    for x in (torch.rand(2, 3) + 1, torch.rand(2, 3) - 0.5):
        torch.testing.assert_close(jitted(x), F.relu(x))
    assert set(seen) >= {(2, 3)} and "same" in forge.explain(jitted).executors


def test_a_text_is_read_as_a_view() -> None:
    assert parse_view("query") == Argument("query")
    view = parse_view(" result[1].permute(0, -1, 1).view_as(x) ")
    assert view == View("result", 1, (("permute", (0, -1, 1)), ("view_as", ("x",)))) and view.names == {"x"}


@pytest.mark.parametrize(
    "text",
    [
        "", "query.transpose(1)", "query.transpose(1, dim1=2)", "query.item()", "query.__class__", "query[-1]",
        "query[0][1]", "query[0:1]", "query.transpose(1, 2)[0]", "f(query)", "query.view_as(1)", "query.permute(0, 0)",
        "query.permute()", "1", "query + 1", "query.transpose(True, 2)", "a.transpose(1, 2)" * 50, "query.squeeze(99)",
    ],
)  # fmt: skip
def test_a_text_that_is_no_view_is_refused(text: str) -> None:
    with pytest.raises(NotAView, match=r"is no view, which is a name"):
        parse_view(text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"args": '{a: "sefl.transpose(0, 1)", b: other}'}, "args gives 'sefl', not an argument of aten::add.out"),
        ({"args": '{a: "self.transposed(0, 1)", b: other}'}, "is no view, which is a name"),
        ({"args": '{a: "self[0].squeeze(0)", b: other}'}, "a list is given whole"),
        ({"args": "{a: self.view_as(othr), b: other}"}, "args gives 'othr', not an argument"),
        ({"result": "output.squeeze(0)"}, "result is 'output.squeeze(0)', but must begin with result"),
        ({"result": "result.view_as(x)"}, "result speaks of 'x', not an argument"),
        ({"result": "[result, result]"}, "result has 2 entries, but must have 1, for the operator's results"),
        ({"result": "result.squeeze(0)", "out": "out"}, "one of them is meant"),
    ],
)
def test_a_view_of_what_is_not_there_is_reported(given: dict[str, str], text: str) -> None:
    found = problems(entry(**given))
    assert any(text in each for each in found), found
