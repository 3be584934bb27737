"""Plain models of tables, graphs and games: recommenders, message passing, experts, densities, policies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import Batch, cross_entropy
from benchmarks.zoo.plain_parts import (
    ROWS,
    WIDTH,
    binary,
    classes,
    features,
    fixed,
    generator,
    given,
    mean_squared,
    mlp,
    plain,
    wide,
)
from benchmarks.zoo.registry import ZooModel

FIELDS, KINDS, DENSE = 6, 50, 16


def clicks(number: int) -> Batch:
    """Dense and categorical features, and whether there was a click."""
    source = generator(number)
    dense = torch.randn(ROWS, DENSE, generator=source)
    kinds = torch.randint(KINDS, (ROWS, FIELDS), generator=source)
    score = dense @ fixed(DENSE) / 4 + fixed(FIELDS, KINDS)[torch.arange(FIELDS), kinds].sum(1)
    return Batch((dense, kinds), target=(score > 0).float())


class DLRM(nn.Module):
    """Embeddings of the categories, their dot products with one another, an MLP (Naumov et al. 2019)."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(KINDS, size, mode="sum") for _ in range(FIELDS))
        self.bottom, self.top = mlp(DENSE, WIDTH, size), mlp(size + FIELDS * (FIELDS + 1) // 2, WIDTH, WIDTH, 1)

    def forward(self, dense: Tensor, kinds: Tensor) -> Tensor:
        x = self.bottom(dense)
        each = torch.stack([x, *(t(kinds[:, i : i + 1]) for i, t in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        return self.top(torch.cat([x, (each @ each.transpose(1, 2))[:, rows, columns]], 1)).squeeze(-1)


class WideAndDeep(nn.Module):
    """A linear model of the categories beside an MLP (Cheng et al. 2016)."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.wide, self.deep = nn.Embedding(FIELDS * KINDS, 1), nn.Embedding(FIELDS * KINDS, size)
        self.body = mlp(FIELDS * size + DENSE, 256, WIDTH, 1)

    def forward(self, dense: Tensor, kinds: Tensor) -> Tensor:
        kinds = kinds + KINDS * torch.arange(FIELDS)
        deep = self.body(torch.cat([self.deep(kinds).flatten(1), dense], 1))
        return deep.squeeze(-1) + self.wide(kinds).sum((1, 2))


class DeepCross(nn.Module):
    """Three cross layers x0 * (W x) + x (Wang et al. 2021)."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(FIELDS * KINDS, size)
        width = FIELDS * size + DENSE + 16
        self.widen = nn.Linear(DENSE, DENSE + 16)
        self.crosses, self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 1)

    def forward(self, dense: Tensor, kinds: Tensor) -> Tensor:
        first = torch.cat([self.embed(kinds + KINDS * torch.arange(FIELDS)).flatten(1), self.widen(dense)], 1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.out(x).squeeze(-1)


class TwoTower(nn.Module):
    """Users and items in one space; each user's item against those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp(WIDTH, 256, 64), mlp(WIDTH, 256, 64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        a, b = (F.normalize(wide(x), dim=-1) for x in (self.user(users), self.item(items)))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def pairs(number: int) -> Batch:
    """Users, and items that are a fixed map of them with noise."""
    source = generator(number)
    users, noise = (torch.randn(ROWS, WIDTH, generator=source) for _ in range(2))
    return Batch((users, users @ fixed(WIDTH, WIDTH) / WIDTH**0.5 + 0.3 * noise))


class GraphNet(nn.Module):
    """Messages along edges, summed at their ends by index_add."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.into(nodes)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            came = torch.zeros_like(x).index_add(0, edges[1], sent.to(x.dtype))
            x = x + F.relu(update(torch.cat([x, came], -1)))
        return self.out(x)


class GraphAttention(nn.Module):
    """A dense graph-attention layer over an adjacency matrix (Velickovic et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.into(nodes)
        joined = torch.eye(len(x), dtype=torch.bool).index_put((edges[0], edges[1]), torch.tensor(True))
        scores = F.leaky_relu(self.left(x) + self.right(x).T, 0.2).float().masked_fill(~joined, float("-inf"))
        return self.out(F.elu(scores.softmax(-1).to(x.dtype) @ x))


def graph(number: int, degree: int = 4) -> Batch:
    """Nodes around the centre of their class, and edges between nodes at random."""
    found = classes(number)
    edges = torch.randint(ROWS, (2, degree * ROWS), generator=generator(number + 1))
    return Batch((*found.args, edges), target=found.target)


class DenseExperts(nn.Module):
    """Every expert sees every row; a gate weighs them. ``batched``: the experts' weights are one tensor."""

    def __init__(self, experts: int = 4, batched: bool = False) -> None:
        super().__init__()
        self.gate, self.out, self.batched = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, 10), batched
        if batched:
            self.up = nn.Parameter(torch.randn(experts, WIDTH, 256) / WIDTH**0.5)
            self.down = nn.Parameter(torch.randn(experts, 256, WIDTH) / 16)
        else:
            self.experts = nn.ModuleList(mlp(WIDTH, 256, WIDTH, act=nn.GELU) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        if self.batched:
            rows = x.expand(len(self.up), *x.shape)
            found = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).transpose(0, 1)
        else:
            found = torch.stack([expert(x) for expert in self.experts], 1)
        return self.out(x + (share[..., None] * found).sum(1))


class RoutedExperts(nn.Module):
    """The best expert alone, by boolean masks: rows that only a run counts."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, 10)
        self.experts = nn.ModuleList(mlp(WIDTH, 256, WIDTH, act=nn.GELU) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        share, best = self.gate(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(best == number)[0]
            found = found.index_add(0, rows, (expert(x[rows]) * share[rows, None]).to(x.dtype))
        return self.out(x + found)


class RealNVP(nn.Module):
    """Affine couplings; the negative log-likelihood per dimension, and the density's constant, so that it is positive."""

    def __init__(self, size: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(size // 2, WIDTH, WIDTH, size) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        size, log_volume = x.shape[1], torch.zeros(len(x))
        for part in self.parts:
            a, b = x.chunk(2, -1)
            scale, shift = wide(part(a)).chunk(2, -1)
            scale = torch.tanh(scale)
            x, log_volume = torch.cat([b * scale.exp() + shift, a], -1), log_volume + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - log_volume).mean() / size + 0.5 * math.log(2 * math.pi)


def correlated(number: int) -> Batch:
    """Draws from a Gaussian whose coordinates depend on one another."""
    return Batch((torch.randn(ROWS, 32, generator=generator(number)) @ fixed(32, 32) / 32**0.5 * 2 + 1,))


class MixtureDensity(nn.Module):
    """The density of a target as a mixture of five Gaussians (Bishop 1994)."""

    def __init__(self, parts: int = 5) -> None:
        super().__init__()
        self.body, self.out = mlp(WIDTH, 256, WIDTH), nn.Linear(WIDTH, 3 * parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, log_width = wide(self.out(F.relu(self.body(x)))).chunk(3, -1)
        log_width = log_width.clamp(-1, 3)
        each = -0.5 * ((y - mean) * torch.exp(-log_width)).square() - log_width - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(share.log_softmax(-1) + each, -1).mean()


def two_branches(number: int) -> Batch:
    """Targets that are a function of the features or its negative."""
    found = features(number)
    assert found.target is not None
    sign = torch.randint(2, (ROWS, 1), generator=generator(number + 1)) * 2 - 1
    return Batch((*found.args, 4 * sign * found.target[:, :1]))


class ActorCritic(nn.Module):
    """A policy and a value from one trunk; PPO's clipped loss, the value's, and an entropy bonus."""

    def __init__(self, clip: float | None, actions: int = 16) -> None:
        super().__init__()
        self.clip, self.trunk = clip, mlp(WIDTH, 256, WIDTH, act=nn.Tanh)
        self.policy, self.value = nn.Linear(WIDTH, actions), nn.Linear(WIDTH, 1)

    def forward(self, states: Tensor, actions: Tensor, returns: Tensor, before: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(states))
        log_p = wide(self.policy(x)).log_softmax(-1)
        value = wide(self.value(x)).squeeze(-1)
        advantage = (returns - value).detach()
        taken = log_p.gather(-1, actions[:, None]).squeeze(-1)
        ratio = (taken - before).exp()
        if self.clip is None:
            gain = taken * advantage
        else:
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return F.mse_loss(value, returns) - gain.mean() - 0.01 * entropy.mean()


def episode(number: int) -> Batch:
    """States, uniform actions, and returns that depend on both."""
    source = generator(number)
    states = torch.randn(ROWS, WIDTH, generator=source)
    actions = torch.randint(16, (ROWS,), generator=source)
    returns = 3 + (states @ fixed(WIDTH, 16) / WIDTH**0.5).gather(1, actions[:, None]).squeeze(1)
    return Batch((states, actions, returns, torch.full((ROWS,), -math.log(16))))


SKIPPED = "Dynamo skips a function with a graph break in a loop, so nothing of it is compiled"
CAPTURED = "the same with `torch._dynamo.config.capture_dynamic_output_shape_ops = True`"

MODELS: tuple[ZooModel, ...] = (
    plain("dlrm", DLRM, clicks, binary),
    plain("wide_and_deep", WideAndDeep, clicks, binary),
    plain("deep_cross", DeepCross, clicks, binary),
    plain("two_tower", TwoTower, pairs, given),
    plain("gnn", GraphNet, graph, cross_entropy),
    plain("graph_attention", GraphAttention, graph, cross_entropy),
    plain("dense_moe", DenseExperts, classes, cross_entropy),
    plain("batched_moe", lambda: DenseExperts(batched=True), classes, cross_entropy),
    plain("routed_moe", RoutedExperts, classes, cross_entropy, SKIPPED),
    plain(
        "routed_moe_captured",
        RoutedExperts,
        classes,
        cross_entropy,
        CAPTURED,
        capture_dynamic_output_shape_ops=True,
    ),
    plain("realnvp", RealNVP, correlated, given),
    plain("mixture_density", MixtureDensity, two_branches, given),
    plain("actor_critic", lambda: ActorCritic(None), episode, given),
    plain("ppo", lambda: ActorCritic(0.2), episode, given),
    plain("tabular", lambda: mlp(WIDTH, 256, 256, 16), features, mean_squared),
)
