"""What the demo measured, and the one number it is for.

gap      (validation loss of the arm - that of Inductor) / that of Inductor, from the same seed
claim    mean gap over the seeds <= 0.3 %, one-sided: better than Inductor is fine
error    standard error of the mean: standard deviation (n - 1) / sqrt(n), from two seeds on
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fp8compile.train.arms import OURS, REFERENCE, BackendReport
from fp8compile.train.model import Size
from fp8compile.train.precision import Precision

LIMIT = 0.003
LAST_SHARE = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats per byte after ``step`` steps; ``seconds`` is what evaluating took."""

    step: int
    loss: float
    seconds: float


@dataclass
class Run:
    """One arm trained from one seed; filled as it goes, so that whatever stops it keeps what was measured.

    Attributes:
        losses: training loss of each step, nats per byte.
        step_seconds: seconds of each step; the first one compiles.
        evaluations: validation losses; the first is before training.
        saved_bytes: kept from forward to backward in one step, measured by ``saved``.
        peak_bytes: largest CUDA allocation of a step after the first; None on a CPU.
        warm_cache: the first step found compiled code on disk, so its compile time is not one from scratch.
        report: fp8compile's own, in its arm.
        status: "running", "done", "interrupted" or "failed: why".
        traceback: of the exception that failed it.
    """

    arm: str
    seed: int
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    warm_cache: bool | None = None
    report: BackendReport | None = None
    status: str = "running"
    traceback: str = ""

    @property
    def median_step_s(self) -> float | None:
        """Seconds of a step after the first."""
        return statistics.median(self.step_seconds[1:]) if len(self.step_seconds) > 1 else None

    @property
    def compile_s(self) -> float | None:
        """Seconds of compiling: the first step less a median one, at least 0."""
        median = self.median_step_s
        return None if median is None else max(0.0, self.step_seconds[0] - median)

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the last tenth of the steps, nats per byte."""
        last = self.losses[-max(1, round(LAST_SHARE * len(self.losses))) :]
        return statistics.fmean(last) if last else None

    @property
    def validation_loss(self) -> float | None:
        """The latest after at least one step, nats per byte."""
        latest = self.evaluations[-1] if self.evaluations else None
        return latest.loss if latest and latest.step else None


@dataclass
class Results:
    """Everything the demo measured.

    Attributes:
        eager_saved_bytes: kept from forward to backward by the uncompiled model.
        steps: steps per run asked for.
        recipe: what fp8compile's arm was asked for, in words.
    """

    size: Size
    precision: Precision
    steps: int
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    recipe: str = ""
    eager_saved_bytes: int | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return any(run.status == "interrupted" for run in self.runs)

    @property
    def failed(self) -> bool:
        return any(run.status.startswith("failed") for run in self.runs)

    @property
    def report(self) -> BackendReport | None:
        """fp8compile's report of the first run that has one."""
        return next((run.report for run in self.runs if run.report), None)

    def of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]

    def gaps(self, arm: str = OURS) -> list[float]:
        """The arm's gap for each seed that both arms finished."""
        ends = {(run.arm, run.seed): run.validation_loss for run in self.runs if run.status == "done"}
        pairs = [(ends.get((arm, seed)), ends.get((REFERENCE, seed))) for seed in self.seeds]
        return [gap(ours, plain) for ours, plain in pairs if ours is not None and plain is not None]


@dataclass(frozen=True)
class Mean:
    """A mean of ``n`` values and its standard error; one value has none."""

    mean: float
    error: float | None
    n: int


def gap(ours: float, reference: float) -> float:
    """Relative excess of a loss: 0.01 is 1 % worse."""
    return (ours - reference) / reference


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """Mean and standard error of the values that are there; None if none is."""
    known: Sequence[float] = [v for v in values if v is not None]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Mean(statistics.fmean(known), error, len(known))


def gap_sentence(results: Results) -> str:
    """The gap in words: how large, how sure, against which limit."""
    mean = mean_of(results.gaps())
    if mean is None:
        return f"no gap: it takes {REFERENCE} and {OURS} trained to the end from one seed"
    size = f"{OURS}'s validation loss is {mean.mean:+.2%} from {REFERENCE}'s"
    sure = (
        f"± {mean.error:.2%} standard error, mean of {mean.n} seeds"
        if mean.error is not None
        else "one seed, so no standard error: --seeds 3 gives one"
    )
    verdict = "within" if mean.mean <= LIMIT else "over"
    return f"{size} ({sure}); {verdict} the limit of {LIMIT:+.1%}"
