"""A model that trains on several ranks, and in one process that does the same arithmetic: the bound between the two is 0.

    on ranks       each rank's own rows, tensorwise scales from that rank's own amax; gradients are averaged by torch
    in one         the ranks' rows one after the other through the same compiled code; gradients averaged as torch does

An FP8 scale comes from what a rank has. So a single process is compared that quantizes per shard too. What is left is the
order of sums: (a + b) / 2 of two ranks has one order, and dividing by 2 is exact. So nothing may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fp8compile
from fp8compile._distributed import viewed
from fp8compile.amp import LossScaler
from fp8compile.reporting.entries import LINEAR

WIDTH, HIDDEN, CLASSES, LENGTH = 64, 256, 32, 16
STEPS = 4
OPTIONS: dict[str, Any] = {"debug.codegen": "eager", "linears.emulate": True, "saved.min_numel": 0}
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A norm, two linears and a residual; ``pieces`` > 1: written as so many ranks compute it in tensor parallelism."""

    def __init__(self, width: int = WIDTH, pieces: int = 1, sequence: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.pieces, self.sequence = pieces, sequence

    def forward(self, x: Tensor) -> Tensor:
        h = self._norm_in_pieces(x) if self.sequence else self.norm(x)
        if self.pieces == 1:
            return x + self.down(F.gelu(self.up(h)))
        cut = zip(
            *(t.chunk(self.pieces) for t in (self.up.weight, self.up.bias)),
            self.down.weight.chunk(self.pieces, 1),
            strict=True,
        )
        share = self.down.bias / self.pieces  # each rank adds its share before the sum, as DTensor does
        parts = [F.linear(F.gelu(F.linear(h, up, bias)), down, share) for up, bias, down in cut]
        return x + sum(parts[1:], parts[0])

    def _norm_in_pieces(self, x: Tensor) -> Tensor:
        # two signs: what comes back to the norm lies contiguous then, as on a rank, and is summed in that order
        return torch.cat([self.norm(each).neg().neg() for each in x.chunk(self.pieces, 1)], 1)


class Net(nn.Module):
    """Two blocks and a head, ``[B, S, 64]`` to ``[B, S, 32]``; ``parts`` cuts it into stages."""

    def __init__(self, width: int = WIDTH, **block: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


@dataclass(frozen=True)
class Setup:
    """What ranks and the single process share: the model, its dtype, how it is compiled, and how much of the data is whose.

    Attributes:
        width: of the model.
        dtype: of parameters and inputs. float16 trains with ``LossScaler``.
        blocks: each block is compiled by itself, or else the whole model in place.
        micro: micro-batches for each step of the optimizer.
        options: of the backend, beside ``OPTIONS``.
        cast: the dtype in which FSDP2 computes.
        block: how the single process writes a block.
        overrides: formats of states, by pattern of parameters' names.
        master: how the optimizer keeps what 16-bit parameters lack.
    """

    width: int = WIDTH
    dtype: torch.dtype = torch.float32
    blocks: bool = False
    micro: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    cast: torch.dtype | None = None
    block: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    master: str = "none"

    def net(self, **block: Any) -> Net:
        return Net(self.width, **block).to(self.dtype)

    def compiled(self, model: nn.Module) -> nn.Module:
        """``model`` compiled in place, whole or in blocks."""
        options = {**OPTIONS, **self.options}
        for each in model.blocks if self.blocks else [model]:  # type: ignore[union-attr]
            each.compile(backend="fp8compile", options=options)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {"overrides": dict(self.overrides), "master": self.master}
        return fp8compile.optim.AdamW(model, lr=1e-2, compiled=False, **settings)

    def batch(self, shard: int, step: int, micro: int = 0) -> Batch:
        """The rows of a shard of the data; the last batch has fewer, and shard 1 fewer than shard 0."""
        random = torch.Generator().manual_seed(10_000 * shard + 100 * step + micro)
        rows = 4 if step < STEPS - 1 else 3 - shard % 2
        x = torch.randn(rows, LENGTH, self.width, generator=random).to(self.cast or self.dtype)
        return x, torch.randint(CLASSES, (rows, LENGTH), generator=random)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


@dataclass
class Trained:
    """What a run of ``STEPS`` steps left: on a rank, or in the single process for all shards.

    Attributes:
        losses: of each step and micro-batch; in the single process, by shard.
        parameters: whole, by name, after the last step.
        states: a digest of each encoded state that lies on this rank, after the last step.
        linears: module and direction of each matmul in FP8.
        left: module, direction and reason of each that is not.
        scales: of the loss after each step; empty without a scaler.
        counts: small and large gradients of each update, summed over ranks.
    """

    losses: list[Any]
    parameters: dict[str, Any]
    states: dict[str, str]
    linears: list[tuple[str, str]]
    left: list[tuple[str, str, str]]
    saved_bytes: int
    graphs: int
    remarks: tuple[str, ...]
    scales: list[float]
    counts: list[tuple[float, float]]


class Scaler:
    """``LossScaler`` for FP16, nothing for other dtypes; it keeps the sums that each update saw."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.scaler = LossScaler() if dtype == torch.float16 else None
        self.counts: list[tuple[float, float]] = []
        if self.scaler is not None:
            policy = self.scaler._policy
            self.scaler._policy = lambda now, seen: (self._note(seen), policy(now, seen))[1]  # type: ignore[assignment]

    def _note(self, seen: Any) -> None:
        self.counts.append((seen.small.item(), seen.large.item()))

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler is not None else loss  # type: ignore[no-any-return]

    def get_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()

    @property
    def scales(self) -> list[float]:
        return [scale for _, scale in self.scaler.history] if self.scaler is not None else []


def result(
    model: nn.Module, compiled: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Any], scaler: Scaler
) -> Trained:
    """What is to be compared; parameters that are sharded are gathered."""
    report = fp8compile.report(compiled)
    left = [(e.origin.module, e.direction, e.reason) for e in report.skips if e.kind == LINEAR]
    return Trained(
        losses,
        {name: whole(p).float().numpy().copy() for name, p in model.named_parameters()},
        digests(model, optimizer),
        sorted({(each.origin.module, each.direction) for each in report.linears}),
        sorted(set(left)),
        report.saved_bytes,
        len(report.graphs),
        report.remarks,
        scaler.scales,
        scaler.counts,
    )


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of each state, whole, by parameter and key."""
    return {
        f"{name} {key}": hashlib.sha256(whole(value).contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def whole(t: Tensor) -> Tensor:
    """All of a tensor; one byte an element as bytes, since gloo gathers no FP8."""
    t = t.detach() if t.element_size() > 1 else viewed(t.detach(), torch.uint8)
    return t.full_tensor() if isinstance(t, DTensor) else t


def alone(setup: Setup, shards: int, divided: bool = True) -> Trained:
    """The single process: each shard's rows through the same compiled code, the shards' gradients averaged as torch does."""
    model = setup.net(**setup.block)
    run = setup.net(**setup.block).to(setup.cast) if setup.cast else model
    setup.compiled(run)
    optimizer, scaler = setup.optimizer(model), Scaler(setup.dtype)
    losses: list[list[float]] = [[] for _ in range(shards)]
    for step in range(STEPS):
        _cast(run, model)
        gradients = []
        for shard in range(shards):
            for micro in range(setup.micro):
                x, labels = setup.batch(shard, step, micro)
                loss = loss_of(run(x), labels)
                losses[shard].append(loss.item())
                scaler.scale(loss).backward()
            gradients.append([p.grad for p in run.parameters()])
            run.zero_grad()
        for p, *each in zip(model.parameters(), *gradients, strict=True):
            p.grad = mean(each).to(p.dtype)
        scaler.step(optimizer)
    return result(model, run, optimizer, losses, scaler)


def mean(parts: Sequence[Tensor | None]) -> Tensor:
    """As DDP and FSDP2 take it: divided first, then summed, in the gradients' dtype."""
    known = [part / len(parts) for part in parts if part is not None]
    return sum(known[1:], known[0])


def _cast(run: nn.Module, model: nn.Module) -> None:
    if run is not model:
        with torch.no_grad():
            for ours, p in zip(run.parameters(), model.parameters(), strict=True):
                ours.copy_(p)


def on_rank(
    setup: Setup,
    model: nn.Module,
    step_of: Callable[[Tensor], Tensor],
    compiled: nn.Module,
    shard: int,
    sync: Callable[[bool], Any] | None = None,
) -> Trained:
    """Train on this rank, on the rows of ``shard``. ``sync(last)`` is entered around each micro-batch."""
    optimizer, scaler = setup.optimizer(model), Scaler(setup.dtype)
    losses = []
    for step in range(STEPS):
        for micro in range(setup.micro):
            x, labels = setup.batch(shard, step, micro)
            context = sync(micro == setup.micro - 1) if sync else torch.enable_grad()
            with context:
                loss = loss_of(step_of(x), labels)
                scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
    return result(model, compiled, optimizer, losses, scaler)


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names under which two results do not hold the same bits."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    return [name for name in found if not _same(found[name], wanted[name])]


def _same(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def modules_of(linears: Iterable[tuple[str, str]]) -> set[str]:
    return {module for module, _ in linears}
