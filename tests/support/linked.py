"""A pipeline of two or three small stages on as many ranks, with links that are coded or plain, and what each rank found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from benchmarks.studies.link_runs import Arm, Link
from fp8compile.extras.links.pipelining import COMPUTES, SENDS_AND_RECEIVES, compress_links

MICRO, ROWS, LENGTH, WIDTH, SAMPLES = 4, 8, 3, 48, 16  # a sample has 144 elements: groups of 128 hold parts of two
SCHEDULES: Mapping[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBV": ScheduleZBVZeroBubble,
}
TWO_EACH = ("Interleaved1F1B", "ZBV")  # stages on each rank; the two in the middle of a V are on one
COMPILED = {
    "saved.min_numel": 0,
    "linears": "off",
    "debug.codegen": "eager",
}  # what is saved is coded, the forward is exact
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
    """The samples of each step. Every epoch has its own order; the first one ends after a step, so the second mixes new and
    known samples."""
    random = torch.Generator().manual_seed(3)
    orders = [torch.randperm(SAMPLES, generator=random).tolist() for _ in range(count)]
    orders[0] = orders[0][:ROWS]
    return [order[i : i + ROWS] for order in orders for i in range(0, len(order), ROWS)]


def trained(
    schedule: str,
    settings: Settings | None,
    epochs: int = 2,
    rate: float = 0.05,
    dtype: str = "float32",
    mask: bool = False,
    compiled: bool = False,
) -> dict[str, Any]:
    """This rank's part after some epochs; ``settings`` None: plain links."""
    kind, (numbers, count) = getattr(torch, dtype), numbers_of(schedule, dist.get_rank(), dist.get_world_size())
    parts = [Part(i, i == count - 1, kind, mask) for i in numbers]
    for part in parts if compiled else ():
        part.compile(backend="fp8compile", options=COMPILED)
    stages = [PipelineStage(part, i, count, torch.device("cpu")) for part, i in zip(parts, numbers, strict=True)]
    links = [] if settings is None else [compress_links(stage, **settings) for stage in stages]
    wire = [count_sent(stage) for stage in stages]
    plan = SCHEDULES[schedule](stages if schedule in TWO_EACH else stages[0], MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=rate)
    losses = []
    for ids in epochs_of(epochs):
        losses += step(plan, links, ids, kind, stages)
        gradients = [p.grad.tolist() for part in parts for p in part.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": [p.tolist() for part in parts for p in part.parameters()],
        "wire": wire,
        "traffic": [
            (each.forward.sent, each.forward.plain, each.backward.sent, each.backward.plain) for each in links
        ],
        "nbytes": [each.nbytes for each in links],
        "states": [plain(each.state_dict()) for each in links],
    }


def numbers_of(schedule: str, rank: int, world: int) -> tuple[list[int], int]:
    """This rank's stages, and how many there are in all."""
    if schedule not in TWO_EACH:
        return [rank], world
    second = rank + world if schedule == "Interleaved1F1B" else 2 * world - 1 - rank
    return [rank, second], 2 * world


def step(
    plan: Any, links: Sequence[Any], ids: Sequence[int], dtype: torch.dtype, stages: Sequence[Any]
) -> list[float]:
    x, labels = data(dtype)
    for each in links:
        each.samples(ids)
    found: list[Tensor] = []
    last = any(each.is_last for each in stages)
    kwargs: dict[str, Any] = {"target": labels[list(ids)], "losses": found} if last else {}
    plan.step(*([x[list(ids)]] if stages[0].is_first else []), **kwargs)
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
        side: [
            {k: (t.view(torch.int16) if k == "messages" else t).tolist() for k, t in each.items()} for each in kept
        ]
        for side, kept in state.items()
    }


def in_one_process(settings: Settings | None, epochs: int, rate: float = 0.05) -> tuple[list[Any], list[float]]:
    """Both stages here, with both ends of the link between them: the weights, and the losses of all micro-batches."""
    parts = [Part(i, i == 1) for i in range(2)]
    told = dict(settings or {"bits": 16, "backward_bits": None, "changes": False})
    link = Link(Arm(told["bits"] if settings else None, told.get("backward_bits", 8), told.get("changes", True)))
    parameters = [p for part in parts for p in part.parameters()]
    optimizer, (x, labels), losses = torch.optim.SGD(parameters, lr=rate), data(), []
    for ids in epochs_of(epochs):
        for rows in torch.tensor(ids).chunk(MICRO):
            loss = loss_of(parts[1](link(parts[0](x[rows]), rows.tolist())), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        for p in parameters:
            assert p.grad is not None
            p.grad.div_(MICRO)
        optimizer.step()
        optimizer.zero_grad()
    return [p.tolist() for p in parameters], losses


def two_stages(schedule: str, settings: Settings) -> tuple[Any, Any, Any]:
    """This rank's stage of two, its links and a schedule."""
    rank = dist.get_rank()
    stage = PipelineStage(Part(rank, rank == 1), rank, 2, torch.device("cpu"))
    links = compress_links(stage, **settings)
    return stage, links, SCHEDULES[schedule](stage, MICRO, loss_fn=loss_of)


def one_step(schedule: str, odd_rank: int, its_ids: Sequence[int] | None) -> None:
    """A step for which one rank is told other ids, or none."""
    stage, links, plan = two_stages(schedule, {"check": True})
    ids = its_ids if dist.get_rank() == odd_rank else list(range(ROWS))
    if ids is not None:
        links.samples(ids)
    x, labels = data()
    plan.step(*([x[:ROWS]] if stage.is_first else []), **({"target": labels[:ROWS]} if stage.is_last else {}))


def with_a_state(schedule: str, settings: Settings) -> dict[str, Any]:
    """Weights stand still. Steps, an evaluation, a step; and that step again by new links that were given the state."""
    found: dict[str, Any] = {"bytes": []}
    stage, links, plan = two_stages(schedule, settings)
    steps = epochs_of(3)
    for ids in steps[:-1]:
        step(plan, [links], ids, torch.float32, [stage])
    state = links.state_dict()
    links.samples(None)
    plan.eval(
        *([data()[0][:ROWS]] if stage.is_first else []), **({"target": data()[1][:ROWS]} if stage.is_last else {})
    )
    found["unchanged"] = plain(state) == plain(links.state_dict())
    other_stage, other, other_plan = two_stages(schedule, settings)
    other.load_state_dict(state)
    for name, each in (("went on", (plan, links, stage)), ("loaded", (other_plan, other, other_stage))):
        before = each[1].forward.sent
        found[name] = step(each[0], [each[1]], steps[-1], torch.float32, [each[2]])
        found["bytes"].append(each[1].forward.sent - before)
    return found


def called(schedule: str, fill: bool = False) -> list[list[Any]]:
    """Of each plain stage of this rank what a step called on it, as ``(method, micro-batch)``; of ``fill`` see ``filled``."""
    numbers, count = numbers_of(schedule, dist.get_rank(), dist.get_world_size())
    stages = [PipelineStage(Part(i, i == count - 1), i, count, torch.device("cpu")) for i in numbers]
    found = [filled(stage) if fill else noted(stage) for stage in stages]
    plan = SCHEDULES[schedule](stages if schedule in TWO_EACH else stages[0], MICRO, loss_fn=loss_of)
    step(plan, [], list(range(ROWS)), torch.float32, stages)
    return found


def noted(stage: Any) -> list[Any]:
    """The calls of a stage's methods, as they come; operations only where there are any."""
    calls: list[Any] = []
    for name in (*SENDS_AND_RECEIVES, *COMPUTES):
        plain_method, short = (
            getattr(stage, name),
            name.removeprefix("get_").removesuffix("_ops").removesuffix("_one_chunk"),
        )

        def method(
            chunk: int, *args: Any, plain_method: Any = plain_method, short: str = short, **kwargs: Any
        ) -> Any:
            result = plain_method(chunk, *args, **kwargs)
            if not isinstance(result, list) or result or short in ("forward", "backward"):
                calls.append((short, chunk))
            return result

        setattr(stage, name, method)
    return calls


def filled(stage: Any) -> list[Any]:
    """Fill what was received with ones before the stage computes; note whether it computed with them."""
    seen: list[Any] = []
    buffers: dict[tuple[str, int], Tensor] = {}
    fwd_recv, bwd_recv, forward, backward = (getattr(stage, name) for name in (*SENDS_AND_RECEIVES[1::2], *COMPUTES))

    def awaited(direction: str, plain_method: Any, chunk: int) -> Any:
        ops = plain_method(chunk)
        for op in ops:
            buffers[direction, chunk] = op.tensor
        return ops

    def computed(direction: str, plain_method: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if (direction, chunk) in buffers:
            with torch.no_grad():
                buffers[direction, chunk].fill_(1)
        return plain_method(chunk, *args, **kwargs)

    stage.get_fwd_recv_ops, stage.get_bwd_recv_ops = partial(awaited, "f", fwd_recv), partial(awaited, "b", bwd_recv)
    stage.forward_one_chunk, stage.backward_one_chunk = (
        partial(computed, "f", forward),
        partial(computed, "b", backward),
    )
    plain_step = stage.submod.forward
    all_ones = lambda t: t.numel() > 0 and bool((t.detach() == 1).all())  # noqa: E731

    def forward_of_module(x: Tensor) -> Tensor:
        if not stage.is_first and stage.args_recv_info and x.requires_grad and buffers:
            seen.append(["input is ones", all_ones(x)])
        y: Tensor = plain_step(x)
        if stage.is_first and y.requires_grad and not y.is_meta:
            y.register_hook(lambda g: seen.append(["gradient is ones", all_ones(g)]) if buffers else None)
        return y

    stage.submod.forward = forward_of_module
    return seen


def traced(settings: Settings | None) -> dict[str, Any]:
    """This rank's stage of a model that torch cuts in two by tracing it; the losses of some epochs and its links' states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 5))
    x, _ = data()
    pipe = pipeline(model, mb_args=(x[: ROWS // MICRO],), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    links = [] if settings is None else [compress_links(stage, **settings)]
    plan = ScheduleGPipe(stage, MICRO, loss_fn=loss_of)
    losses = [step(plan, links, ids, torch.float32, [stage]) for ids in epochs_of(2)]
    return {"losses": losses, "states": [plain(each.state_dict()) for each in links]}
