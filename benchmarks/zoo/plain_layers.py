"""Plain models around one unusual layer each: parametrised weights, generated weights, solvers, attention to latents."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.batches import Batch, cross_entropy
from benchmarks.zoo.plain_parts import WIDTH, classes, features, fixed, generator, mean_squared, mlp, plain
from benchmarks.zoo.registry import ZooModel


class Mixer(nn.Module):
    """MLPs over tokens and over channels (Tolstikhin et al. 2021)."""

    def __init__(self, tokens: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * layers))
        self.across = nn.ModuleList(mlp(tokens, 64, tokens, act=nn.GELU) for _ in range(layers))
        self.within = nn.ModuleList(mlp(WIDTH, 256, WIDTH, act=nn.GELU) for _ in range(layers))
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + within(self.norms[2 * i + 1](x))
        return self.out(x.mean(1))


def sets(number: int, rows: int = 16, members: int = 16) -> Batch:
    """Sets of rows around the centre of their class."""
    source = generator(number)
    target = torch.randint(10, (rows,), generator=source)
    noise = torch.randn(rows, members, WIDTH, generator=source)
    return Batch((0.3 * fixed(10, WIDTH)[target][:, None] + noise,), target=target)


class Across(nn.Module):
    """Multi-head attention of torch.nn from one set to another, then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm1, self.norm2, self.body = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mlp(WIDTH, 256, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, y, y, need_weights=False)[0])
        return self.norm2(x + self.body(x))


class SetTransformer(nn.Module):
    """Induced attention: a few learnt points stand between a set and itself (Lee et al. 2019)."""

    def __init__(self, points: int = 8) -> None:
        super().__init__()
        self.points, self.seed = (nn.Parameter(0.1 * torch.randn(n, WIDTH)) for n in (points, 1))
        self.gather, self.spread, self.pool, self.out = Across(), Across(), Across(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spread(x, self.gather(self.points.expand(len(x), -1, -1), x))
        return self.out(self.pool(self.seed.expand(len(x), -1, -1), x)[:, 0])


class Perceiver(nn.Module):
    """Latents that read the input, then one another, twice with one weight (Jaegle et al. 2021)."""

    def __init__(self, latents: int = 16) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.1 * torch.randn(latents, WIDTH))
        self.read, self.think, self.out = Across(), Across(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            state = self.read(state, x)
            state = self.think(state, state)
        return self.out(state.mean(1))


class LoRA(nn.Module):
    """A frozen linear and a product of two thin ones. ``merged``: added to the weight, not to the result."""

    def __init__(self, n: int, m: int, rank: int, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.a, self.b = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)
        nn.init.normal_(self.b.weight, std=0.02)
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.b.weight @ self.a.weight, self.base.bias)
        return self.base(x) + self.b(self.a(x))


class HyperNetwork(nn.Module):
    """A linear whose weight another network makes from a context (Ha et al. 2016)."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.size, self.into, self.out = size, nn.Linear(WIDTH, size), nn.Linear(size, 16)
        self.context = nn.Parameter(torch.randn(16, 32))
        self.make = nn.Linear(32, size * size // 16)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.context).reshape(self.size, self.size)
        return self.out(torch.tanh(F.linear(self.into(x), weight / self.size**0.5)))


class NeuralODE(nn.Module):
    """Eight fixed steps of Runge and Kutta's fourth order, each with the same weights."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.steps, self.field, self.out = steps, mlp(WIDTH, 256, WIDTH, act=nn.Tanh), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / self.steps
        for _ in range(self.steps):
            a = self.field(x)
            b = self.field(x + h / 2 * a)
            c = self.field(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))
        return self.out(x)


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer with Gaussian bumps for splines: a linear of what the bumps make of each input."""

    centres: Tensor

    def __init__(self, n: int, m: int, bumps: int = 8) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, bumps))
        self.base, self.bent = nn.Linear(n, m), nn.Linear(n * bumps, m, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        bumps = torch.exp(-(x[..., None] - self.centres).square() * 4)
        return self.base(F.silu(x)) + self.bent(bumps.flatten(-2))


class Checkpointed(nn.Module):
    """Blocks whose insides are computed again in the backward, by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = (
            nn.ModuleList(mlp(WIDTH, 256, WIDTH, act=nn.GELU) for _ in range(3)),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class Equilibrium(nn.Module):
    """Twelve steps to a fixed point without a gradient, and one with it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.turn, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        nn.init.normal_(self.turn.weight, std=0.03)

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(12):
                z = torch.tanh(self.turn(z) + u)
        return self.out(torch.tanh(self.turn(z) + u))


class Highway(nn.Module):
    """Gated layers x t + h (1 - t) in a deep stack (Srivastava et al. 2015)."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers, self.out = (
            nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers)),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h, t = layer(x).chunk(2, -1)
            gate = torch.sigmoid(t - 1)
            x = F.relu(h) * gate + x * (1 - gate)
        return self.out(x)


def lora(merged: bool, rank: int = 16) -> Callable[[], nn.Module]:
    """An MLP of such layers."""
    return lambda: nn.Sequential(
        LoRA(WIDTH, 256, rank, merged), nn.GELU(), LoRA(256, WIDTH, rank, merged), nn.Linear(WIDTH, 10)
    )


def critic(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """An MLP whose linears are wrapped."""
    return lambda: nn.Sequential(
        wrap(nn.Linear(WIDTH, 256)),
        nn.LeakyReLU(0.2),
        wrap(nn.Linear(256, WIDTH)),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, 10),
    )


MODELS: tuple[ZooModel, ...] = (
    plain("mlp_mixer", Mixer, sets, cross_entropy),
    plain("set_transformer", SetTransformer, sets, cross_entropy),
    plain("perceiver", Perceiver, sets, cross_entropy),
    plain("lora", lora(merged=False), classes, cross_entropy),
    plain("lora_rank_8", lora(merged=False, rank=8), classes, cross_entropy),
    plain("lora_merged", lora(merged=True), classes, cross_entropy),
    plain("hypernetwork", HyperNetwork, features, mean_squared),
    plain("neural_ode", NeuralODE, features, mean_squared),
    plain("kan", lambda: nn.Sequential(Splines(WIDTH, 64), Splines(64, 16)), features, mean_squared),
    plain("checkpointed", Checkpointed, classes, cross_entropy),
    plain("equilibrium", Equilibrium, classes, cross_entropy),
    plain("highway", Highway, classes, cross_entropy),
    plain("spectral_norm", critic(spectral_norm), classes, cross_entropy),
    plain("weight_norm", critic(weight_norm), classes, cross_entropy),
    plain("orthogonal", critic(lambda linear: orthogonal(linear, orthogonal_map="cayley")), classes, cross_entropy),
)
