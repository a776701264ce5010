"""Hand-written models of kinds that the transformers library does not have: diffusion, graph, recurrent and generative
models, radiance fields."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.zoo import BATCH, HEADS, LENGTH, VOCAB, WIDTH, model


def waves_of(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sines and cosines of positions at frequencies that decrease from 1 to 1 / 10000."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=positions.device) / (width // 2))
    angles = positions[..., None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Residual(nn.Module):
    """Two convolutions, with the time embedding added between them."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width_in), nn.Conv2d(width_in, width_out, 3, padding=1)
        self.time = nn.Linear(WIDTH, 2 * width_out)
        self.norm2, self.conv2 = nn.GroupNorm(4, width_out), nn.Conv2d(width_out, width_out, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width_out, 1) if width_in != width_out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.conv2(F.silu(self.norm2(hidden) * (1 + scale) + shift))


class Spatial(nn.Module):
    """An attention of every pixel to all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, HEADS, -1)).transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).flatten(1, 2).view_as(x)
        return x + self.out(mixed)


class Diffusion(nn.Module):
    """A model that predicts the noise in images from the images and the diffusion step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8), Residual(8, 16)])
        self.smaller = nn.ModuleList([nn.Conv2d(width, width, 3, stride=2, padding=1) for width in (8, 16)])
        self.middle, self.attention = Residual(16, 16), Spatial(16)
        self.up = nn.ModuleList([Residual(32, 16), Residual(24, 8)])
        self.last = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0))

    def forward(self, images: torch.Tensor, steps: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        kept = self.kept[steps][:, None, None, None]
        x = self.first(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        time = self.time(waves_of(steps, WIDTH))
        skips = []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            x = block(x, time)
            skips.append(x)
            x = smaller(x)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), time)
        return F.mse_loss(self.last(x), noise)


@model
def diffusion_unet():
    images = torch.randn(BATCH, 3, 16, 16)
    return Diffusion(), {
        "images": images,
        "steps": torch.randint(100, (BATCH,)),
        "noise": torch.randn_like(images),
    }


def edges(nodes: int, count: int) -> torch.Tensor:
    return torch.randint(nodes, (2, count))


class GraphConvolution(nn.Module):
    """A graph convolution: each node is the sum of its neighbours, weighted by both their degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.ones(len(x), device=x.device).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        weight = (degree[source] * degree[target]).rsqrt()
        for layer in self.layers:
            messages = layer(x)
            x = torch.zeros_like(messages).index_add_(0, target, messages[source] * weight[:, None])
            x = F.relu(x + messages / degree[:, None])
        pooled = torch.zeros(2, x.shape[1], device=x.device).scatter_add(0, graphs[:, None].expand_as(x), x)
        return self.head(pooled)


@model
def graph_convolution():
    return GraphConvolution(), {"x": torch.randn(12, 8), "edges": edges(12, 30), "graphs": torch.arange(12) // 6}


class GraphAttention(nn.Module):
    """A graph attention: each node attends to its neighbours by a softmax over its incoming edges."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(8, HEADS * 8)
        self.scores = nn.Parameter(torch.randn(2, HEADS, 8) / 4)
        self.head = nn.Linear(HEADS * 8, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        values = self.values(x).view(len(x), HEADS, -1)
        ours, theirs = (values * self.scores[0]).sum(-1), (values * self.scores[1]).sum(-1)
        scores = F.leaky_relu(theirs[source] + ours[target], 0.2)
        index = target[:, None].expand_as(scores)
        top = torch.full_like(ours, float("-inf")).scatter_reduce(0, index, scores.detach(), "amax")
        weights = (scores - top[target]).exp()
        total = torch.zeros_like(ours).scatter_add(0, index, weights)
        weights = weights / total[target].clamp(min=1e-6)
        mixed = torch.zeros_like(values).index_add(0, target, values[source] * weights[..., None])
        return self.head(F.elu(mixed.flatten(1)))


@model
def graph_attention():
    return GraphAttention(), {"x": torch.randn(12, 8), "edges": edges(12, 30)}


class MessagePassing(nn.Module):
    """A message passing layer: messages from both nodes and the edge; their mean and maximum go through a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(8 + 8 + 4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.update = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, of_edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for _ in range(3):
            messages = self.message(torch.cat([x[source], x[target], of_edges], -1))
            index = target[:, None].expand_as(messages)
            mean = torch.zeros_like(x).scatter_reduce(0, index, messages, "mean", include_self=False)
            largest = torch.zeros_like(x).scatter_reduce(0, index, messages, "amax", include_self=False)
            x = self.update(torch.cat([mean, largest], -1), x)
        return self.head(x)


@model
def message_passing():
    return MessagePassing(), {"x": torch.randn(12, 8), "edges": edges(12, 30), "of_edges": torch.randn(30, 4)}


class LSTMLanguage(nn.Module):
    """A language model with embeddings tied to the head and two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(ids[:, :-1]))
        return F.cross_entropy((states @ self.embedding.weight.t()).flatten(0, 1), ids[:, 1:].flatten())


@model
def lstm_language():
    return LSTMLanguage(), {"ids": torch.randint(VOCAB, (BATCH, LENGTH))}


class GRUTranslator(nn.Module):
    """A translator in which a bidirectional GRU reads, and another GRU writes with additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
        self.reader = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.writer = nn.GRUCell(16 + 32, 32)
        self.of_read, self.of_state, self.score = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read, last = self.reader(self.source(source))
        state, keys = last.transpose(0, 1).flatten(1), self.of_read(read)
        logits = []
        for token in self.target(target[:, :-1]).unbind(1):
            weights = self.score(torch.tanh(keys + self.of_state(state)[:, None])).softmax(1)
            seen = (weights * read).sum(1)
            state = self.writer(torch.cat([token, seen], -1), state)
            logits.append(self.head(torch.cat([state, seen], -1)))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target[:, 1:].flatten())


@model
def gru_translator():
    return GRUTranslator(), {
        "source": torch.randint(VOCAB, (BATCH, 7)),
        "target": torch.randint(VOCAB, (BATCH, 5)),
    }


class ConvLSTM(nn.Module):
    """An LSTM whose gates are convolutions over the frames of a video; it predicts the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(3 + 8, 32, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        hidden = cell = video.new_zeros(video.shape[0], 8, *video.shape[-2:])
        for frame in video.unbind(1):
            keep, take, give, new = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            hidden = give.sigmoid() * cell.tanh()
        return self.head(hidden)


@model
def conv_lstm():
    return ConvLSTM(), {"video": torch.randn(BATCH, 4, 3, 8, 8)}


class RealNVP(nn.Module):
    """A normalizing flow of affine couplings: the negative log-likelihood of points."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)])
        for i in range(4):
            self.register_buffer(f"mask{i}", (torch.arange(4) % 2 == i % 2).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        determinant = x.new_zeros(len(x))
        for i, net in enumerate(self.nets):
            mask = getattr(self, f"mask{i}")
            scale, shift = net(x * mask).chunk(2, -1)
            scale = scale.tanh() * (1 - mask)
            x = x * scale.exp() + shift * (1 - mask)
            determinant = determinant + scale.sum(-1)
        normal = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        return -(normal.log_prob(x).sum(-1) + determinant).mean()


@model
def normalizing_flow():
    return RealNVP(), {"x": torch.randn(16, 4)}


class VAE(nn.Module):
    """A variational autoencoder: convolutions to a normal distribution, a sample, and transposed convolutions back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU())
        self.moments, self.start = nn.Linear(16 * 16, 8), nn.Linear(4, 16 * 16)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.moments(self.encoder(images).flatten(1)).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        made = self.decoder(self.start(code).unflatten(1, (16, 4, 4)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        likelihood = F.binary_cross_entropy_with_logits(made, images, reduction="none").sum((1, 2, 3))
        return (likelihood + divergence).mean()


@model
def vae():
    return VAE(), {"images": torch.rand(BATCH, 1, 16, 16)}


class VQVAE(nn.Module):
    """A vector-quantized autoencoder with straight-through gradients; the codebook follows by moving averages in
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        book = torch.randn(16, 4)
        self.register_buffer("book", book)
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", book.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.encoder(x)
        chosen = torch.cdist(code, self.book).argmin(-1)
        quantized = F.embedding(chosen, self.book)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 16).to(x.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ code, alpha=0.1)
                self.book.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        made = self.decoder(code + (quantized - code).detach())
        return F.mse_loss(made, x) + 0.25 * F.mse_loss(code, quantized.detach())


@model
def vq_vae():
    return VQVAE(), {"x": torch.randn(16, 8)}


class Field(nn.Module):
    """A radiance field: colours and densities along rays, and the rendered pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 + 36, 32), nn.Linear(32 + 3 + 36, 32)
        self.density, self.colour = nn.Linear(32, 1), nn.Sequential(nn.Linear(32 + 3, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, origins: torch.Tensor, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        depths = torch.linspace(1.0, 4.0, 8, device=origins.device)
        points = origins[:, None] + directions[:, None] * depths[:, None]
        angles = points[..., None] * 2.0 ** torch.arange(6, device=origins.device)
        known = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        hidden = F.relu(self.second(torch.cat([F.relu(self.first(known)), known], -1)))
        density = F.softplus(self.density(hidden)).squeeze(-1)
        view = F.normalize(directions, dim=-1)[:, None].expand_as(points)
        colour = self.colour(torch.cat([hidden, view], -1)).sigmoid()
        steps = torch.cat([depths.diff(), depths.new_full((1,), 1e10)])
        opaque = 1 - torch.exp(-density * steps)
        passed = torch.cumprod(1 - opaque + 1e-10, -1).roll(1, -1)
        passed = torch.cat([torch.ones_like(passed[:, :1]), passed[:, 1:]], -1)
        weights = opaque * passed
        return (weights[..., None] * colour).sum(1), (weights * depths).sum(1)


@model
def radiance_field():
    return Field(), {"origins": torch.randn(6, 3), "directions": torch.randn(6, 3)}


class TransformerXL(nn.Module):
    """An attention to this segment and to the states of the previous one, with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.r, self.out, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.u, self.v = nn.Parameter(torch.randn(HEADS, 8)), nn.Parameter(torch.randn(HEADS, 8))

    def forward(self, ids: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        batch, length, _ = x.shape
        seen = torch.cat([memory, x], 1)
        q = self.q(x).view(batch, length, HEADS, -1)
        k, v = self.kv(seen).view(batch, seen.shape[1], HEADS, -1).chunk(2, -1)
        distances = torch.arange(seen.shape[1] - 1, -1, -1, device=x.device)
        r = self.r(waves_of(distances, WIDTH)).view(-1, HEADS, WIDTH // HEADS)
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        position = torch.einsum("bihd,jhd->bhij", q + self.v, r)
        position = F.pad(position, (1, 0)).view(batch, HEADS, -1, length)[:, :, 1:].view_as(position)
        later = torch.ones_like(content[0, 0], dtype=torch.bool).triu(1 + memory.shape[1])
        weights = ((content + position) / 8**0.5).masked_fill(later, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        states = self.norm(x + self.out(mixed))
        return self.head(states), states.detach()


@model
def transformer_xl():
    return TransformerXL(), {"ids": torch.randint(VOCAB, (BATCH, 6)), "memory": torch.randn(BATCH, 6, WIDTH)}
