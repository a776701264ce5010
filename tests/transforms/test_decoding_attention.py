"""Attention of few queries, and the static cache that it writes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import torchlang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.registry import resolve_executors
from forge.ir import TensorProxy
from tests.executors import test_cuda_graphs
from tests.executors.test_cuda_graphs import graphs

device = test_cuda_graphs.device


def attend_to_cache(
    caches: tuple[torch.Tensor, torch.Tensor], position: torch.Tensor, new_key: torch.Tensor, new_value: torch.Tensor,
    query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    keys, values = caches
    keys.index_copy_(2, position, new_key)
    values.index_copy_(2, position, new_value)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask, scale=scale, enable_gqa=enable_gqa)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)


def few_queries(query: TensorProxy, *rest: Any) -> Decision:
    return query.shape[2] <= 4 or decline("many queries")


decoder = OperatorExecutor("decoder-of-test")
decoder.register_implementation(torchlang.decoding_attention, attend, checker=few_queries, grad="none")
decoder.register_implementation(
    torchlang.attend_to_cache, attend_to_cache, checker=lambda caches, p, k, v, query, *rest: few_queries(query)
)


def names(jitted: Any) -> list[str]:
    return [bound.symbol.name for bound in forge.last_traces(jitted)[-1].bound_symbols]


def decode(keys, values, position, key, value, query, mask):
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)
    return F.scaled_dot_product_attention(query * 2, keys, values, mask, enable_gqa=True)


def keys_are_returned(keys, values, position, key, value, query, mask):
    out = decode(keys, values, position, key, value, query, mask)
    return out, keys.sum()


def two_positions(keys, values, position, key, value, query, mask):
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position - 1, value)
    return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def written_afterwards(keys, values, position, key, value, query, mask):
    out = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)
    return out


def causal(keys, values, position, key, value, query, mask):
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def inputs(queries: int = 1, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    position = torch.arange(3, 3 + queries, device=device)
    shapes = [(2, 2, 8, 16), (2, 2, 8, 16), (2, 2, queries, 16), (2, 2, queries, 16), (2, 6, queries, 16)]
    keys, values, key, value, query = (torch.randn(shape, device=device) for shape in shapes)
    mask = torch.arange(8, device=device) < 5
    return [keys, values, position, key, value, query, mask.expand(2, 1, queries, 8)]


CASES = {
    "a cache": (decode, ["attend_to_cache"]),
    "its keys are read": (keys_are_returned, ["decoding_attention"]),
    "two positions": (two_positions, ["decoding_attention"]),
    "written afterwards": (written_afterwards, ["decoding_attention"]),
    "causal": (causal, []),
}


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_attention_of_few_queries_writes_its_cache(case: str, queries: int) -> None:
    function, expected = CASES[case]
    jitted = forge.jit(function, executors=[decoder, *resolve_executors(None)])
    with torch.no_grad():
        for _ in range(2):
            theirs, ours = inputs(queries), inputs(queries)
            torch.testing.assert_close(jitted(*ours), function(*theirs))
            torch.testing.assert_close(ours, theirs)
    called = [name for name in names(jitted) if name in ("attend_to_cache", "decoding_attention")]
    assert called == (expected if queries <= 4 else [])
    assert not ("attend_to_cache" in called and "index_copy_" in names(jitted))


def test_attention_that_needs_gradients_is_torch_s() -> None:
    jitted = forge.jit(attend, executors=[decoder, *resolve_executors(None)])
    query, key, value = (torch.randn(1, 2, 3, 16, requires_grad=True) for _ in range(3))
    jitted(query, key, value, None, None, False).sum().backward()
    assert query.grad is not None
    assert "decoding_attention" not in names(jitted)


def test_a_cuda_graph_that_attends_to_a_cache_writes_it(device: str) -> None:
    jitted = forge.jit(decode, executors=[decoder, *resolve_executors(None)], cuda_graphs=True)
    ours, theirs = inputs(device=device), inputs(device=device)
    with torch.no_grad():
        for step in range(8):
            for each in (ours, theirs):
                torch.manual_seed(step)
                each[2:6] = [torch.tensor([step], device=device), *(torch.randn_like(x) for x in each[3:6])]
            before = ours[0]._version
            torch.testing.assert_close(jitted(*ours), decode(*theirs))
            assert ours[0]._version > before
            assert ours[1]._version > 0
            torch.testing.assert_close(ours[:2], theirs[:2])
    (graph,) = graphs(jitted)
    assert graph.recordings
