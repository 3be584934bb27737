"""One model, compiled one way, measured: bytes kept, gradients against float64, losses of a few steps."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from benchmarks.harness.batches import Batch
from benchmarks.studies.models import MODELS, Case
from fp8compile.numerics.metrics import sqnr
from fp8compile.reporting.entries import SAVED
from fp8compile.reporting.report import Report

FORMATS = ("auto", "e4m3", "int8")  # how tensors are stored; linears compute as they are
LINEARS: Mapping[str, dict[str, Any]] = {  # FP8 linears on top of the storage of "auto"
    "linears": {"linears.emulate": True},
    "linears-e4m3": {"linears.emulate": True, "linears.formats": "e4m3"},
    "linears-rowwise": {"linears.emulate": True, "linears": "rowwise"},
    "linears-delayed": {"linears.emulate": True, "linears.scaling": "delayed"},
    "linears-delayed-cached": {"linears.emulate": True, "linears.scaling": "delayed", "linears.cache_weights": True},
}
BATCHES_BEFORE = range(900, 903)  # that scales which are known before their tensors are known from
WARM_UP_STEPS = 10
LEARNING_RATE = 5e-4
RISING_STEPS = 5  # of the learning rate; without them a small model's loss spikes, at another step in every arm
LARGEST_NORM = 1.0  # of all gradients together
ZERO = 1e-5  # a gradient this much smaller (RMS) than the median parameter's is zero up to rounding


# --------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Way:
    """How a model is compiled: not at all, by plain Inductor, or by fp8compile."""

    name: str
    codegen: str

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """``model``, compiled so."""
        if self.name == "eager":
            return model
        if self.name == "plain" and self.codegen == "inductor":
            return torch.compile(model)
        return torch.compile(model, backend="fp8compile", options={**self.options, "debug.codegen": self.codegen})

    @property
    def options(self) -> dict[str, Any]:
        """The recipe as options of torch.compile."""
        if self.name == "plain":
            return {"preset": "off"}
        return LINEARS.get(self.name, {"linears": "off", "saved": self.name})


def in_precision(precision: str) -> contextlib.AbstractContextManager[Any]:
    """The context the forward runs in."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "amp" else contextlib.nullcontext()


def parameter_dtype(precision: str) -> torch.dtype:
    """What parameters and inputs are in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def call(run: Callable[..., Any], batch: Batch, precision: str) -> Any:
    """The model's output for a batch."""
    with in_precision(precision):
        return run(*batch.args, **(batch.kwargs or {}))


# ----------------------------------------------------------------------------------------------------- bytes


@dataclass(frozen=True)
class Kept:
    """A storage saved for backward, with the shape and dtype of the first tensor that looks at it."""

    nbytes: int
    dtype: str
    shape: tuple[int | str, ...]


def kept_storages(model: nn.Module, run: Callable[[], Any], batch: Batch) -> list[Kept]:
    """What ``run()`` keeps for the backward, largest first; parameters, buffers and the batch left out."""
    not_counted = {*model.parameters(), *model.buffers(), *batch.tensors()}
    seen = {t.untyped_storage().data_ptr() for t in not_counted}
    kept: list[Kept] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(Kept(storage.nbytes(), str(t.dtype).removeprefix("torch."), tuple(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()  # held until the end: a freed storage's address would be given to the next one
    del output
    return sorted(kept, key=lambda k: -k.nbytes)


def reported_storages(report: Report) -> list[Kept]:
    """What the report says is kept: encoded tensors as one entry each, codes and scales together."""
    codes = [Kept(s.bytes_after, "codes", s.shape) for s in report.saved]
    return codes + [Kept(s.bytes, s.dtype, s.shape) for s in report.notes.skipped(SAVED)]


# ------------------------------------------------------------------------------------------------------ SQNR


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradient of every parameter that gets one, in float64."""
    model.zero_grad()
    run().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def zero_up_to_rounding(reference: dict[str, Tensor]) -> list[str]:
    """Parameters whose gradient is zero in theory (a key bias under softmax, a bias before batch norm)."""
    rms = {name: float(g.square().mean().sqrt()) for name, g in reference.items()}
    median = sorted(rms.values())[len(rms) // 2]
    return [name for name, size in rms.items() if size <= ZERO * median]


@dataclass(frozen=True)
class Quality:
    """SQNR of gradients, by parameter."""

    by_parameter: dict[str, float]

    @property
    def worst(self) -> str:
        """The parameter with the noisiest gradient."""
        return min(self.by_parameter, key=self.by_parameter.__getitem__)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.by_parameter.values())
        return {
            "worst_db": ordered[0],
            "worst_parameter": self.worst,
            "median_db": ordered[len(ordered) // 2],
            "five_worst": dict(sorted(self.by_parameter.items(), key=lambda kv: kv[1])[:5]),
        }


def quality(reference: dict[str, Tensor], got: dict[str, Tensor], skipped: Sequence[str]) -> Quality:
    """How near ``got`` is to ``reference``."""
    return Quality({name: sqnr(reference[name], got[name]) for name in reference if name not in skipped})


# --------------------------------------------------------------------------------------- one model, measured


@dataclass(frozen=True)
class Measured:
    """One way of compiling, measured: what is kept, loss, gradients, and the report where there is one."""

    kept: list[Kept]
    loss: float
    gradients: dict[str, Tensor]
    report: Report | None
    seconds: float


@dataclass(frozen=True)
class Built:
    """A copy of a case's model, compiled one way for one precision."""

    way: Way
    precision: str
    model: nn.Module
    run: Callable[..., Any]


def build(case: Case, way: Way, precision: str) -> Built:
    """A copy, because ``fp8compile.report`` goes by the model's parameters; compiled at its first call."""
    torch._dynamo.reset()
    model = copy.deepcopy(case.model).to(parameter_dtype(precision))
    return Built(way, precision, model, way.compile(model))


def measure(case: Case, built: Built) -> Measured:
    """Compile, then run one batch forward for the bytes and once more for the gradients; scales that are delayed, those of
    other batches."""
    started = time.perf_counter()
    model, run, precision = built.model, built.run, built.precision
    batch = case.batch(0).to(parameter_dtype(precision))
    call(run, batch, precision)  # compiles; autograd's hooks are to see a finished function
    if "linears.scaling" in built.way.options:
        for before in (case.batch(number).to(parameter_dtype(precision)) for number in BATCHES_BEFORE):
            case.loss(call(run, before, precision), before).backward()  # type: ignore[no-untyped-call]
    kept = kept_storages(model, lambda: call(run, batch, precision), batch)
    losses: list[Tensor] = []

    def loss() -> Tensor:
        losses.append(case.loss(call(run, batch, precision), batch))
        return losses[-1]

    found = gradients(model, loss)
    report = fp8compile.report(run) if built.way.name in (*FORMATS, *LINEARS) and isinstance(run, nn.Module) else None
    return Measured(kept, losses[-1].item(), found, report, time.perf_counter() - started)


def reference_gradients(case: Case, number: int = 0) -> dict[str, Tensor]:
    """The gradients of eager PyTorch in float64, of the batch of that number."""
    model = copy.deepcopy(case.model).double()
    batch = case.batch(number).to(torch.float64)
    return gradients(model, lambda: case.loss(call(model, batch, "fp64"), batch))


def warm_up(case: Case, steps: int = WARM_UP_STEPS) -> None:
    """Train the case's own model a little, in FP32, eagerly, on batches that no measurement uses.

    A copy runs: a recurrent model keeps states of its last call, which cannot be copied with it.
    """
    model = copy.deepcopy(case.model)
    train(case, Built(Way("eager", "eager"), "fp32", model, model), steps, seed=1_000)
    case.model.load_state_dict(model.state_dict())


def train_seed(name: str, case: Case, built: Built, steps: int, seed: int, rate: float) -> list[float]:
    """Losses from the initial weights of that seed, copied into the model that is compiled already."""
    built.model.load_state_dict(MODELS[name](seed).model.state_dict())
    return train(case, built, steps, seed, rate)


def train(case: Case, built: Built, steps: int, seed: int, rate: float = LEARNING_RATE) -> list[float]:
    """Losses of ``steps`` steps of AdamW on the batches of that seed, as users train: a rising rate, clipped norm."""
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISING_STEPS))
    losses = []
    for step in range(steps):
        batch = case.batch(1 + seed * 100_000 + step).to(parameter_dtype(built.precision))
        loss = case.loss(call(built.run, batch, built.precision), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(built.model.parameters(), LARGEST_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
