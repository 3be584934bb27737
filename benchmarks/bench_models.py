"""Bytes kept, gradient quality and training of nine models, against eager PyTorch and plain Inductor.

    python benchmarks/bench_models.py --json benchmarks/results/models-cpu.json

For every model and precision:
  bytes     what one forward leaves for the backward: distinct storages that reach torch.autograd's
            saved-tensor hooks, without parameters, buffers and the model's inputs. Eager, plain Inductor,
            ours; beside it what ``fp8compile.report`` says of the same compilation.
  SQNR      20 log10(|ref| / |ref - x|) of every parameter's gradient against float64, after some warm-up
            steps (a network at initialisation has gradients that are zero by construction). "plain" is
            Inductor without us: the noise floor.
  training  the same batches, seeds and AdamW for every arm; the gap to the twin (plain) is that of the
            mean loss of the last five steps, relative, positive where an arm is worse; mean over seeds +-
            standard error. The arm "eager" is PyTorch itself: its gap is what rounding alone does, no
            code involved.

``--codegen eager`` runs the rewritten graphs node by node: the same graphs, the same bytes, no C++ compiler.
The JSON is written after every model; models and precisions that are not run keep what it says of them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import datetime
import json
import math
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fp8compile
from benchmarks.models import MODELS, Batch, Case, bf16_products_in_fp32, digits_source

FORMATS = ("e4m3", "int8", "auto")
ARMS = ("eager", *FORMATS)
PRECISIONS = ("amp", "bf16", "fp32")
WARM_UP_STEPS = 10
LEARNING_RATE = 5e-4
RISING_STEPS = 5  # of the learning rate; without them a small model's loss spikes, at another step in every arm
LARGEST_NORM = 1.0  # of all gradients together
LAST_STEPS = 5
ZERO = 1e-5  # a gradient this much smaller (RMS) than the median parameter's is zero up to rounding
AGREEMENT = 0.01  # how far report and measurement may differ


# --------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Way:
    """How a model is compiled: not at all, by plain Inductor, or by fp8compile in one of its formats."""

    name: str
    codegen: str

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """``model``, compiled so."""
        if self.name == "eager":
            return model
        if self.name == "plain" and self.codegen == "inductor":
            return torch.compile(model)
        options = {"preset": "off"} if self.name == "plain" else {"saved_format": self.name}
        return torch.compile(model, backend="fp8compile", options={**options, "codegen": self.codegen})


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
    """A storage kept for the backward, with the shape and dtype of the first tensor that looks at it."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]


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


def reported_storages(report: fp8compile.Report) -> list[Kept]:
    """What the report says is kept: encoded tensors as one entry each, codes and scales together."""
    codes = [Kept(s.bytes_after, "codes", _shape(s.shape)) for s in report.saved]
    return codes + [Kept(s.bytes, s.dtype, _shape(s.shape)) for s in report.skips]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("[]").split(",") if part.strip())


# ------------------------------------------------------------------------------------------------------ SQNR


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradient of every parameter that gets one, in float64."""
    model.zero_grad()
    run().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to noise in dB; infinite where they are equal."""
    noise = (reference - value).norm()
    return float(20 * torch.log10(reference.norm() / noise)) if noise else math.inf


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
    report: fp8compile.Report | None
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
    """Compile, then run one batch forward for the bytes and once more for the gradients."""
    started = time.perf_counter()
    model, run, precision = built.model, built.run, built.precision
    batch = case.batch(0).to(parameter_dtype(precision))
    call(run, batch, precision)  # compiles; autograd's hooks are to see a finished function
    kept = kept_storages(model, lambda: call(run, batch, precision), batch)
    losses: list[Tensor] = []

    def loss() -> Tensor:
        losses.append(case.loss(call(run, batch, precision), batch))
        return losses[-1]

    found = gradients(model, loss)
    report = fp8compile.report(run) if built.way.name in FORMATS and isinstance(run, nn.Module) else None
    return Measured(kept, losses[-1].item(), found, report, time.perf_counter() - started)


def reference_gradients(case: Case) -> dict[str, Tensor]:
    """The gradients of eager PyTorch in float64."""
    model = copy.deepcopy(case.model).double()
    batch = case.batch(0).to(torch.float64)
    return gradients(model, lambda: case.loss(call(model, batch, "fp64"), batch))


def warm_up(case: Case, steps: int = WARM_UP_STEPS) -> None:
    """Train the case's own model a little, in FP32, eagerly, on batches that no measurement uses."""
    train(case, Built(Way("eager", "eager"), "fp32", case.model, case.model), steps, seed=1_000)


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


# ------------------------------------------------------------------------------------------------------ rows


def row_of(name: str, arguments: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Everything about one model, ready for JSON; what is not measured now stays as it was ``before``."""
    case = MODELS[name](0)
    row: dict[str, Any] = {
        "about": case.about,
        "codegen": arguments.codegen,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "warm_up_steps": WARM_UP_STEPS,
        "precisions": before.get("precisions", {}),
        "training": before.get("training"),
    }
    warm_up(case)
    reference = reference_gradients(case)
    for index, precision in enumerate(arguments.precisions):
        seeds = 0 if index else arguments.seeds
        found, losses = _one_precision(name, case, precision, reference, arguments, seeds)
        row["precisions"][precision] = {**found, **environment()}
        if losses:
            row["training"] = {**_training_row(losses, precision, arguments), **environment()}
    return row


def _one_precision(
    name: str,
    case: Case,
    precision: str,
    reference: dict[str, Tensor],
    arguments: argparse.Namespace,
    seeds: int,
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Every way of compiling in turn: measured, then trained; and the losses of those that are trained."""
    measured: dict[str, Measured] = {}
    losses: dict[str, list[list[float]]] = {}
    for way in ("plain", "eager", *FORMATS):
        started = time.perf_counter()
        built = build(case, Way(way, arguments.codegen), precision)
        measured[way] = measure(case, built)
        if arguments.reports and measured[way].report is not None:
            _write_report(arguments.reports, f"{name}-{precision}-{way}-{arguments.codegen}", measured[way])
        _say(f"{name} {precision} {way}: measured in {time.perf_counter() - started:.0f} s")
        twin_elsewhere = way == "plain" and arguments.twin not in (None, arguments.codegen)
        if seeds and way in ("plain", *arguments.arms):
            if twin_elsewhere:
                built = build(case, Way("plain", arguments.twin), precision)
            steps, rate = arguments.steps, arguments.learning_rate
            losses[way] = [train_seed(name, case, built, steps, seed, rate) for seed in range(seeds)]
            _say(f"{name} {precision} {way}: trained after {time.perf_counter() - started:.0f} s")
    return _measured_row(measured, reference), losses


def _measured_row(measured: dict[str, Measured], reference: dict[str, Tensor]) -> dict[str, Any]:
    skipped = zero_up_to_rounding(reference)
    plain = measured["plain"]
    row: dict[str, Any] = {"without_gradient_in_theory": skipped}
    for way, found in measured.items():
        row[way] = {
            "saved_bytes": _total(found.kept),
            "loss": found.loss,
            "seconds": round(found.seconds, 1),
            "sqnr": quality(reference, found.gradients, skipped).summary(),
        }
        if found.report is not None:
            row[way]["sqnr_to_plain"] = quality(plain.gradients, found.gradients, skipped).summary()
            row[way]["report"] = _report_row(found, plain)
    return row


def _report_row(ours: Measured, plain: Measured) -> dict[str, Any]:
    """What the report says, where it disagrees with the measurement, and the largest tensors left alone."""
    report = ours.report
    assert report is not None
    row: dict[str, Any] = {
        "saved_bytes": report.saved_bytes,
        "saved_bytes_plain": report.saved_bytes_plain,
        "graphs": len(report.graphs),
        "encoded": len(report.saved),
        "recomputed": len(report.recomputed),
        "left_alone": [
            {"name": s.name, "op": s.origin.op, "module": s.origin.module, "shape": s.shape, "dtype": s.dtype}
            | {"bytes": s.bytes, "reason": s.reason}
            for s in sorted(report.skips, key=lambda s: -s.bytes)[:12]
        ],
    }
    if not agree(report.saved_bytes, _total(ours.kept)):
        row["disagreement"] = _differences(ours.kept, reported_storages(report))
    if not agree(report.saved_bytes_plain, _total(plain.kept)):
        row["plain_disagreement"] = {"measured": _total(plain.kept), "reported": report.saved_bytes_plain}
    return row


def agree(reported: int, measured: int) -> bool:
    """Whether two numbers of bytes are the same up to ``AGREEMENT``."""
    return abs(reported - measured) <= AGREEMENT * max(measured, 1)


def _differences(measured: list[Kept], reported: list[Kept]) -> dict[str, list[str]]:
    """Shapes that one side has and the other has not, the heaviest ten each."""

    def counted(kept: list[Kept]) -> collections.Counter[str]:
        return collections.Counter(str(list(k.shape)) for k in kept if k.nbytes >= 1024)

    left, right = counted(measured), counted(reported)
    return {
        "measured only": [f"{n} x {shape}" for shape, n in (left - right).most_common(10)],
        "reported only": [f"{n} x {shape}" for shape, n in (right - left).most_common(10)],
    }


def _total(kept: list[Kept]) -> int:
    return sum(k.nbytes for k in kept)


def _training_row(
    losses: dict[str, list[list[float]]], precision: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Losses of the twin and of every arm for each seed, and the gaps between them."""
    twin_ends = [_end(run) for run in losses["plain"]]
    gaps = {}
    for arm in arguments.arms:
        each = [_end(run) / end - 1 for run, end in zip(losses[arm], twin_ends, strict=True)]
        gaps[arm] = {"mean": _mean(each), "standard_error": _standard_error(each), "each": each}
    return {
        "precision": precision,
        "twin": "Inductor" if (arguments.twin or arguments.codegen) == "inductor" else "preset off, codegen eager",
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "optimizer": f"AdamW, learning rate {arguments.learning_rate} after {RISING_STEPS} steps, "
        f"norm clipped to {LARGEST_NORM}",
        "twin_loss_first": _mean([run[0] for run in losses["plain"]]),
        "twin_loss_last5": _mean(twin_ends),
        "gap_last5": gaps,
        "losses": losses,
    }


def _end(losses: list[float]) -> float:
    return _mean(losses[-LAST_STEPS:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


# --------------------------------------------------------------------------------------------------- writing


def environment() -> dict[str, Any]:
    """Where and when a row was measured."""
    packages = [sys.modules[name] for name in ("torch", "fp8compile", "transformers", "timm") if name in sys.modules]
    versions = {"python": platform.python_version()} | {m.__name__: str(m.__version__) for m in packages}
    return {
        "versions": versions,
        "device": _cpu_name(),
        "threads": torch.get_num_threads(),
        "bf16_products": "as FP32 products, rounded once" if _bf16_in_fp32 else "by the CPU",
        "images": digits_source(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


_bf16_in_fp32 = False


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../fp8compile", "../passes")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def _write_report(folder: Path, name: str, ours: Measured) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = "\n".join(f"{k.nbytes:10d} {k.dtype:14s} {list(k.shape)}" for k in ours.kept)
    (folder / f"{name}.txt").write_text(f"{ours.report}\n\nmeasured storages\n{kept}\n")
    if ours.report is not None:
        (folder / f"{name}.json").write_text(ours.report.to_json())


def write(path: Path, rows: dict[str, Any]) -> None:
    """Write the rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)


def tables(rows: dict[str, Any]) -> Iterator[Table]:
    """The rows as people read them: what is kept, how good gradients are, how training went."""
    yield _bytes_table(rows)
    yield _sqnr_table(rows)
    yield _training_table(rows)


def _bytes_table(rows: dict[str, Any]) -> Table:
    table = _table("kept for the backward, MB", "model", "precision", "codegen", "eager", "plain", *FORMATS)
    for column in ("e4m3 / plain", "report / measured", "same for plain"):
        table.add_column(column, justify="right")
    for key, row, precision, found in _measurements(rows):
        plain, ours = found["plain"]["saved_bytes"], found["e4m3"]["saved_bytes"]
        report = found["e4m3"]["report"]
        table.add_row(
            key.split("/")[0],
            precision,
            row["codegen"],
            *(f"{found[way]['saved_bytes'] / 1e6:.2f}" for way in ("eager", "plain", *FORMATS)),
            f"{ours / plain:.2f}",
            f"{report['saved_bytes'] / ours:.3f}",
            f"{report['saved_bytes_plain'] / plain:.3f}",
        )
    return table


def _sqnr_table(rows: dict[str, Any]) -> Table:
    title = "worst gradient SQNR over parameters against float64, dB (median)"
    table = _table(title, "model", "precision", "codegen", "plain", *FORMATS)
    for column in ("e4m3 to plain", "int8 to plain", "worst parameter, e4m3", "zero in theory"):
        table.add_column(column, justify="right")
    for key, row, precision, found in _measurements(rows):
        table.add_row(
            key.split("/")[0],
            precision,
            row["codegen"],
            *(_sqnr_text(found[way]["sqnr"]) for way in ("plain", *FORMATS)),
            *(f"{found[fmt]['sqnr_to_plain']['worst_db']:.1f}" for fmt in ("e4m3", "int8")),
            found["e4m3"]["sqnr"]["worst_parameter"],
            str(len(found["without_gradient_in_theory"])),
        )
    return table


def _sqnr_text(found: dict[str, Any]) -> str:
    return f"{found['worst_db']:.1f} ({found['median_db']:.1f})"


def _training_table(rows: dict[str, Any]) -> Table:
    title = "loss of the last 5 steps, gap to the twin (mean over seeds +- standard error)"
    table = _table(title, "model", "codegen", "twin", "first", "last 5", *ARMS)
    for key, row in rows.items():
        found = row["training"]
        if found is None:
            continue
        table.add_row(
            key.split("/")[0],
            row["codegen"],
            "Inductor" if found["twin"] == "Inductor" else "eager graph",
            f"{found['twin_loss_first']:.3f}",
            f"{found['twin_loss_last5']:.3f}",
            *(_gap_text(found["gap_last5"].get(arm)) for arm in ARMS),
        )
    return table


def _gap_text(gap: dict[str, Any] | None) -> str:
    if gap is None:
        return "-"
    error = gap["standard_error"]
    return f"{gap['mean']:+.2%}" + (f" +- {error:.2%}" if error is not None else "")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        words = column in ("model", "precision", "codegen", "twin")
        table.add_column(column, justify="left" if words else "right")
    return table


def _measurements(rows: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    for key, row in rows.items():
        for precision, found in row["precisions"].items():
            yield key, row, precision, found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- command line


def _words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(allowed)}")
        return words

    return parse


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes, gradient SQNR and training of the model sweep.")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--models", type=_words(list(MODELS)), default=list(MODELS), help="comma-separated")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--twin", choices=("eager", "inductor"), help="codegen of the twin (as --codegen)")
    precisions = "comma-separated; training runs in the first"
    parser.add_argument("--precisions", type=_words(PRECISIONS), default=["amp"], help=precisions)
    parser.add_argument("--arms", type=_words(ARMS), default=["eager", "e4m3"], help="trained beside the twin")
    parser.add_argument("--seeds", type=int, default=3, help="0: no training")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, help="lower where rounding is amplified"
    )
    parser.add_argument("--reports", type=Path, help="a folder for the whole reports, as text and JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    global _bf16_in_fp32
    arguments = parse(words)
    warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
    _bf16_in_fp32 = bf16_products_in_fp32()
    rows: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.models:
        key = f"{name}/{arguments.codegen}"
        rows[key] = row_of(name, arguments, rows.get(key, {}))
        write(arguments.json, rows)
    console = Console(width=200) if not sys.stdout.isatty() else Console()
    for table in tables(rows):
        console.print(table, "")


if __name__ == "__main__":
    main()
