"""A pipeline of two or three small stages on as many ranks, with links that are coded or plain, and what each rank found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from fp8compile.integrations.pipelining import compress_links

MICRO, ROWS, LENGTH, WIDTH, SAMPLES = 2, 4, 3, 48, 12  # a sample has 144 elements: groups of 128 hold parts of two
SCHEDULES: Mapping[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}
Settings = Mapping[str, Any]


class Part(nn.Module):
    """A residual layer; the last one is followed by a head."""

    def __init__(self, number: int, last: bool, dtype: torch.dtype = torch.float32, mask: bool = False) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.inner, self.mask = nn.Linear(WIDTH, WIDTH, dtype=dtype), mask
        self.head = nn.Linear(WIDTH, 5, dtype=dtype) if last else None

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Any:
        """With ``mask`` a tensor of integers goes along."""
        x = x + torch.tanh(self.inner(x))
        if self.head is not None:
            return self.head(x)
        return (x, torch.arange(len(x) * LENGTH).reshape(len(x), LENGTH)) if self.mask else x


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All samples: inputs ``[SAMPLES, LENGTH, WIDTH]`` and labels."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=random).to(dtype)
    return x, torch.randint(5, (SAMPLES, LENGTH), generator=random)


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.float().flatten(0, 1), labels.flatten())


def epochs_of(count: int) -> list[list[int]]:
    """The samples of each step: every epoch has its own order."""
    random = torch.Generator().manual_seed(3)
    orders = [torch.randperm(SAMPLES, generator=random).tolist() for _ in range(count)]
    return [order[i : i + ROWS] for order in orders for i in range(0, SAMPLES, ROWS)]


def trained(
    schedule: str, settings: Settings | None, epochs: int = 2, rate: float = 0.05, dtype: str = "float32", mask: bool = False
) -> dict[str, Any]:
    """This rank's part after some epochs; ``settings`` None: plain links."""
    rank, kind = dist.get_rank(), getattr(torch, dtype)
    number = 2 * dist.get_world_size() if schedule.startswith("Interleaved") else dist.get_world_size()
    numbers = range(rank, number, dist.get_world_size())
    parts = [Part(i, i == number - 1, kind, mask) for i in numbers]
    stages = [PipelineStage(part, i, number, torch.device("cpu")) for part, i in zip(parts, numbers, strict=True)]
    links = [] if settings is None else [compress_links(stage, **settings) for stage in stages]
    wire = [count_sent(stage) for stage in stages]
    one_or_all = stages if schedule.startswith("Interleaved") else stages[0]
    plan = SCHEDULES[schedule](one_or_all, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=rate)
    losses = []
    for ids in epochs_of(epochs):
        losses += step(plan, links, ids, rank, kind, stages[-1].is_last)
        gradients = [p.grad.tolist() for part in parts for p in part.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": [p.tolist() for part in parts for p in part.parameters()],
        "wire": wire,
        "traffic": [(each.forward.sent, each.forward.plain, each.backward.sent, each.backward.plain) for each in links],
        "nbytes": [each.nbytes for each in links],
        "states": [plain(each.state_dict()) for each in links],
    }


def step(plan: Any, links: Sequence[Any], ids: Sequence[int], rank: int, dtype: torch.dtype, last: bool) -> list[float]:
    x, labels = data(dtype)
    for each in links:
        each.samples(ids)
    found: list[Tensor] = []
    kwargs: dict[str, Any] = {"target": labels[list(ids)], "losses": found} if last else {}
    plan.step(*([x[list(ids)]] if rank == 0 else []), **kwargs)
    return [each.item() for each in found]


def count_sent(stage: Any) -> dict[str, int]:
    """Counts the bytes of the tensors that a schedule is given to send, apart from what the links count."""
    sent = {"get_fwd_send_ops": 0, "get_bwd_send_ops": 0}
    for name in sent:
        plain_ops = getattr(stage, name)

        def counted(chunk: int, name: str = name, plain_ops: Any = plain_ops) -> Any:
            ops = plain_ops(chunk)
            sent[name] += sum(op.tensor.nbytes for op in ops)
            return ops

        setattr(stage, name, counted)
    return sent


def plain(state: Mapping[str, Any]) -> dict[str, list[dict[str, list[Any]]]]:
    """A state as lists, so that it goes through a pipe; messages as their bits."""
    return {
        side: [{k: (t.view(torch.int16) if k == "messages" else t).tolist() for k, t in each.items()} for each in kept]
        for side, kept in state.items()
    }
