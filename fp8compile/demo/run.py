"""``fp8compile demo``: train a small Llama on Python's own source with and without fp8compile, and compare.

    for each seed, for each arm:  same weights, same batches, same optimizer  ->  loss, bytes saved, time

With ``--precision fp16`` the arms are ways to scale the loss (``arms``, ``scaling``) and the model is FP16 throughout.
Ctrl-C stops the training, not the demo: the table and the files show what was measured until then.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fp8compile.demo import arms, compiling
from fp8compile.demo.data import load_corpus
from fp8compile.demo.eta import time_left
from fp8compile.demo.extras import require_extras
from fp8compile.demo.loop import Task, train
from fp8compile.demo.loss_scales import DIVERGED, DivergenceError
from fp8compile.demo.model import Size, build_model, size_for
from fp8compile.demo.output_files import write_files
from fp8compile.demo.precision import choose_precision
from fp8compile.demo.progress import Screen, screen_for
from fp8compile.demo.results import Results, Run
from fp8compile.demo.saved_bytes import saved_bytes_of_step
from fp8compile.demo.table import summary

DONE, FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Options:
    """What the command line chooses.

    Attributes:
        out: folder for the results.
        steps: optimizer steps of each run; None: the size's own, in FP16 half of them, for there are seven arms.
        seeds: how many seeds each arm is trained from.
        seed: the first of them; the others follow.
        arms: names from ``arms.ARMS``, in order; in FP16 from ``arms.FP16_ARMS``. None: Inductor's and ours; in FP16 all.
        preset: fp8compile's preset.
        fields: fields of fp8compile's Recipe that differ from the preset.
        precision: "bf16", "fp32", "fp16", or "auto": BF16 or FP32, by what this machine is fast at.
        tiny: a model and a run of seconds, to try the machinery.
        threads: CPU threads; None leaves torch's number.
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

    @property
    def chosen_arms(self) -> tuple[str, ...]:
        """The arms that are run."""
        return self.arms or (arms.FP16_ARMS if self.precision == "fp16" else (arms.REFERENCE, arms.OURS))

    @property
    def backend_options(self) -> dict[str, Any]:
        """``torch.compile(options=...)`` of the fp8compile arm."""
        return {"preset": self.preset, **self.fields}


class DemoConsole(Console):
    """A console that leaves it to its caller what to do where the reader of the output is gone; rich would end with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def run_demo(options: Options, console: Console | None = None) -> int:
    """Run every arm, print the table, write the files; returns 0, or 1: an arm failed, or 130: Ctrl-C.

    Raises:
        MissingExtra: a package of ``fp8compile[demo]`` is missing.
        NoSource: this Python has no standard library source.
        OSError: the folder cannot be written; BrokenPipeError: the reader of the output is gone.
    """
    require_extras()
    options.out.mkdir(parents=True, exist_ok=True)
    console = console or DemoConsole()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    task, results = prepare(options)
    with screen_for(console, task.steps, task.size.tokens_per_step) as screen:
        screen.say(_opening(task, results))
        try:
            train_all(task, results, options, screen)
        except KeyboardInterrupt:
            _mark_interrupted(results)
    files = write_files(results, task.corpus, _plain(options), options.out)
    console.print(summary(results), highlight=False, markup=False, soft_wrap=True)
    names = ", ".join(path.name for path in files)
    console.print(f"in {options.out}: {names}", highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED if results.interrupted else FAILED if results.failed else DONE


def prepare(options: Options) -> tuple[Task, Results]:
    """Read the text, choose size and precision, measure what the uncompiled model saves."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size_for(device, options.tiny)
    model = build_model(size, options.seed, device)
    precision = choose_precision(model, device, options.precision)
    half = precision.dtype is torch.float16
    model = model.half() if half else model
    task = Task(size, precision, load_corpus(), device, options.steps or size.steps // (2 if half else 1))
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    recipe = ", ".join(f"{key} {value}" for key, value in options.backend_options.items())
    results = Results(size, task.precision, task.steps, seeds, options.chosen_arms, recipe)
    results.eager_saved_bytes = _eager_saved_bytes(model, task)
    return task, results


def train_all(task: Task, results: Results, options: Options, screen: Screen) -> None:
    """Every arm from every seed, seed by seed; a run that fails leaves the others to run."""
    plan = [(seed, arm) for seed in results.seeds for arm in results.arms]
    if any(arm != arms.EAGER for arm in results.arms):
        screen.say("warming up the compiler")
        compiling.warm_up_compiler(task.device)
    for seed, arm in plan:
        run = Run(arm, seed)
        results.runs.append(run)
        screen.begin(run)
        try:
            train_run(run, task, options, plan=[arm for _, arm in plan], results=results, screen=screen)
            run.status = "done"
        except DivergenceError as why:
            run.status = f"{DIVERGED} at step {len(run.scales)}: {why}"
            screen.say(f"{arm}, seed {seed}: {run.status}")
        except Exception as error:
            run.status, run.traceback = f"failed: {_cause(error)}", traceback.format_exc()
            screen.say(f"{arm}, seed {seed}: {run.status}")


def train_run(run: Run, task: Task, options: Options, *, plan: list[str], results: Results, screen: Screen) -> None:
    """One arm from one seed, in a compiler that remembers no other arm."""
    evaluations = len(task.evaluation_steps)

    def tell() -> None:
        if len(run.losses) == 1:
            run.warm_cache = compiling.compiler_cache_hits() > hits
        screen.step(run, time_left(plan, results.runs, task.steps, evaluations))

    compiling.forget_compiled()
    hits = compiling.compiler_cache_hits()
    model = build_model(task.size, run.seed, task.device).to(compiling.dtype_of(run.arm))
    train(run, model, compiling.compile_arm(run.arm, model, options.backend_options), task, tell)


def _eager_saved_bytes(model: torch.nn.Module, task: Task) -> int | None:
    """What the uncompiled model keeps; None where that is more than the card holds."""
    tokens = task.validation()[0].to(task.device)
    try:
        with task.precision.autocast(task.device):
            return saved_bytes_of_step(model, model, tokens)
    except torch.OutOfMemoryError:
        return None


def _mark_interrupted(results: Results) -> None:
    for run in results.runs:
        if run.status == "running":
            run.status = "interrupted"


def _opening(task: Task, results: Results) -> str:
    size: Size = task.size
    corpus = task.corpus
    return (
        f"text: {len(corpus.train) / 1e6:.1f} MB of Python's standard library to train on, "
        f"{len(corpus.validation) / 1e6:.1f} MB in {len(corpus.validation_files)} other files held out\n"
        f"model: Llama, {size.layers} layers x {size.hidden}; {task.steps} steps of {size.tokens_per_step} "
        f"bytes for each of {', '.join(results.arms)}\n"
        f"precision: {task.precision.why}"
    )


def _plain(options: Options) -> dict[str, Any]:
    return {**dataclasses.asdict(options), "out": options.out.name}


def _cause(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else 'no message'}"
