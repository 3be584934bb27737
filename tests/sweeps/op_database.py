"""PyTorch's operator database against eager: whatever an operation keeps for its backward is encoded where it may be.

Every entry of ``op_db`` that runs in a dtype, two samples of it, in the programs of ``tests/sweeps/op_programs.py``, with
the thresholds taken away (``RECIPE``): groups of 16, no tensor too small. A case is one step in eager and one compiled:

  bar       20 dB for every gradient, against eager in the same dtype. Where the dtype itself does not reach that, the bar
            is 3 dB under what the same compilation reaches with preset "off", against eager or against float64.
  encoded   something was stored in one byte (or a product rewritten), and every gradient reaches the bar
  exact     nothing that the backward reads was eligible (integers, parameters, nothing saved at all)
  declined  all that was eligible was left exact, with the reasons; the gradients reach the bar
  wrong, non-finite, crash      what must not be: under the bar; NaN or inf where eager is finite; an error where neither
            eager nor backend="aot_eager" raises one

    python -m tests.sweeps.op_database --json benchmarks/results/op-database-cpu.json -j 2
    python -m tests.sweeps.op_database --only '^(div|pow)' --dtypes float32
"""

from __future__ import annotations

import contextlib
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.compiler.inductor import compile_and_report
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import SAVED
from tests.support.reference import sqnr_db
from tests.sweeps.op_programs import WRAPPERS, Sample, chosen, is_differentiable, operations, program, samples_of

BAR_DB, MARGIN_DB = 20.0, 3.0
SECONDS = 60  # for one operation in one dtype
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATIENT: dict[str, Any] = {
    "debug.codegen": "eager",
    "debug.inductor": {"fallback_random": True},
}  # eager's random numbers
RECIPE: dict[str, Any] = {**PATIENT, "saved.min_numel": 0, "saved.group_size": 16, "linears.emulate": True}
OFF: dict[str, Any] = {**PATIENT, "preset": "off"}
BAD = ("wrong", "non-finite", "crash")
ALWAYS_EXACT = (
    "integers that nothing bounds",
    "not worth a kernel of its own",
    "a mask",
    "made from parameters alone",
    "a table or mask",
)


@dataclass(frozen=True)
class Record:
    """One case: ``outcome`` is its first word, ``detail`` the rest; ``db`` the worst gradient (None: none compared)."""

    op: str
    dtype: str
    sample: int
    wrapper: str
    outcome: str
    detail: str = ""
    about: str = ""
    db: float | None = None
    bar: float | None = None
    worst: str = ""
    saved: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.op} {self.dtype} {self.sample} {self.wrapper}"


@dataclass
class Step:
    """What one step gave: loss, results without gradient, gradients; the reports of what was compiled."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]
    reports: tuple[GraphReport, ...] = ()

    @property
    def finite(self) -> bool:
        floating = [t for t in (*self.results.values(), *self.gradients.values()) if t.dtype.is_floating_point]
        return all(bool(t.isfinite().all()) for t in floating)


class OutOfTime(Exception):
    pass


def records(
    name: str, dtype: str, samples: int = 2, wrappers: Sequence[str] = WRAPPERS, seed: int = 0
) -> list[Record]:
    """Every case of one operation in one dtype."""
    op = operations()[name]
    whole = Record(name, dtype, 0, "", "")
    if name.removeprefix("new_").startswith("empty"):
        return [replace(whole, outcome="undefined", detail="its result is memory that nothing wrote")]
    if not op.supports_dtype(DTYPES[dtype], "cpu"):
        return [replace(whole, outcome="unsupported", detail="the operation has no such dtype on a CPU")]
    return cases(whole, lambda: samples_of(op, DTYPES[dtype], seed), samples, wrappers)


def cases(
    whole: Record,
    made: Callable[[], list[Sample]],
    samples: int,
    wrappers: Sequence[str],
    seconds: int = SECONDS,
) -> list[Record]:
    """Every case of what has these samples, in the dtype of ``whole``, in that time."""
    try:
        with warnings.catch_warnings(), limited(seconds):
            warnings.simplefilter("ignore")
            found = chosen(made(), _runs, samples)
            if not found:
                return [
                    replace(whole, outcome="eager fails", detail="no sample is finite with finite gradients in eager")
                ]
            return [
                _case(replace(whole, sample=i, wrapper=w), s)
                for i, s in enumerate(found)
                for w in _fitting(s, i, wrappers)
            ]
    except OutOfTime:
        return [replace(whole, outcome="out of time", detail=f"more than {seconds} s")]
    except Exception as error:
        return [replace(whole, outcome="eager fails", detail=_said(error))]


def _fitting(sample: Sample, place: int, wrappers: Sequence[str]) -> Sequence[str]:
    """All programs for the first sample; one for the others, and where there is nothing to differentiate."""
    return wrappers if place == 0 and is_differentiable(sample) else wrappers[-1:]


def _runs(sample: Sample) -> bool:
    """Whether eager gives finite results and gradients."""
    try:
        return step(sample, "product").finite
    except OutOfTime:
        raise
    except Exception:
        return False


def _case(empty: Record, sample: Sample) -> Record:
    record = replace(empty, about=sample.about)
    try:
        eager = step(sample, record.wrapper)
    except OutOfTime:
        raise
    except Exception as error:
        return replace(record, outcome="eager fails", detail=_said(error))
    if not eager.finite:
        return replace(record, outcome="eager is not finite")
    try:
        ours = step(sample, record.wrapper, options=RECIPE)
    except OutOfTime:
        raise
    except Exception as error:
        return replace(record, **_crash(sample, record.wrapper, error))
    return judged(record, sample, eager, ours)


def judged(record: Record, sample: Sample, eager: Step, ours: Step) -> Record:
    """The outcome of a case that ran, by the rule that stands at the head of this file."""
    if not ours.reports:
        return replace(record, outcome="not compiled", detail="Dynamo ran it in eager")
    record = replace(record, **_reported(ours.reports))
    db, worst = worst_of(eager, ours)
    bar = BAR_DB
    if not db >= bar:
        db, bar, worst = _second_reference(record, sample, eager, ours)
    record = replace(record, db=None if math.isinf(db) else round(db, 1), bar=round(bar, 1), worst=worst)
    if math.isnan(db):
        return replace(record, outcome="non-finite", detail=worst)
    if db < bar:
        return replace(record, outcome="wrong", detail=f"{db:.1f} dB in {worst}")
    return record


def _second_reference(record: Record, sample: Sample, eager: Step, ours: Step) -> tuple[float, float, str]:
    """Where eager is missed: what "off" reaches against eager, then both against float64; the kinder of the two."""
    plain = step(sample, record.wrapper, options=OFF)
    db, worst = worst_of(eager, ours)
    bar = _bar(worst_of(eager, plain)[0])
    if db >= bar or math.isnan(db):
        return db, bar, worst
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
        exact = step(sample, record.wrapper, dtype=torch.float64)
        if exact.finite:
            db64, worst64 = worst_of(exact, ours)
            bar64 = _bar(worst_of(exact, plain)[0])
            if db64 - bar64 > db - bar:
                return db64, bar64, worst64
    return db, bar, worst


def _bar(reached: float) -> float:
    return BAR_DB if math.isnan(reached) else min(BAR_DB, reached - MARGIN_DB)


def worst_of(reference: Step, got: Step) -> tuple[float, str]:
    """The least SQNR in dB over results and gradients, NaN being less than any; and whose it is."""
    worst, name = math.inf, ""
    for part in ("results", "gradients"):
        right, found = getattr(reference, part), getattr(got, part)
        for key, value in right.items():
            db = sqnr(value, found[key]) if key in found else -math.inf
            if math.isnan(db) or db < worst:
                worst, name = db, key
            if math.isnan(db):
                return worst, name
    return worst, name


def sqnr(right: Tensor, got: Tensor) -> float:
    """10 log10(Σ right² / Σ (right - got)²); NaN where ``got`` is not finite; what is no float must be equal."""
    if right.shape != got.shape:
        return -math.inf
    if not right.dtype.is_floating_point:
        return math.inf if torch.equal(right, got) else -math.inf
    right, got = right.double(), got.double()
    if not got.isfinite().all():
        return math.nan
    return sqnr_db(right, got)


def step(
    sample: Sample,
    wrapper: str,
    options: dict[str, Any] | None = None,
    backend: str = "",
    dtype: torch.dtype | None = None,
) -> Step:
    """One forward and backward of a program: in eager, by a backend, or by ours with these options."""
    sample = sample if dtype is None else sample.to(dtype)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = program(sample, wrapper)
    ts = [t.detach().clone().requires_grad_() for t in sample.tensors]
    others = [t.detach().clone() for t in sample.others]
    reports: list[GraphReport] = []
    run: Any = module
    if options is not None:
        run = torch.compile(module, backend=_reporting(options, reports))
    elif backend:
        run = torch.compile(module, backend=backend)
    torch.manual_seed(1)
    loss, rest = run(*ts, *others)
    if loss.requires_grad:
        loss.backward()
    found = {"loss": loss.detach(), **{f"result {i}": o for i, o in enumerate(rest)}}
    return Step(found, module.gradients(ts), tuple(reports))


def _reporting(options: dict[str, Any], into: list[GraphReport]) -> Callable[..., Any]:
    recipe = Recipe.from_options(options)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, reports = compile_and_report(gm, inputs, recipe)
        into.extend(reports)
        return compiled

    return backend


def _reported(reports: Sequence[GraphReport]) -> dict[str, Any]:
    """What was encoded and what was left, in words; the outcome if the gradients are right."""
    saved = tuple(f"{s.origin.op} {list(s.shape)} {s.codec}" for r in reports for s in r.notes.saved)
    linears = tuple(f"{x.direction} matmul {x.formats}" for r in reports for x in r.notes.linears)
    left = tuple(
        f"{s.origin.op} {list(s.shape)}: {s.reason}"
        for r in reports
        for s in r.notes.skipped(SAVED)
        if not any(word in s.reason for word in ALWAYS_EXACT)
    )
    outcome = "encoded" if saved or linears else "declined" if left else "exact"
    reasons = "; ".join(dict.fromkeys(entry.split(": ", 1)[1] for entry in left))
    return {
        "outcome": outcome,
        "saved": saved + linears,
        "left": left,
        "detail": reasons if outcome == "declined" else "",
    }


def _crash(sample: Sample, wrapper: str, error: Exception) -> dict[str, Any]:
    """A crash counts where aot_eager compiles and runs the program; told apart: whether preset "off" crashes too."""
    try:
        step(sample, wrapper, backend="aot_eager")
    except OutOfTime:
        raise
    except Exception:
        return {"outcome": "not compilable", "detail": f"nor by aot_eager: {_said(error)}"}
    try:
        step(sample, wrapper, options=OFF)
    except OutOfTime:
        raise
    except Exception:
        return {"outcome": "crash", "detail": f'preset "off" too: {_said(error)}'}
    return {"outcome": "crash", "detail": _said(error)}


def _said(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {str(inner).strip().splitlines()[0] if str(inner).strip() else ''}"[:200]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise OutOfTime in the main thread once ``seconds`` are over."""

    def ring(signum: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    from fp8compile.fx import spec
    from tests.sweeps.op_database_run import main

    spec.enabled = True
    main()
