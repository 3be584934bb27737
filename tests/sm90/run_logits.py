"""Script: lower a norm, an output head and a loss, with its logits in one piece and in chunks. Prints JSON.

The sizes are those of a model of 1B parameters (Llama 3.2) at 1x8192 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.compiler.generated_memory import peak_bytes
from fp8compile.recipe.recipe import Recipe

from . import fake_h100
from .lowering import lower
from .measures import print_json
from .on_cuda import JOINT_PASS, to_cuda
from .run_model import fp8compile_backend

TOKENS, HIDDEN, WORDS = 8192, 2048, 128256


def upcast(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.float().view(-1, WORDS), t.view(-1))


def hugging_face(z: Tensor, t: Tensor) -> Tensor:
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(z.float().view(-1, WORDS), shifted.view(-1), reduction="sum") / 8191


def shifted_and_capped(z: Tensor, t: Tensor) -> Tensor:
    z = 30 * torch.tanh(z[:, :-1] / 30)
    return (
        F.cross_entropy(z.float().flatten(0, 1), t[:, 1:].flatten()) + 1e-4 * z.float().logsumexp(-1).square().mean()
    )


def log_probabilities(z: Tensor, t: Tensor) -> Tensor:
    z = z[:, :-1].float() / 0.9
    return (z.logsumexp(-1) - z.gather(-1, t[:, 1:, None]).squeeze(-1)).mean()


def with_entropy(z: Tensor, t: Tensor) -> Tensor:
    p = F.log_softmax(z.float(), -1)
    return -(p.gather(-1, t[..., None]).squeeze(-1) - 0.01 * (p.exp() * p).sum(-1)).mean()


LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *(upcast, hugging_face, shifted_and_capped),
    *(log_probabilities, with_entropy),
)


class Head(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.ones(HIDDEN)), loss
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False, device="meta").to_empty(device="cpu")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.loss(self.lm_head(F.rms_norm(x, (HIDDEN,), self.weight)), t)


def lowered(loss: Callable[[Tensor, Tensor], Tensor], chunk_logits: str) -> list[dict[str, Any]]:
    """Forward and backward: the most that buffers take at one time, and the matmuls."""
    model = Head(loss).to(torch.bfloat16)
    x = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    backend = fp8compile_backend(
        Recipe(linears="off", saved="off", fp32={"observe": False}, memory={"chunk_logits": chunk_logits})
    )
    t = torch.zeros(1, TOKENS, dtype=torch.int64)
    graphs = lower(model, x, t, backward=True, backend=backend, config_patches={JOINT_PASS: to_cuda}).graphs
    return [{"peak_bytes": peak_bytes(g.wrapper), "externs": g.externs, "num_bytes": g.num_bytes} for g in graphs]


def report() -> dict[str, dict[str, list[dict[str, Any]]]]:
    fake_h100.install()
    return {loss.__name__: {how: lowered(loss, how) for how in ("off", "auto")} for loss in LOSSES}


if __name__ == "__main__":
    print_json(report)
