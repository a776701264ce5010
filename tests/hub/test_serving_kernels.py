"""The example examples/kernels/serving-cpu: kernels of the Hub's serving packages, with a manifest, in an unmodified
generate."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.executor import Executor
from forge.executors.hubex import Verifier, kernel_executor
from forge.hub import check_repository
from forge.quantize import Int4WeightOnly, Int8WeightOnly

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install forge-jit[test]")
FOLDER = Path(__file__).parents[2] / "examples/kernels/serving-cpu"
TOKENS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


_WEIGHTS = {  # transforms, and the kernel of products
    "float32": ((), "torch"),
    "int8": ((Int8WeightOnly(),), "serving-cpu.w8_a16_gemm"),
    "int4": ((Int4WeightOnly(16),), "serving-cpu.w4_a16_gemm"),
}


@pytest.fixture(scope="module")
def kernels() -> Executor:
    return kernel_executor([FOLDER], verify=Verifier(120))


def test_the_repository_meets_the_hubs_requirements() -> None:
    assert [str(each) for each in check_repository(FOLDER)] == []


def _sizes(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return {**sizes, **tokens, "num_key_value_heads": 2, "initializer_range": 0.3, **more}


def _llama() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_sizes())).eval()


def _prompts(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :2] = mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _executors(explained: forge.Explanation, part: str) -> set[tuple[int, str]]:
    return {(row.graph, row.executor) for row in explained.rows if part in row.operation}


@pytest.mark.parametrize("padding", ["padded", "not padded"])
@pytest.mark.parametrize("weights", _WEIGHTS)
@pytest.mark.slow
def test_generate_takes_every_kernel_and_gives_the_same_tokens(kernels: Executor, weights: str, padding: str) -> None:
    transforms, product = _WEIGHTS[weights]
    padded = padding == "padded"
    model, prompts = _llama(), _prompts(padded)
    jitted = forge.jit(model, executors=[kernels, "torch"], transforms=transforms)
    plain = forge.jit(model, executors=["torch"], transforms=transforms) if transforms else model
    written = jitted.generate(**prompts, **TOKENS, cache_implementation="static")
    assert torch.equal(written, plain.generate(**prompts, **TOKENS, cache_implementation="static"))

    explained = forge.explain(jitted, profile=True)
    prompt, token = 0, 1
    assert explained.graphs == 2
    for kernel, part in (("rms_norm", "rms_norm"), ("swiglu", "swiglu")):
        assert _executors(explained, part) == {(graph, f"serving-cpu.{kernel}") for graph in (prompt, token)}
    first = "flash_attn_with_kvcache" if padded else "flash_attn"
    attention = {(prompt, f"serving-cpu.{first}"), (token, "serving-cpu.flash_attn_with_kvcache")}
    assert _executors(explained, "scaled_dot_product_attention") == attention
    assert _executors(explained, "linear") == {(graph, product) for graph in (prompt, token)}
    of_kernels = {row.executor for row in explained.rows if row.executor.startswith("serving-cpu")}
    assert of_kernels == {cost.executor for cost in explained.costs if cost.executor in of_kernels and cost.seconds > 0}


COUNTED = """

def attend_to_cache(*args, function=attend_to_cache, **named):
    ran.append(len(args) + len(named))
    return function(*args, **named)


ran = []
"""


@pytest.mark.slow
def test_the_masks_of_generate_are_of_lengths(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "serving-cpu")
    with (folder / "build/torch-universal/__init__.py").open("a") as file:
        file.write(COUNTED)
    counted = kernel_executor([folder], verify=Verifier(120))
    model = _llama()
    jitted = forge.jit(model, executors=[counted, "torch"], cache=False)
    written = jitted.generate(**_prompts(padded=True), **TOKENS, cache_implementation="static")
    assert torch.equal(written, model.generate(**_prompts(padded=True), **TOKENS))
    kernel = next(each for each in counted.kernels if each.name == "serving-cpu.flash_attn_with_kvcache")
    ran = kernel.function.__globals__["ran"]
    assert len(ran) == TOKENS["max_new_tokens"] * model.config.num_hidden_layers


@pytest.mark.slow
def test_a_model_with_one_projection_for_both_takes_the_unit_of_one_tensor(kernels: Executor) -> None:
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**_sizes())).eval()
    jitted = forge.jit(model, executors=[kernels, "torch"])
    prompts = _prompts(padded=False)
    assert torch.equal(jitted.generate(**prompts, **TOKENS), model.generate(**prompts, **TOKENS))
    forge.explain(jitted).require("serving-cpu.silu_and_mul")


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True) + 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.one_in(2)
def test_a_mask_that_is_of_no_lengths_gets_torchs_attention(kernels: Executor, dtype: torch.dtype) -> None:
    jitted = forge.jit(_attend, executors=[kernels, "torch"])
    query, keys, values = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    for seen in ([0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0]):
        mask = torch.tensor(seen, dtype=torch.bool).expand(2, 1, 1, 6)
        if dtype != torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(jitted(query, keys, values, mask), _attend(query, keys, values, mask))
    forge.explain(jitted).require("serving-cpu.flash_attn_with_kvcache")


def test_a_program_with_a_block_table_attends_to_pages(kernels: Executor) -> None:
    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *of_rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.serving_cpu.paged_attention(query, keys, values, *of_rows) + 1

    query, keys, values = torch.randn(2, 1, 4, 8), torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    table, lengths = torch.tensor([[4, 0], [2, 3]], dtype=torch.int32), torch.tensor([6, 3], dtype=torch.int32)
    jitted = forge.jit(attend, executors=[kernels, "torch"])
    written = jitted(query, keys, values, table, lengths)
    forge.explain(jitted).require("serving-cpu.paged_attention")
    for row, pages in enumerate(table):
        seen = [torch.cat(list(each[pages.long()]))[: lengths[row]].transpose(0, 1) for each in (keys, values)]
        expected = F.scaled_dot_product_attention(query[row].transpose(0, 1), *seen, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(written[row], expected + 1)


@pytest.mark.slow
def test_a_program_without_a_block_table_has_no_call_for_pages(kernels: Executor) -> None:
    jitted = forge.jit(_llama(), executors=[kernels, "torch"])
    jitted.generate(**_prompts(padded=True), **TOKENS, cache_implementation="static")
    with pytest.raises(forge.StrictError, match="no operation was offered to it"):
        forge.explain(jitted).require("serving-cpu.paged_attention")
