"""Log-probabilities of given tokens, entropies, and the losses made of them, in the forms of TRL.

``gathered`` and ``log_softmaxed`` are ``selective_log_softmax`` in 32 and in 16 bits, of all rows at once; ``entropies`` is
``entropy_from_logits``. DPO's loss is the sigmoid one, GRPO's has clipped ratios and the k3 estimate of the KL divergence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.losses import HIDDEN, WORDS, Loss, mean


def known(t: Tensor) -> Tensor:
    """Targets as indices ``[..., 1]``; those that are ignored are 0."""
    return t.clamp(min=0).unsqueeze(-1)


def gathered(z: Tensor, t: Tensor) -> Tensor:
    return z.gather(-1, known(t)).squeeze(-1) - z.logsumexp(-1)


def log_softmaxed(z: Tensor, t: Tensor) -> Tensor:
    return F.log_softmax(z, -1).gather(-1, known(t)).squeeze(-1)


def entropies(z: Tensor) -> Tensor:
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


# Losses of logits [B, S, V] and targets [B, S].


def nll(z: Tensor, t: Tensor) -> Tensor:
    return -gathered(z, t).mean()


def nll_16(z: Tensor, t: Tensor) -> Tensor:
    return -log_softmaxed(z, t).mean()


def tempered(z: Tensor, t: Tensor) -> Tensor:
    return nll(z / 0.9, t)


def last_rows(z: Tensor, t: Tensor) -> Tensor:
    """All but the last, and of these the last 4, as for completions behind prompts."""
    return nll(z[:, :-1][:, -4:] / 0.9, t[:, 1:][:, -4:])


def masked(z: Tensor, t: Tensor) -> Tensor:
    mask = (t != -100).to(z.dtype)
    return -(gathered(z, t) * mask).sum() / mask.sum()


def where_known(z: Tensor, t: Tensor) -> Tensor:
    found = log_softmaxed(z, torch.where(t == -100, 7, t))
    return -torch.where(t == -100, 0.0, found).sum()


def own_labels(z: Tensor, t: Tensor) -> Tensor:
    return z.logsumexp(-1).mean() - z.gather(-1, z.detach().argmax(-1, keepdim=True)).mean()


def entropy(z: Tensor, t: Tensor) -> Tensor:
    return entropies(z).mean()


def entropy_of_softmax(z: Tensor, t: Tensor) -> Tensor:
    p = F.softmax(z, -1)
    return -(p * p.log()).sum(-1).mean()


def entropy_of_log_softmax(z: Tensor, t: Tensor) -> Tensor:
    p = F.log_softmax(z, -1)
    return -(p.exp() * p).sum(-1).mean()


def with_entropy(z: Tensor, t: Tensor) -> Tensor:
    """One log_softmax for both, so that the sum over columns is of a gathered entry's gradient too."""
    p = F.log_softmax(z, -1)
    weighted = p.gather(-1, known(t)).squeeze(-1) - 0.1 * (p.exp() * p).sum(-1)
    return -(weighted * (t != -100)).sum() / 7


def cross_entropy_with_entropy(z: Tensor, t: Tensor) -> Tensor:
    return mean(z, t) - 0.3 * entropies(z[:, :]).mean()


def entropy_of_last_rows(z: Tensor, t: Tensor) -> Tensor:
    z = z[:, :-1] / 0.9
    return nll(z, t[:, 1:]) - 0.01 * entropies(z).square().mean()


def sum_of_sums(z: Tensor, t: Tensor) -> Tensor:
    """A scale that is a sum over columns: of its gradient's two sums one is made of the other."""
    return nll(z * (z.softmax(-1) * z).sum(-1, keepdim=True), t)


def divergence(z: Tensor, t: Tensor) -> Tensor:
    p, q = F.log_softmax(z, -1), F.log_softmax(z.detach() / 2, -1)
    return (p.exp() * (p - q)).sum(-1).mean()


def scaled_after(z: Tensor, t: Tensor) -> Tensor:
    """The gradient of the log-probabilities is no gathered entry's, but one that is scaled: its sum over columns is taken."""
    return -(F.log_softmax(z, -1) / 0.9).gather(-1, known(t)).mean()


ENTRIES: tuple[Loss, ...] = (
    *(nll, nll_16, tempered, last_rows, masked, where_known, own_labels),
    scaled_after,
)
SUMS: tuple[Loss, ...] = (
    *(entropy, entropy_of_softmax, entropy_of_log_softmax, with_entropy, cross_entropy_with_entropy),
    *(entropy_of_last_rows, sum_of_sums, divergence),
)


class Policy(nn.Module):
    """Tokens in, logits of the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(torch.tanh(self.up(self.embed(tokens))))
        return logits[:, :-1]


class Preference(nn.Module):
    """DPO: two answers, the policy's log-probabilities of each beside those of a model that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Policy(), Policy().requires_grad_(False)

    def of_answer(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
        return (gathered(model(tokens), tokens[:, 1:]) * mask[:, 1:]).sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.of_answer(self.reference, chosen, mask) - self.of_answer(self.reference, rejected, mask)
        now = self.of_answer(self.policy, chosen, mask) - self.of_answer(self.policy, rejected, mask)
        return -F.logsigmoid(0.1 * (now - before)).mean()


class GroupRelative(Preference):
    """GRPO: clipped ratios to an old policy, a KL term, entropies that are shown."""

    def forward(self, tokens: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
        logits, kept = self.policy(tokens) / 0.9, mask[:, 1:]
        now = log_softmaxed(logits, tokens[:, 1:])
        with torch.no_grad():
            reference = log_softmaxed(self.reference(tokens) / 0.9, tokens[:, 1:])
            shown = entropies(logits).mean()
        ratio = torch.exp(now - (now.detach() + 0.05 * (sampled[:, 1:] % 9 - 4)))
        advantage = torch.tensor([[1.0], [-0.5]], dtype=now.dtype)
        taken = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        divergence = torch.exp(reference - now) - (reference - now) - 1
        return ((0.04 * divergence - taken) * kept).sum() / kept.sum() + 0.0 * shown


def pair() -> tuple[Tensor, Tensor, Tensor]:
    """Two batches of tokens ``[2, 7]``, and a mask of those that count."""
    torch.manual_seed(1)
    chosen, rejected = torch.randint(0, WORDS, (2, 2, 7))
    return chosen, rejected, torch.arange(7) < torch.tensor([[5], [7]])
