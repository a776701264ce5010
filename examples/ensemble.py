"""An ensemble of models that train as one: torch.vmap over their weights.

    python examples/ensemble.py [--members 8] [--steps 300] [--eager]

Each member fits noisy samples of a curve; where they disagree, there were no samples.
"""

import argparse
import time

import torch
from torch import nn
from torch.func import functional_call, stack_module_state

import forge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eager", action="store_true", help="without forge")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.cat([torch.rand(64, 1) * 2 - 3, torch.rand(64, 1) * 2 + 1])  # nothing between -1 and 1
    y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
    members = [nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(options.members)]
    weights, _ = stack_module_state(members)
    weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
    base = members[0]

    def predictions(weights: dict, x: torch.Tensor) -> torch.Tensor:
        """(members, samples, 1)"""
        return torch.vmap(lambda own: functional_call(base, own, (x,)))(weights)

    run = predictions if options.eager else forge.jit(predictions)
    optimizer = torch.optim.Adam(weights.values(), lr=0.02)
    started = time.perf_counter()
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = (run(weights, x) - y).square().mean((1, 2)).sum()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - started
    print(f"mean loss {loss.item() / options.members:.4f}, {1e3 * seconds / options.steps:.2f} ms a step")
    with torch.no_grad():
        for name, place in (("among the samples", -2.0), ("between them", 0.0)):
            spread = run(weights, torch.full((1, 1), place)).std()
            print(f"the members' predictions {name} spread by {spread:.3f}")
    if not options.eager:
        print(forge.explain(run))


if __name__ == "__main__":
    main()
