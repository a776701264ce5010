"""Trains a small ViT with transformers' Trainer, jitted, to tell bars that stand from bars that lie: images that the
script makes.

python examples/train_vit.py [--steps 100] [--eager]
"""

import argparse
import tempfile

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import forge

SIZE, PATCH = 32, 8


def images(count: int) -> list[dict[str, torch.Tensor]]:
    """Noise with a bright bar across it, standing (1) or lying (0)."""
    found = []
    for label in torch.randint(2, (count,)):
        pixels = 0.3 * torch.randn(3, SIZE, SIZE)
        place = int(torch.randint(SIZE - 4, ()))
        (pixels if label else pixels.transpose(1, 2))[:, :, place : place + 4] += 1.5
        found.append({"pixel_values": pixels, "labels": label})
    return found


def make_model() -> ViTForImageClassification:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=SIZE, patch_size=PATCH, num_labels=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eager", action="store_true", help="train without forge")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model()
    trained = model if options.eager else forge.jit(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=2e-3,
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True, logging_strategy="no", save_strategy="no",
            report_to=[],
        )  # fmt: skip
        trainer = Trainer(trained, arguments, train_dataset=images(256))
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    unseen = images(64)
    with torch.no_grad():
        pixels = torch.stack([each["pixel_values"] for each in unseen]).to(model.device)
        found = trained.eval()(pixel_values=pixels).logits.argmax(-1).cpu()
    right = (found == torch.stack([each["labels"] for each in unseen])).float().mean()
    print(f"mean loss {loss:.3f}, right of unseen images {right:.0%}")
    if not options.eager:
        print(*(f"compiled again: {reason}" for reason in forge.explain(trained).recompiles), sep="\n")


if __name__ == "__main__":
    main()
