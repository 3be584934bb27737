"""What is printed before training: what will be trained, how long it takes, what it leaves on disk."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from fp8compile._torch import cache_dir
from fp8compile.extras.demo.estimate import Estimate, clock
from fp8compile.extras.demo.loop import Task
from fp8compile.extras.demo.results import Results
from fp8compile.extras.demo.turns import BLOCK

PLOTS_AND_REPORTS = 300 * 1024  # bytes, rounded up
BYTES_PER_STEP = 60  # of results.json: a loss and the seconds, as decimal numbers


def opening(task: Task, results: Results, estimate: Estimate | None, parameters: int, folder: Path) -> Table:
    """A table of two columns: a word and its explanation."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for row in (
        ("trains", _model(task, parameters)),
        ("arms", _arms(task, results)),
        ("precision", results.precision.why),
        ("time", time_text(estimate)),
        ("disk", _disk(results, folder)),
        ("network", "not used: nothing is downloaded from here on"),
        (
            "to stop",
            "Ctrl-C, at any time: the table and the files then compare the arms at the step that all have reached",
        ),
    ):
        made.add_row(*row)
    return made


def time_text(estimate: Estimate | None) -> str:
    """The estimate, marked as an estimate."""
    if estimate is None:
        return (
            "known after the first steps: an uncompiled step, which would tell, does not fit into this card's memory"
        )
    steps = ", ".join(f"{s * 1e3:.0f} ms in {str(d).removeprefix('torch.')}" for d, s in estimate.step_s.items())
    each = steps if len(estimate.step_s) > 1 else f"{next(iter(estimate.step_s.values())) * 1e3:.0f} ms"
    return (
        f"about {clock(estimate.seconds)} of training, an estimate: an uncompiled step takes {each} here. Compiling comes on "
        "top; the first steps tell how long it takes"
    )


def _model(task: Task, parameters: int) -> str:
    size, corpus = task.size, task.corpus
    return (
        f"a Llama of {parameters / 1e6:.1f}M parameters, {size.layers} layers x {size.hidden}, on the source of Python's "
        f"standard library, byte by byte: {len(corpus.train) / 1e6:.1f} MB; {len(corpus.validation) / 1e6:.1f} MB in "
        f"{len(corpus.validation_files)} other files are held out"
    )


def _arms(task: Task, results: Results) -> str:
    seeds = f"seed {results.seeds[0]}" if len(results.seeds) == 1 else f"each of {len(results.seeds)} seeds"
    return (
        f"{', '.join(results.arms)}: {task.steps} steps of {task.size.tokens_per_step} bytes for each, from {seeds}; "
        f"with the same weights, batches and optimizer, in turns of {BLOCK} steps"
    )


def _disk(results: Results, folder: Path) -> str:
    steps = len(results.seeds) * len(results.arms) * results.steps
    mib = (PLOTS_AND_REPORTS + BYTES_PER_STEP * steps) / 2**20
    return f"about {mib:.1f} MiB in {folder}; compiled code in {cache_dir()}"
