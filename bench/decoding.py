"""The benchmark of transformers' `generate` in tokens per second: forge, torch.compile as in transformers, and eager.

    python -m bench.decoding [--device cpu|cuda] [--family llama|lfm2|mamba|bart] [--batches 1 16] [--prompt N]
                             [--tokens N] [--cache static|dynamic] [--weights int8 int4 fp8] [--rounds N] [--profile]

A Llama with random weights (on a GPU 16 layers of 2048 in bfloat16, on a CPU 8 of 512 in float32), or a model of
another family of this size, decodes greedily with a static cache, or with transformers' default, which grows. All
systems run in one process, in turn; figures are medians over rounds, and tokens are compared with eager's.
"""

import argparse
import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import forge
from forge.ir.printing import table

_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_SMALL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 1024,
}  # fmt: skip
FAMILIES = ("llama", "lfm2", "mamba", "bart")
STATIC, DYNAMIC = "static", "dynamic"
WEIGHTS = {
    "int8": forge.quantize.Int8WeightOnly,
    "int4": forge.quantize.Int4WeightOnly,
    "fp8": forge.quantize.Float8WeightOnly,
}
EAGER, PEER, OURS = "eager", "torch.compile by transformers", "forge"


def model_of(family: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a family, in evaluation mode: Llama, Lfm2 (convolutions, and attention in each third layer),
    Mamba, or an encoder-decoder with as many layers in each half."""
    torch.manual_seed(0)
    sizes = dict(_LLAMA_1B if device == "cuda" else _SMALL)
    if family == "lfm2":
        kinds = ("conv", "conv", "full_attention")
        sizes |= {"layer_types": [kinds[i % 3] for i in range(sizes["num_hidden_layers"])]}
    elif family == "bart":
        width, layers, heads = (sizes.pop(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        halves = {"layers": layers, "attention_heads": heads, "ffn_dim": sizes.pop("intermediate_size")}
        sizes |= {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in halves.items()}
        sizes |= {"d_model": width, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = AutoConfig.for_model(family, **sizes, eos_token_id=None, bos_token_id=None)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device(device):
        return kind.from_config(config).to(dtype).eval()


def systems(
    model: PreTrainedModel, device: str, frozen: bool, cache: str, weights: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the timed models by system, each with its arguments of `generate`."""

    def own() -> PreTrainedModel:
        return copy.deepcopy(model, {id(each): each for each in model.parameters()})

    models = {EAGER: (own(), {"disable_compile": True}), PEER: (own(), {})}
    if device == "cpu" or cache != STATIC:  # transformers compiles on accelerators, for static caches only
        models[PEER][0].forward = torch.compile(models[PEER][0].forward)
    models[OURS] = (forge.jit(own()), {})
    if frozen:
        models[f"{OURS}, frozen"] = (forge.jit(own(), freeze=True), {})
    for name in weights:
        models[f"{OURS}, {name}"] = (forge.jit(own(), transforms=[WEIGHTS[name]()]), {})
    return models


def decode(model: Any, prompt: torch.Tensor, tokens: int, cache: str, **options: Any) -> torch.Tensor:
    """Return the continuation of prompts by some tokens."""
    with torch.no_grad():
        return model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation=cache,
            attention_mask=torch.ones_like(prompt), pad_token_id=0, **options,
        )  # fmt: skip


def profile_of(run: Callable[[], Any], tokens: int) -> None:
    """Print the longest kernels of a decoding, per token, and a profile of its Python code."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += 1
            total[event.name][1] += event.device_time
    rows = [("kernel", "launches a token", "us a token")]
    rows.append(("all", *(f"{sum(each[i] for each in total.values()) / tokens:.1f}" for i in (0, 1))))
    for name, (count, time_) in sorted(total.items(), key=lambda item: -item[1][1])[:16]:
        rows.append((name[:90], f"{count / tokens:.1f}", f"{time_ / tokens:.1f}"))
    print(*table(rows), sep="\n")
    profiler_of_python = cProfile.Profile()
    profiler_of_python.runcall(run)
    pstats.Stats(profiler_of_python).sort_stats("tottime").print_stats(28)


def compare(device: str, dtype: torch.dtype, batch: int, options: argparse.Namespace) -> None:
    """Print the tokens per second of each system."""
    model = model_of(options.family, device, dtype)
    prompt = torch.randint(3, model.config.vocab_size, (batch, options.prompt), device=device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = defaultdict(list)
    first: dict[str, float] = {}
    cold: dict[str, float] = {}  # seconds of the first token, and of the first run of all tokens
    tokens: dict[str, torch.Tensor] = {}
    models = systems(model, device, options.frozen, options.cache, options.weights)
    models = {name: each for name, each in models.items() if not options.only or name in (PEER, *options.only)}
    runs = {name: partial(decode, each, cache=options.cache, **arguments) for name, (each, arguments) in models.items()}
    for name, run in runs.items():
        start = time.perf_counter()
        tokens[name] = run(prompt, 1)
        finish()
        first[name] = time.perf_counter() - start
        run(prompt, options.tokens)
        finish()
        cold[name] = time.perf_counter() - start
        run(prompt, options.tokens)
    for name, (each, _) in models.items():
        if name.startswith(OURS):
            forge.finish_compiling(each)
    for name, run in runs.items():
        tokens[name] = run(prompt, options.tokens)
    for _ in range(options.rounds):
        for name, run in runs.items():
            finish()
            start = time.perf_counter()
            run(prompt, options.tokens)
            finish()
            seconds[name].append(time.perf_counter() - start)
    peer = seconds[PEER]
    base = seconds.get(OURS, peer)
    rows = [
        (
            "",
            "tokens a second",
            "of torch.compile's",
            "of forge's",
            "ms a step",
            "first token, s",
            "and all, s",
            "tokens like eager's",
        )
    ]
    for name, each in seconds.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(peer, each, strict=True))
        to_ours = statistics.median(theirs / ours for theirs, ours in zip(base, each, strict=True))
        rate = batch * options.tokens / statistics.median(each)
        same = (tokens[name] == tokens.get(EAGER, tokens[name]))[:, -options.tokens :].float().mean().item()
        step = 1e3 * statistics.median(each) / options.tokens
        rows.append(
            (
                name,
                f"{rate:.0f}",
                f"{ratio:.2f}",
                f"{to_ours:.2f}",
                f"{step:.2f}",
                f"{first[name]:.1f}",
                f"{cold[name]:.1f}",
                f"{same:.0%}",
            )
        )
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = f"{batch} x {options.prompt} + {options.tokens} tokens, {options.cache} cache"
    print(f"{where}, torch {torch.__version__}, {options.family}, {str(dtype)[6:]}, {sizes}")
    print(*table(rows), sep="\n", flush=True)
    if options.profile and device == "cuda":
        for name in filter(lambda name: name.startswith(OURS), runs):
            print(name)
            profile_of(partial(runs[name], prompt, options.tokens), options.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--cache", choices=(STATIC, DYNAMIC), default=STATIC)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help=f"systems beside torch.compile: {EAGER}, {OURS}")
    parser.add_argument("--frozen", action="store_true", help="one more row: forge.jit(freeze=True)")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=[], help="more rows: quantized weights")
    parser.add_argument("--profile", action="store_true", help="kernels and Python functions of a decoding")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    for batch in options.batches:
        compare(options.device, dtype, batch, options)


if __name__ == "__main__":
    main()
