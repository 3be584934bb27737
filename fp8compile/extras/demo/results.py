"""What the demo measured, and the one number that it is about.

gap      (validation loss of the arm - that of Inductor) / that of Inductor, from the same seed; in FP16 that of fp32
claim    mean gap over the seeds <= 0.3 %, one-sided: better than Inductor is fine
error    standard error of the mean: standard deviation (n - 1) / sqrt(n), from two seeds on
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fp8compile.extras.demo.arms import FP16_ARMS, FP32, OURS, REFERENCE
from fp8compile.extras.demo.compiling import BackendReport
from fp8compile.extras.demo.loss_scales import DIVERGED, Course, Ends, course, made_progress
from fp8compile.extras.demo.model import Size, warm_up_steps
from fp8compile.extras.demo.precision import Precision

LIMIT = 0.003
RUNNING, DONE, INTERRUPTED = "running", "done", "interrupted"
LAST_SHARE = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats per byte after ``step`` steps; ``seconds`` is what evaluating took."""

    step: int
    loss: float
    seconds: float


@dataclass
class Run:
    """One arm trained from one seed. It is filled as training goes on, so nothing measured is lost when training stops.

    Attributes:
        losses: training loss of each step, nats per byte.
        step_seconds: seconds of each step; the first one compiles.
        evaluations: validation losses; the first is before training.
        saved_bytes: saved for backward in one step, measured by ``saved_bytes``.
        peak_bytes: largest CUDA allocation of a step after the first, less what other arms hold; None on a CPU.
        warm_cache: the first step found compiled code on disk, so its compile time is not that of a full compilation.
        report: fp8compile's report, in its arm.
        scales: the loss scale that each step was taken with; empty where the loss is not scaled.
        skipped_steps: numbers of the steps that the loss scaler left out; the first step is 1.
        status: "running", "done", "interrupted", "failed: why" or "diverged at step n: why".
        traceback: the traceback of the exception that made it fail.
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
    scales: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    status: str = RUNNING
    traceback: str = ""

    @property
    def skipped(self) -> int:
        """How many steps the loss scaler left out."""
        return len(self.skipped_steps)

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
        """The latest validation loss after at least one step, nats per byte."""
        latest = self.evaluations[-1] if self.evaluations else None
        return latest.loss if latest and latest.step else None

    @property
    def ends(self) -> Ends | None:
        """The first and last validation loss of a run that was trained to its end."""
        known = self.status == DONE and self.evaluations
        return Ends(self.evaluations[0].loss, self.evaluations[-1].loss) if known else None

    def cut(self, steps: int, evaluated: Collection[int]) -> None:
        """Keep the first ``steps`` steps, and of the evaluations those after the steps ``evaluated``."""
        for of_each_step in (self.losses, self.step_seconds, self.scales):
            del of_each_step[steps:]
        self.skipped_steps = [number for number in self.skipped_steps if number <= steps]
        self.evaluations = [e for e in self.evaluations if e.step in evaluated and e.step <= steps]


@dataclass
class Results:
    """Everything the demo measured.

    Attributes:
        eager_saved_bytes: saved for backward by the uncompiled model.
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
    def reference(self) -> str:
        """The arm that the others are compared with."""
        return FP32 if set(self.arms) <= set(FP16_ARMS) else REFERENCE

    @property
    def interrupted(self) -> bool:
        return any(run.status == INTERRUPTED for run in self.runs)

    @property
    def interrupted_at(self) -> int | None:
        """The step at which the interrupted runs are compared: all of one seed, cut to the same step."""
        return next((len(run.losses) for run in self.runs if run.status == INTERRUPTED), None)

    @property
    def failed(self) -> bool:
        return any(run.status.startswith("failed") for run in self.runs)

    @property
    def report(self) -> BackendReport | None:
        """fp8compile's report of the first run that has one."""
        return next((run.report for run in self.runs if run.report), None)

    def of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]

    def compared(self, arm: str) -> list[Run]:
        """The arm's runs whose losses are shown: interrupted ones only if no seed was trained to its end."""
        so_far = self._status_compared == INTERRUPTED
        return [run for run in self.of(arm) if so_far or run.status != INTERRUPTED]

    def gaps(self, arm: str = OURS, seeds: Collection[int] | None = None) -> list[float]:
        """The arm's gap for each seed (of ``seeds``, if given) that both arms finished.

        If the demo was interrupted before any seed was finished: the gap of the current seed, after the latest step that both
        evaluated.
        """
        seeds = [seed for seed in self.seeds if seeds is None or seed in seeds]
        status = self._status_compared
        ends = {(run.arm, run.seed): run.validation_loss for run in self.runs if run.status == status}
        pairs = [(ends.get((arm, seed)), ends.get((self.reference, seed))) for seed in seeds]
        return [gap(ours, plain) for ours, plain in pairs if ours is not None and plain is not None]

    @property
    def gap_step(self) -> int | None:
        """The step after which the validation losses that ``gaps`` compares were taken; None if there are none."""
        status = self._status_compared
        steps = [run.evaluations[-1].step for run in self.runs if run.status == status and run.evaluations]
        return max(steps, default=0) or None

    @property
    def _status_compared(self) -> str:
        return INTERRUPTED if self.interrupted and not any(run.status == DONE for run in self.runs) else DONE

    def divergence(self, run: Run) -> str | None:
        """How a run diverged (``loss_scales`` has the rule), "" if it did not; None for a run not trained to its end."""
        if run.status.startswith(DIVERGED):
            return run.status
        reference = next((r.ends for r in self.of(FP32) if r.seed == run.seed), None)
        if run.ends is None:
            return None
        return "" if made_progress(run.ends, reference) else f"{DIVERGED}: no progress by the end"

    def course(self, run: Run) -> Course | None:
        """Where the scale was after the learning rate's warm-up."""
        return course(run.scales, warm_up_steps(self.steps))


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
    """Mean and standard error of the values that are not None; None if there are none."""
    known: Sequence[float] = [v for v in values if v is not None]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Mean(statistics.fmean(known), error, len(known))


def gap_sentence(results: Results) -> str:
    """The gap in words: how large, how sure, against which limit."""
    mean = mean_of(results.gaps())
    if mean is None:
        return f"no gap: it takes a validation loss of {REFERENCE} and {OURS} after the same step, from one seed"
    size = f"{OURS}'s validation loss is {mean.mean:+.2%} from {REFERENCE}'s"
    if results.interrupted and results.gap_step != results.steps:
        return f"{size} after step {results.gap_step}; the limit of {LIMIT:+.1%} is for a training to its end"
    sure = (
        f"± {mean.error:.2%} standard error, mean of {mean.n} seeds"
        if mean.error is not None
        else "one seed, so no standard error: --seeds 3 gives one"
    )
    verdict = "within" if mean.mean <= LIMIT else "over"
    return f"{size} ({sure}); {verdict} the limit of {LIMIT:+.1%}"
