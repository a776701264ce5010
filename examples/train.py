"""Trains a small Llama on the characters of a text, jitted: the loop is as it is in eager.

python examples/train.py [--text README.md] [--steps 100] [--eager]
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge

CONTEXT = 64
BATCH = 16


def batches(text: str) -> tuple[int, torch.Tensor]:
    """Return the number of different characters, and every window of the text as their numbers."""
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = torch.tensor([number[character] for character in text])
    return len(alphabet), ids.unfold(0, CONTEXT, 1)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eager", action="store_true", help="do not jit, to compare")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary, windows = batches(options.text.read_text())
    model = make_model(vocabulary).to(device).train()
    if not options.eager:
        model = forge.jit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        ids = windows[torch.randint(len(windows), (BATCH,))].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.perf_counter() - start:6.1f} s")
    if not options.eager:
        print(str(forge.explain(model)).splitlines()[0])


if __name__ == "__main__":
    main()
