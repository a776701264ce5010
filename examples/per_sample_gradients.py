"""The gradient of each sample's loss, by torch.vmap of torch.func.grad: how much does each one pull at the weights?

    python examples/per_sample_gradients.py [--steps 200] [--eager]

Trains a small classifier with differentially private steps (Abadi et al. 2016): each sample's gradient is scaled to a
norm of at most 1, so that no single one decides the step, and noise is added to their sum.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import forge

SAMPLES, FEATURES, CLASSES = 256, 16, 4
LIMIT, NOISE, RATE = 1.0, 0.02, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eager", action="store_true", help="without forge")
    options = parser.parse_args()
    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)
    labels = torch.randint(CLASSES, (SAMPLES,))
    features = centers[labels] + 0.5 * torch.randn(SAMPLES, FEATURES)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES))
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def loss(weights: dict, sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, weights, (sample[None],)), label[None])

    def clipped(weights: dict, features: torch.Tensor, labels: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """The mean of the samples' gradients, each scaled to LIMIT, and how long each was."""
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, features, labels)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
        scale = (LIMIT / norms.clamp(min=LIMIT)) / len(labels)
        return {name: torch.einsum("s,s...->...", scale, g) for name, g in each.items()}, norms

    step = clipped if options.eager else forge.jit(clipped)
    step(weights, features, labels)
    started = time.perf_counter()
    for _ in range(options.steps):
        gradients, norms = step(weights, features, labels)
        weights = {
            name: value - RATE * (gradients[name] + NOISE * LIMIT / len(labels) * torch.randn_like(value))
            for name, value in weights.items()
        }
    seconds = time.perf_counter() - started
    right = (functional_call(net, weights, (features,)).argmax(1) == labels).float().mean()
    print(f"{right:.0%} right after {options.steps} steps, {1e3 * seconds / options.steps:.2f} ms each")
    print(f"the longest gradient of a sample: {norms.max():.2f}, the median: {norms.median():.2f}")
    if not options.eager:
        print(forge.explain(step))


if __name__ == "__main__":
    main()
