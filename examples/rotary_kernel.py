"""A kernel that is right for some values alone: rotary embeddings whose cos and sin have two equal halves.

`assumes` checks the values of each call, and the pattern's own function runs where it is false; `samples` makes values
for verification that it is right for.

python examples/rotary_kernel.py
"""

import torch

import forge


def equal_halves(cos, sin):
    half = cos.shape[-1] // 2
    return torch.equal(cos[..., :half], cos[..., half:]) and torch.equal(sin[..., :half], sin[..., half:])


def samples(S, D, batch, dtype, device):
    angles = torch.randn(S, D // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {"x": torch.randn(*batch, S, D, dtype=dtype, device=device), "cos": cos, "sin": sin}


@forge.pattern
def rotary(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@forge.kernel(
    rotary,
    dtypes=[torch.float32],
    shape={"x": "[..., S, D]", "cos": "[S, D]", "sin": "[S, D]"},
    where="D % 2 == 0",
    assumes=equal_halves,
    samples=samples,
)
def by_halves(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin, a, b = cos[..., :half], sin[..., :half], x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def embed(x, cos, sin):  # as a model writes it
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


if __name__ == "__main__":
    jitted = forge.jit(embed, kernels=[by_halves])
    for angles in (torch.randn(16, 8).repeat(1, 2), torch.randn(16, 16)):  # the second by the pattern's function
        args = torch.randn(2, 16, 16), angles.cos(), angles.sin()
        torch.testing.assert_close(jitted(*args), embed(*args))
    print("run by", *(row.executor for row in forge.explain(jitted).rows))
