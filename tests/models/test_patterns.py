"""The sites of norms, rotary embeddings, gated units and losses in real models: matched, and replaced correctly."""

import copy
from collections import Counter

import pytest
import torch

import forge
from bench.patterns import FAMILIES, PRECISIONS, Finder, llama_seconds, measure, sites_in
from bench.text_models import NAMES, build, counting
from forge.patterns import builtin

QUICK = {
    "Llama": "bfloat16",
    "Gemma": "float32",
    "GPTJ": "bfloat16",
    "GptOss": "bfloat16",
    "Mistral": "mixed",
}
# torch.view_as_complex is a call that torchlang does not have
KNOWN_MISSES = {"DeepseekV2": {"rotary": 4}}


def check_model(name: str, precision: str) -> None:
    sites = measure(name, precision)
    assert sites.missing == KNOWN_MISSES.get(name, {})
    assert all(sites.actual[each] <= sites.expected[each] for each in FAMILIES)
    # A value that is cast twice in the model and once in the pattern has its gradients summed in float32 rather than in
    # bfloat16, and a layer norm of a pattern is differentiated by its parts where torch has a kernel: the difference is
    # of the size of bfloat16's own rounding, which both sides have.
    assert sites.outputs <= (2e-6 if precision == "float32" else sites.rounding)
    assert sites.gradients <= (2e-6 if precision == "float32" else 2 * sites.rounding)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.one_in(2)
def test_the_sites_of_a_model_are_found_and_replaced(name):
    check_model(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_sites_of_every_text_model_are_found_and_replaced(name, precision):
    check_model(name, precision)


def check_opt_in(name: str, precision: str) -> None:
    """Check a model's results with the opt-in patterns matched, without a kernel to run them."""
    sites = measure(name, precision, (*builtin.OPT_IN, *builtin.ALL))
    limit = 2e-6 if precision == "float32" else 2 * sites.rounding  # twice: gradients are summed in another order
    assert max(sites.outputs, sites.gradients) <= limit


@pytest.mark.parametrize(("name", "precision"), [("Llama", "mixed"), ("Gemma", "float32")])
def test_a_model_computes_the_same_with_the_patterns_of_kernels(name, precision):
    check_opt_in(name, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_text_model_computes_the_same_with_the_patterns_of_kernels(name, precision):
    check_opt_in(name, precision)


@pytest.mark.slow
def test_the_search_in_a_large_llama_takes_less_than_a_fifth_of_a_second():
    _, sites, _, best = llama_seconds()
    assert sites == 32 * 2 + 1 + 32 * 2 + 32 + 1  # norms, rotary embeddings, gated units, the loss
    assert best < 0.2


def test_the_count_of_what_a_model_has_is_of_its_modules():
    model, arguments = build("Llama", torch.float32)
    with counting(model) as found:
        model(**arguments)
    assert found == Counter(norm=5, rotary=4, glu=2, loss=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_with_lengths_that_change_the_same_sites_are_found_and_nothing_is_compiled_again(name):
    model, arguments = build(name, torch.float32)
    with counting(model) as expected, torch.no_grad():
        model(**arguments)
    ours = copy.deepcopy(model)
    jitted = forge.jit(ours, executors=[Finder(), "torch"], dynamic=True)
    for length in (arguments["input_ids"].shape[1], 5, 11):
        ids = torch.randint(0, 90, (2, length))
        given = {**arguments, "input_ids": ids, "labels": ids}
        given = {key: value for key, value in given.items() if key != "attention_mask"}
        for each in (jitted, model):
            each.zero_grad()
            each(**given).loss.backward()
        for actual, wanted in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, wanted.grad)
    assert forge.explain(jitted).graphs == 1
    assert sites_in(forge.last_traces(jitted)) == expected
