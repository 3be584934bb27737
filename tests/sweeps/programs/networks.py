"""Small networks of the kinds people train: recurrent, adversarial, quantised, flows, experts, fields, graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, index, leaf, linear, modules, program, projected


@program(leaf(6, 32, 128), model=lambda: nn.LSTMCell(128, 128))
def an_lstm_cell_unrolled(m: Any, x: Tensor) -> Tensor:
    h = c = torch.zeros(32, 128)
    for step in x:
        h, c = m(step, (h, c))
    return h * c.sigmoid()


@program(leaf(6, 32, 128), model=lambda: nn.GRUCell(128, 128))
def a_gru_cell_unrolled(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(32, 128)
    for step in x:
        h = m(step, h)
    return h.sin()


@program(leaf(6, 32, 128), model=modules(i=lambda: nn.Linear(128, 512), h=lambda: nn.Linear(128, 512)))
def an_lstm_by_hand(m: Any, x: Tensor) -> Tensor:
    h = c = torch.zeros(32, 128)
    outs = []
    for step in x:
        i, f, g, o = (m["i"](step) + m["h"](h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outs.append(h)
    return torch.stack(outs)


@program(leaf(32, 6, 128), model=lambda: nn.GRU(128, 64, batch_first=True, bidirectional=True))
def a_bidirectional_gru(m: Any, x: Tensor) -> Tensor:
    return m(x)[0].sin()


@program(leaf(32, 6, 128), model=lambda: nn.LSTM(128, 64, 2, batch_first=True))
def an_lstm_of_two_layers(m: Any, x: Tensor) -> Tensor:
    return m(x)[0].sin()


def _adversarial(run: Run, model: Any, z: Tensor, real: Tensor) -> Values:
    discriminate = run.compiled(lambda h: model["d"](h))
    fake = run(z)
    d_loss = F.softplus(-discriminate(real)).mean() + F.softplus(discriminate(fake.detach())).mean()
    d_loss.backward()
    g_loss = F.softplus(-discriminate(fake)).mean()
    g_loss.backward()
    return {"loss": [d_loss, g_loss]}


@program(
    data(64, 64), data(64, 256), model=modules(g=linear(64, 256, 256), d=linear(256, 256, 1)), drive=_adversarial
)
def a_gan_step(m: Any, z: Tensor, real: Tensor | None = None) -> Tensor:
    return m["g"](z).tanh()


class VectorQuantizer(nn.Module):
    """Nearest codes, straight through, commitment loss, the codebook a running mean of what chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(256, 64), nn.Linear(64, 256)
        self.register_buffer("codes", torch.randn(64, 64) * 0.3)
        self.register_buffer("counts", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x)
        i = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[i]
        with torch.no_grad():
            hot = F.one_hot(i, 64).float()
            self.counts.lerp_(hot.sum(0), 0.1)
            self.codes.lerp_((hot.t() @ z) / self.counts[:, None].clamp_min(1e-3), 0.1)
        return F.mse_loss(self.d(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())


@program(leaf(64, 256), model=VectorQuantizer)
def a_vq_vae_with_running_codes(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(128, 256), model=modules(e=linear(256, 64), d=linear(64, 256), c=lambda: nn.Embedding(64, 64)))
def a_vq_vae_with_learned_codes(m: Any, x: Tensor) -> Tensor:
    z = m["e"](x)
    i = (z.square().sum(1, keepdim=True) - 2 * z @ m["c"].weight.t() + m["c"].weight.square().sum(1)).argmin(1)
    q = m["c"](i)
    losses = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
    return F.mse_loss(m["d"](z + (q - z).detach()), x) + losses


@program(leaf(128, 64), model=modules(d=linear(64, 128, 4)))
def volume_rendering(m: Any, x: Tensor) -> Tensor:
    field = m["d"](x.view(4, 32, 64))
    alpha = 1 - torch.exp(-F.relu(field[..., 0] * 3) * 0.1)
    through = torch.cat([torch.ones(4, 1), (1 - alpha + 1e-10).cumprod(-1)[:, :-1]], -1)
    return ((alpha * through)[..., None] * field[..., 1:].sigmoid()).sum(1)


@program(leaf(64, 256), model=modules(a=linear(128, 256, 256), b=linear(128, 256, 256)))
def an_affine_coupling_flow(m: Any, x: Tensor) -> Tensor:
    log_det = torch.zeros(64)
    for name in "ab":
        kept, moved = x.chunk(2, -1)
        scale, shift = m[name](kept).chunk(2, -1)
        scale = 2 * scale.tanh()
        x = torch.cat([moved * scale.exp() + shift, kept], -1)
        log_det = log_det + scale.sum(-1)
    return (0.5 * x.square().sum(-1) - log_det).mean()


@program(leaf(64, 64), model=lambda: nn.Linear(64, 64))
def an_invertible_linear_flow(m: Any, x: Tensor) -> Tensor:
    w = m.weight + 2 * torch.eye(64)
    return (x @ w).tanh() + torch.linalg.slogdet(w).logabsdet


@program(leaf(64, 256), model=linear(256, 64))
def a_planar_flow(m: Any, x: Tensor) -> Tensor:
    z, w = m(x), m[0].weight[0, :64]
    a = (z @ w).tanh()
    return torch.log((1 + (1 - a.square()) * (w @ w)).abs() + 1e-5) + a


@program(leaf(128, 256), model=linear(256, 256), bar=20)
def gumbel_softmax_soft(m: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(m(x), tau=0.5) * x


@program(leaf(128, 256), model=linear(256, 256))
def gumbel_softmax_hard(m: Any, x: Tensor) -> Tensor:
    return F.gumbel_softmax(m(x), tau=0.7, hard=True) * x.sin()


class Experts(nn.Module):
    """A router of top two of four experts, with its balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(256, 4)
        self.up = nn.Parameter(torch.randn(4, 256, 128) * 0.06)
        self.down = nn.Parameter(torch.randn(4, 128, 256) * 0.09)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        weight, chosen = p.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("bi,eio->beo", x, self.up))
        every = torch.einsum("beo,eoi->bei", hidden, self.down)
        out = (every.gather(1, chosen[..., None].expand(-1, -1, 256)) * weight[..., None]).sum(1)
        return out + 0.01 * 4 * (p.mean(0) * F.one_hot(chosen[:, 0], 4).float().mean(0)).sum()


@program(leaf(64, 256), model=Experts)
def a_mixture_of_experts(m: Any, x: Tensor) -> Tensor:
    return m(x)


@program(leaf(64, 256), model=Experts)
def a_mixture_of_experts_by_sigmoid_gates(m: Any, x: Tensor) -> Tensor:
    gates = m.router(x).sigmoid()
    chosen = gates >= gates.topk(2, -1).values[:, -1:]
    gates = gates * chosen / (gates * chosen).sum(-1, keepdim=True)
    return torch.einsum("be,bei->bi", gates, torch.einsum("bi,eio->beo", x, m.up).relu() @ m.down[0])


@program(leaf(128, 64), index(128, 2, 512), model=linear(128, 64))
def message_passing(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    score = F.leaky_relu(m(torch.cat([x[edges[0]], x[edges[1]]], -1)), 0.2).sum(-1)
    top = torch.zeros(128).scatter_reduce(0, edges[1], score, "amax", include_self=False)
    e = (score - top[edges[1]]).exp()
    attention = e / torch.zeros(128).index_add(0, edges[1], e)[edges[1]]
    return torch.zeros(128, 64).index_add(0, edges[1], x[edges[0]] * attention[:, None]).sin()


@program(leaf(64, 256), model=linear(256, 32, 256))
def a_sinkhorn_assignment(m: Any, x: Tensor) -> Tensor:
    score = 3 * m(x)
    for _ in range(3):
        score = score - score.logsumexp(-1, keepdim=True)
        score = score - score.logsumexp(0, keepdim=True)
    return score.exp() * x


@program(leaf(8, 64, 32), model=linear(32, 64))
def a_state_space_recurrence(m: Any, x: Tensor) -> Tensor:
    gate, value = m(x).chunk(2, -1)
    log_decay = -F.softplus(gate).cumsum(1)
    return ((value * (-log_decay).clamp_max(30).exp()).cumsum(1) * log_decay.exp()).tanh()


@program(leaf(64, 256), model=linear(256, 256, 256))
def a_no_grad_island_within(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m(x + 0.1).softmax(-1)
    return -(target * m(x).log_softmax(-1)).sum(-1)


@program(leaf(8, 3, 16, 16), model=modules(a=lambda: nn.Conv2d(3, 32, 3, padding=1), b=lambda: nn.Conv2d(32, 3, 3)))
def total_variation_and_perceptual_loss(m: Any, x: Tensor) -> Tensor:
    y = m["b"](F.leaky_relu(m["a"](x), 0.2))
    variation = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
    return variation + F.l1_loss(m["a"](y).relu(), m["a"](x[..., 1:-1, 1:-1]).relu().detach())


@program(leaf(64, 256), model=linear(256, 4), drive=lambda run, m, x: _policy(run, x))
def a_policy_gradient(m: Any, x: Tensor) -> Tensor:
    log_p = m(x).log_softmax(-1)
    ratio = (log_p - log_p.detach() + 0.05 * x[:, :4].detach()).exp()
    advantage = x[:, 4:8].detach()
    clipped = ratio.clamp(0.8, 1.2) * advantage
    return -torch.minimum(ratio * advantage, clipped).mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean()


def _policy(run: Run, x: Tensor) -> Values:
    out = run(x)
    projected(out).backward()
    return {"out": out}
