"""An output head with a loss, in the forms in which models write it; and how far two orders of its sums may lie apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
HIDDEN, WORDS = 16, 50


def mean(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), t.flatten())


def upcast(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.float().flatten(0, -2), t.flatten())


def total(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), t.flatten(), reduction="sum")


def squared_rows(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), t.flatten(), reduction="none").square().mean()


def smoothed(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), t.flatten(), label_smoothing=0.1)


def weighted(z: Tensor, t: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.0, z.shape[-1], dtype=z.dtype)
    return F.cross_entropy(z.flatten(0, -2), t.flatten(), weight)


def in_two_steps(z: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(z, -1).flatten(0, -2), t.flatten())


def hugging_face(z: Tensor, t: Tensor) -> Tensor:
    """ForCausalLMLoss with num_items_in_batch."""
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    z = z.float() if z.dtype != torch.float64 else z
    return F.cross_entropy(z.view(-1, z.shape[-1]), shifted.view(-1), ignore_index=-100, reduction="sum") / 7


def shifted_logits(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].contiguous().flatten(0, 1), t[:, 1:].flatten())


def z_loss(z: Tensor, t: Tensor) -> Tensor:
    return mean(z, t) + 1e-2 * torch.logsumexp(z, -1).square().mean()


def soft_capped(z: Tensor, t: Tensor) -> Tensor:
    return mean(3 * torch.tanh(z / 3), t)


def scaled(z: Tensor, t: Tensor) -> Tensor:
    return mean(z * 0.25, t)


def with_accuracy(z: Tensor, t: Tensor) -> Tensor:
    """A figure beside the loss that takes the largest logit of each row."""
    return mean(z, t) + 0.0 * (z.argmax(-1) == t).to(z.dtype).mean()


FORMS: tuple[Loss, ...] = (
    *(mean, total, squared_rows, smoothed, weighted, in_two_steps, hugging_face),
    *(shifted_logits, z_loss, soft_capped, scaled, with_accuracy),
)


class Head(nn.Module):
    """A linear ``lm_head`` and a loss of its result and of targets, one of which is ignored."""

    def __init__(self, loss: Loss = mean, bias: bool = False) -> None:
        super().__init__()
        self.lm_head, self.loss = nn.Linear(HIDDEN, WORDS, bias=bias), loss

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.loss(self.lm_head(x), t)


def case(loss: Loss = mean, dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[Head, Tensor, Tensor]:
    """A head, hidden states ``[2, 6, 16]`` that take a gradient, and targets."""
    torch.manual_seed(5)
    t = torch.randint(0, WORDS, (2, 6))
    t[0, 2] = -100
    return Head(loss, bias).to(dtype), torch.randn(2, 6, HIDDEN).to(dtype).requires_grad_(), t


def gradients(
    model: nn.Module, fn: Callable[..., Tensor], x: Tensor, t: Tensor, upstream: float = 1.0
) -> list[Tensor]:
    """The loss, and its gradients times ``upstream`` by hidden states and parameters."""
    loss = fn(x, t)
    found = torch.autograd.grad(loss, [x, *model.parameters()], torch.full_like(loss, upstream))
    return [loss.detach(), *found]


def bounds(model: Head, x: Tensor, t: Tensor, sums: float, stored: float = 0.0) -> list[Tensor]:
    """How far loss and gradients may lie from exact ones, to first order in the two roundings.

    Args:
        sums: unit roundoff of what sums and elementwise operations are made in.
        stored: that of the dtype in which logits, their gradient and results are stored; 0 for the same.

    A logit is a sum of H terms, |z - z*| <= (H sums + stored) S, with S the largest sum of |h||W| + |b|. Every number of a
    row is a sum of V terms of logits that are off by so much, and a few operations. So the exponents z - lse are off by E
    at most, below; and so is dz, relative to its largest, since no form has slopes above 2. What sums up dz adds one
    rounding a term.
    """
    h, w = x.detach().double().flatten(0, -2), model.lm_head.weight.detach().double()
    b = model.lm_head.bias
    z = (F.linear(h, w) + (0 if b is None else b.detach().double())).unflatten(0, x.shape[:-1]).requires_grad_()
    loss = model.loss(z, t)
    (dz,) = torch.autograd.grad(loss, z)
    S = (h.abs() @ w.abs().T).max() + (0 if b is None else b.detach().abs().max())
    rows, words, largest = len(h), len(w), dz.abs().max()
    E = 2 * (3 * (HIDDEN * sums + stored) * S + (words + 16) * sums * (1 + S) + 2 * stored)
    dh = (E + words * sums + 2 * stored) * largest * w.abs().sum(0).expand(rows, -1).reshape(x.shape)
    dw = (E + rows * sums + 2 * stored) * largest * h.abs().sum(0).expand(words, -1)
    db = (E + rows * sums + 2 * stored) * largest * rows * torch.ones(words, dtype=torch.float64)
    return [(E * (1 + S) + rows * sums + stored) * (1 + loss.detach()) * rows, dh, dw, *([] if b is None else [db])]
