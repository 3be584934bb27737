"""``fp8compile demo``: train a small Llama on Python's own source with and without fp8compile, and compare.

    for each seed, all arms in turns:  same weights, same batches, same optimizer  ->  loss, bytes saved, time

With ``--precision fp16`` the arms are ways to scale the loss (``arms``, ``loss_scales``) and the model is FP16 throughout.
Ctrl-C (and SIGTERM) stops the training, not the demo: the table and the files compare the arms at the step that all reached.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fp8compile.extras.demo import arms, compiling
from fp8compile.extras.demo.data import load_corpus
from fp8compile.extras.demo.estimate import estimate
from fp8compile.extras.demo.eta import time_left
from fp8compile.extras.demo.extras import require_extras
from fp8compile.extras.demo.fp16_cost import refuse_hours
from fp8compile.extras.demo.loop import Task
from fp8compile.extras.demo.model import build_model, size_for
from fp8compile.extras.demo.opening import opening
from fp8compile.extras.demo.output_files import write_files
from fp8compile.extras.demo.precision import choose_precision
from fp8compile.extras.demo.progress import Screen, screen_for
from fp8compile.extras.demo.results import INTERRUPTED as STOPPED
from fp8compile.extras.demo.results import RUNNING, Results, Run
from fp8compile.extras.demo.saved_bytes import saved_bytes_of_step
from fp8compile.extras.demo.table import summary
from fp8compile.extras.demo.turns import cut_to_common_step, train_in_turns

DONE, FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class DemoOptions:
    """What the command line chooses.

    Attributes:
        out: folder for the results.
        steps: optimizer steps of each run; None: the size's own, and in FP16 half of these, because there are seven arms.
        seeds: how many seeds each arm is trained from.
        seed: the first of them; the others follow.
        arms: names from ``arms.ARMS``, in order; in FP16 from ``arms.FP16_ARMS``. None: Inductor's and ours; in FP16 all.
        preset: fp8compile's preset.
        fields: fields of fp8compile's Recipe that differ from the preset.
        precision: "bf16", "fp32", "fp16", or "auto": BF16 or FP32, depending on what this machine is fast at.
        tiny: a model and a run of seconds, to try out the demo.
        threads: CPU threads; None leaves torch's number.
        slow: train in FP16 even where this CPU takes hours for it.
    """

    out: Path = Path("demo-output")
    steps: int | None = None
    seeds: int = 1
    seed: int = 0
    arms: tuple[str, ...] | None = None
    preset: str = "default"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "auto"
    tiny: bool = False
    threads: int | None = None
    slow: bool = False

    @property
    def chosen_arms(self) -> tuple[str, ...]:
        """The arms that are run."""
        return self.arms or (arms.FP16_ARMS if self.precision == "fp16" else (arms.REFERENCE, arms.OURS))

    @property
    def backend_options(self) -> dict[str, Any]:
        """``torch.compile(options=...)`` of the fp8compile arm."""
        return {"preset": self.preset, **self.fields}


class DemoConsole(Console):
    """A console that lets its caller decide what to do if the reader of the output is gone; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Run every arm, print the table, write the files; returns 0, or 1: an arm failed, or 130: Ctrl-C.

    Raises:
        MissingExtra: a package of ``fp8compile[demo]`` is missing.
        NoSource: this Python has no standard library source.
        TooSlow: FP16 would take hours on this CPU, and ``options.slow`` does not allow that.
        OSError: the folder cannot be written; BrokenPipeError: the reader of the output is gone.
    """
    require_extras()
    options.out.mkdir(parents=True, exist_ok=True)
    console = console or DemoConsole()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with interrupted_by_sigterm():
        console.print("timing a few uncompiled steps")
        task, results = prepare(options, console)
        with screen_for(console, task.steps) as screen:
            try:
                train_all(task, results, options, screen)
            except KeyboardInterrupt:
                mark_interrupted(results)
    files = write_files(results, task.corpus, _plain(options), options.out)
    console.print(summary(results, console.width), highlight=False, markup=False)
    names = ", ".join(path.name for path in files)
    console.print(f"in {options.out}: {names}", highlight=False, markup=False)
    return INTERRUPTED if results.interrupted else FAILED if results.failed else DONE


def prepare(options: DemoOptions, console: Console) -> tuple[Task, Results]:
    """Read the text, choose size and precision, measure what the uncompiled model saves; say what will be done.

    Raises:
        TooSlow: see ``run_demo``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size_for(device, options.tiny, len(options.chosen_arms))
    model = build_model(size, options.seed, device)
    precision = choose_precision(model, device, options.precision)
    half = precision.dtype is torch.float16
    task = Task(size, precision, load_corpus(), device, options.steps or size.steps // (2 if half else 1))
    if not options.slow:
        refuse_hours(precision, options.chosen_arms * options.seeds, task.steps * size.tokens_per_step)
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    recipe = ", ".join(f"{key} {value}" for key, value in options.backend_options.items())
    results = Results(size, task.precision, task.steps, seeds, options.chosen_arms, recipe)
    guess = estimate(model, task, results.arms, len(seeds))
    parameters = sum(p.numel() for p in model.parameters())
    console.print(opening(task, results, guess, parameters, options.out), highlight=False, markup=False)
    results.eager_saved_bytes = _eager_saved_bytes(model.half() if half else model, task)
    return task, results


def train_all(task: Task, results: Results, options: DemoOptions, screen: Screen) -> None:
    """Train every arm from every seed, seed by seed, the arms of a seed in turns; if a run fails, the others go on."""
    if any(arm != arms.EAGER for arm in results.arms):
        screen.say("warming up the compiler")
        compiling.warm_up_compiler(task.device)
    watcher = _OnScreen(task, results, screen)
    for seed in results.seeds:
        runs = [Run(arm, seed) for arm in results.arms]
        results.runs += runs
        train_in_turns(runs, task, options.backend_options, watcher)


def mark_interrupted(results: Results) -> None:
    """Cut the runs under way, which are of one seed, to the step that all of them have taken."""
    stopped = [run for run in results.runs if run.status == RUNNING]
    cut_to_common_step(stopped)
    for run in stopped:
        run.status = STOPPED


class _OnScreen:
    """Shows the progress (``turns.ProgressWatcher``), and the time left once every arm has been timed."""

    def __init__(self, task: Task, results: Results, screen: Screen) -> None:
        self.task, self.results, self.screen = task, results, screen
        self.plan = list(results.arms) * len(results.seeds)
        self.warned = False

    def begins(self, run: Run) -> None:
        self.screen.begin(run)

    def stepped(self, run: Run) -> None:
        runs = self.results.runs
        left = time_left(self.plan, runs, self.task.steps, len(self.task.evaluation_steps))
        if left is not None and not left.at_least and not self.warned:
            self.warned = True
            self.screen.say(f"time left {left}, an estimate from the first steps of each arm")
        self.screen.step([each for each in runs if each.seed == run.seed], run, left)

    def stopped(self, run: Run) -> None:
        self.screen.say(f"{run.arm}, seed {run.seed}: {run.status}")


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM (from ``timeout`` or a batch system) acts like Ctrl-C; only the main thread can set this up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _eager_saved_bytes(model: torch.nn.Module, task: Task) -> int | None:
    """Bytes that the uncompiled model keeps; None where that is more than the card holds."""
    tokens = task.validation()[0].to(task.device)
    try:
        with task.precision.autocast(task.device):
            return saved_bytes_of_step(model, model, tokens)
    except torch.OutOfMemoryError:
        return None


def _plain(options: DemoOptions) -> dict[str, Any]:
    return {**dataclasses.asdict(options), "out": options.out.name}
