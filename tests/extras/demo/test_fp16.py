"""The demo in FP16: its arms, when a run has diverged, what it leaves; and that a histogram's scale survives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import fp8compile.amp
from benchmarks.studies import bench_loss_scaling as bench
from fp8compile.extras.demo import arms, compiling, loop
from fp8compile.extras.demo import loss_scales as scaling
from fp8compile.extras.demo import run as demo
from fp8compile.extras.demo.data import Corpus
from fp8compile.extras.demo.eta import time_left
from fp8compile.extras.demo.loss_scales import DivergenceError, Ends, course, made_progress, power_text
from fp8compile.extras.demo.model import SIZES, build_model, build_optimizer, warm_up_steps
from fp8compile.extras.demo.precision import PURE_FP16, Precision
from fp8compile.extras.demo.results import Evaluation, Results, Run
from fp8compile.extras.demo.table import summary
from tests.support.demo import corpus as the_corpus
from tests.support.demo import interrupt_after

CPU = torch.device("cpu")
FP16 = Precision(torch.float16, PURE_FP16, {})
FILES = {"report.txt", "report.json", "results.json", "loss.png", "loss_scale.png"}
STEPS = 30


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return the_corpus()


@pytest.fixture
def uncompiled(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm runs the eager model; the optimizer too."""
    monkeypatch.setattr(demo, "load_corpus", the_corpus)
    monkeypatch.setattr(compiling, "warm_up_compiler", lambda device: None)
    monkeypatch.setattr(compiling, "compile_arm", lambda arm, model, options: model)
    monkeypatch.setattr(compiling, "report_of", lambda arm, compiled: None)
    monkeypatch.setattr(loop, "build_optimizer", lambda model, rate: build_optimizer(model, rate, compiled=False))


def run_tiny(folder: Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    code = demo.run_demo(demo.DemoOptions(out=folder, tiny=True, precision="fp16", **options), Console(quiet=True))
    text = (folder / "report.txt").read_text(encoding="utf-8")
    return code, json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail), text


# --- arms


def test_every_arm_runs_and_leaves_its_scale(tmp_path: Path, uncompiled: None) -> None:
    code, results, text = run_tiny(tmp_path, steps=STEPS)
    runs = {run["arm"]: run for run in results["runs"]}
    assert code == 0 and tuple(runs) == arms.FP16_ARMS
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert "scales" not in runs["fp32"]
    for arm, scale in arms.STATIC.items():
        assert runs[arm]["scales"] == [scale] * STEPS
    assert runs["dynamic"]["scales"][0] == 2.0**16
    assert len(set(runs["histogram"]["scales"])) > 4, "it looks for its scale"
    assert runs["histogram"]["diverged"] == "" and runs["histogram"]["skipped"] == 0
    assert runs["static 2^22"]["skipped"] == STEPS
    assert runs["static 2^22"]["diverged"] == "diverged: no progress by the end"
    assert "static 2^22, seed 0: diverged: no progress by the end" in text


def test_arms_are_fp16_throughout_and_begin_alike() -> None:
    whole = build_model(SIZES["tiny"], 0, CPU)
    model = build_model(SIZES["tiny"], 0, CPU).to(compiling.dtype_of("histogram"))
    assert compiling.dtype_of("fp32") == torch.float32
    assert all(torch.equal(p, q.half()) for p, q in zip(model.parameters(), whole.parameters(), strict=True))
    optimizer = build_optimizer(model, 1e-3, compiled=False)
    dtypes = set()
    model.lm_head.register_full_backward_hook(lambda module, into, out: dtypes.update((into[0].dtype, out[0].dtype)))
    tokens = torch.randint(256, (2, 16))
    task = loop.Task(SIZES["tiny"], FP16, None, CPU, 1)  # type: ignore[arg-type]
    loop.train_step(model, model, tokens, optimizer, task, scaling.scaler_for("histogram"))
    assert dtypes == {torch.float16}
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {t.dtype for s in optimizer.state.values() for k, t in s.items() if k.startswith("exp")} == {torch.float32}


@pytest.mark.parametrize("arm", arms.SCALED_ARMS)
def test_the_scaler_of_an_arm(arm: str) -> None:
    scaler = scaling.scaler_for(arm)
    assert isinstance(scaler, fp8compile.amp.LossScaler)
    assert scaler.mode == arm.split()[0]
    assert scaler.get_scale() == arms.STATIC.get(arm, 2.0**16 if arm == arms.DYNAMIC else 1.0)


# --- divergence


@pytest.mark.parametrize(
    ("start", "end", "reference", "fine"),
    [
        (5.0, 4.79, Ends(5.0, 3.0), True),  # a tenth of 2.0 is 0.2
        (5.0, 4.81, Ends(5.0, 3.0), False),
        (5.0, math.nan, Ends(5.0, 3.0), False),
        (5.0, math.inf, None, False),
        (5.0, 4.99, None, True),
        (5.0, 5.0, None, False),
    ],
)
def test_progress_is_a_tenth_of_the_reference(start: float, end: float, reference: Ends | None, fine: bool) -> None:
    assert made_progress(Ends(start, end), reference) is fine


@pytest.mark.parametrize("call", ["loss", "parameter", "collapse"])
def test_a_run_that_diverges_stops_and_says_so(
    call: str, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at_step(4, call, monkeypatch)
    code, results, text = run_tiny(tmp_path, steps=10, arms=("fp32", "histogram", "dynamic"))
    broken = results["runs"][1]
    assert code == 0 and broken["status"].startswith("diverged at step 4: "), broken["status"]
    assert len(broken["losses"]) in (3, 4) and broken["diverged"] == broken["status"]
    assert [run["status"] for run in results["runs"]][2] == "done"
    assert f"histogram, seed 0: {broken['status']}" in text and "step 4" in text


def break_at_step(number: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the histogram's run: a loss or parameter that is not finite, or a collapse, at that step."""
    step, count = loop.train_step, [0]

    def stub(model: torch.nn.Module, *rest: Any) -> float:
        loss = step(model, *rest)
        scaler = rest[-1]
        count[0] += scaler is not None and scaler.mode == "histogram"
        if count[0] != number or scaler is None or scaler.mode != "histogram":
            return loss
        if what == "collapse":
            raise DivergenceError("the loss scale collapsed to 1")
        next(iter(model.parameters())).data.fill_(math.nan)
        return math.nan if what == "loss" else loss

    monkeypatch.setattr(loop, "train_step", stub)


def test_a_collapse_is_a_divergence() -> None:
    class Collapsing:
        def __init__(self, where: str) -> None:
            self.where = where

        def step(self, optimizer: object) -> None:
            self._collapse("step")

        def update(self) -> None:
            self._collapse("update")

        def _collapse(self, where: str) -> None:
            if where == self.where:
                raise fp8compile.amp.LossScaleCollapse("too low", 7, 2.0, [], "")

    for where in ("step", "update"):
        with pytest.raises(DivergenceError, match="collapsed to 2"):
            scaling._step(Collapsing(where), None)  # type: ignore[arg-type]


def test_without_a_reference_any_progress_will_do() -> None:
    results = Results(SIZES["tiny"], FP16, 1, (0,), ("histogram",))
    results.runs = [ended("histogram", 5.0, 4.9)]
    assert results.divergence(results.runs[0]) == ""
    results.runs = [ended("histogram", 5.0, 4.9), ended("fp32", 5.0, 3.0)]
    assert "no progress" in str(results.divergence(results.runs[0]))


def ended(arm: str, start: float, end: float, seed: int = 0, scales: tuple[float, ...] = ()) -> Run:
    evaluations = [Evaluation(0, start, 0.1), Evaluation(1, end, 0.1)]
    return Run(arm, seed, [end], [1.0, 0.5], evaluations, scales=list(scales), status="done")


# --- the table and the rest


def test_course_of_a_scale() -> None:
    found = course([1.0, 2.0, 4.0, 8.0, 4.0, 8.0, 16.0, 32.0], warm_up=2)
    assert found == scaling.Course(4.0, 32.0, 16.0, 3 / 4) and found.factor == 8.0
    assert course([1.0], warm_up=1) is None
    rising = course([1.0, 2.0, 4.0, 8.0, 4.0, 8.0], warm_up=2)
    assert rising is not None and (rising.lowest, rising.highest) == (4.0, 8.0) and rising.within_4 == 1.0
    assert course([4.0, 4.0], warm_up=0) == scaling.Course(4.0, 4.0, 4.0, 1.0)
    assert [power_text(x) for x in (1.0, 2.0**15, 2.0**-3, 1000.0)] == ["2^0", "2^15", "2^-3", "1e+03"]


def test_the_table_counts_seeds_and_leaves_diverged_losses_out() -> None:
    results = Results(SIZES["tiny"], FP16, 10, (0, 1), ("fp32", "histogram"))
    results.runs = [ended("fp32", 5.0, 2.0, seed) for seed in (0, 1)]
    scales = (1.0, 2.0**15, 2.0**14, 2.0**15)
    results.runs += [ended("histogram", 5.0, end, seed, scales) for seed, end in enumerate((2.1, 4.9))]
    text = summary(results)
    losses, scale, curve = (line for line in text.splitlines() if line.startswith("histogram "))
    assert losses.split() == ["histogram", "2.1000", "2.1000", "+5.00%", "1", "of", "2"]
    assert scale.split()[:6] == ["histogram", "0", "2^15", "2^14", "to", "2^15"] and curve.endswith(" 2.100")
    assert "within a factor 2 after the warm-up" in text
    assert warm_up_steps(10) == 2


def test_arms_that_find_compiled_code_are_not_charged_for_compiling() -> None:
    plan, done = ["fp32", "static 1", "dynamic", "histogram"], Run("fp32", 0, [2.0] * 10, [21.0] + [1.0] * 9)
    done.status = "done"
    left = time_left(plan, [done], 10, 0)
    assert left is not None and left.at_least and left.seconds == pytest.approx(20 + 30)
    first, second = (
        Run(arm, 0, [2.0] * 10, [s] + [1.0] * 9, status="done") for arm, s in (("static 1", 61), ("dynamic", 4))
    )
    assert time_left(plan, [done, first], 10, 0).seconds == pytest.approx(20)  # type: ignore[union-attr]
    assert time_left(plan, [done, first, second], 10, 0).seconds == pytest.approx(10 + 3)  # type: ignore[union-attr]


def test_ctrl_c_keeps_scales_and_compares_at_the_common_step(
    tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2 * 1 + 5 + 3, KeyboardInterrupt(), monkeypatch)  # the second block begins with the last arm
    code, results, text = run_tiny(tmp_path, steps=20, arms=("fp32", "histogram"))
    assert code == demo.INTERRUPTED and text.startswith("INTERRUPTED at step 4 of 20")
    assert results["runs"][1]["scales"] == [1.0, 2.0, 4.0, 8.0] and {p.name for p in tmp_path.iterdir()} == FILES
    assert [len(run["losses"]) for run in results["runs"]] == [4, 4]
    row = next(line for line in text.splitlines() if line.startswith("histogram "))
    assert row.split()[1] == f"{results['runs'][1]['train_loss']:.4f}"


# --- the benchmark


def test_the_benchmark_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []

    def run_row(arm: str, seed: int, models: Any, steps: int) -> dict[str, Any]:
        told.append((arm, seed))
        failed = arm == "dynamic" and len(told) < 4
        row = {"status": "failed: no kernel" if failed else "done", "start": 5.0, "end": None if failed else 3.0}
        return row | {"accuracy": 0.5, "skipped": 0, "scales": [1.0] * steps, "losses": [4.0], "seconds": 1.0}

    monkeypatch.setattr(bench, "run_row", run_row)
    line = ["--quick", "--tasks", "llama", "--arms", "fp32,histogram,dynamic", "--json", str(tmp_path / "x.json")]
    found = bench.main([*line, "--seeds", "1"])
    assert told == [("fp32", 0), ("histogram", 0), ("dynamic", 0)]
    assert found["tasks"]["llama"]["summary"]["dynamic"]["failed"] == 1
    found = bench.main([*line, "--seeds", "2"])
    assert told[3:] == [("dynamic", 0), ("fp32", 1), ("histogram", 1), ("dynamic", 1)], "what failed is tried again"
    assert found["tasks"]["llama"]["summary"]["dynamic"]["failed"] == 0
    assert list(found["tasks"]["llama"]["runs"]) == ["fp32", "dynamic", "histogram"]
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize("arm", ["fp32", "static 2^22", "histogram"])
def test_a_run_of_the_benchmark(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_arm", lambda arm, model, options: model)
    row = bench.run_row(arm, 0, bench.Models(bench.TRAININGS["llama"], compiled=False), 3)
    assert row["status"] == "done" and len(row["losses"]) == 3 and row["accuracy"] < 0.5
    assert row["scales"] == {"fp32": [], "static 2^22": [2.0**22] * 3, "histogram": [1.0, 2.0, 4.0]}[arm]
    assert row["skipped"] == (3 if arm == "static 2^22" else 0)
    assert (row["end"] < row["start"] - 0.5) == (arm != "static 2^22")


def test_a_run_that_cannot_be_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*args: Any) -> Any:
        raise RuntimeError('"conv" not implemented for Half\nmore')

    monkeypatch.setattr(bench, "run", no_kernel)
    row = bench.run_row("dynamic", 0, bench.Models(bench.TRAININGS["llama"], compiled=False), 1)
    assert row["status"] == 'failed: RuntimeError: "conv" not implemented for Half'
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("seed", range(3))
def test_histogram_converges_where_the_largest_static_scale_does_not(
    seed: int, corpus: Corpus, uncompiled: None
) -> None:
    """``make nightly`` does the same with ten seeds, at the benchmark's size, through the compiler."""
    task = loop.Task(SIZES["tiny"], FP16, corpus, CPU, STEPS)
    results = Results(task.size, FP16, STEPS, (seed,), ("fp32", "static 2^22", "histogram"))
    for arm in results.arms:
        run = Run(arm, seed)
        model = build_model(task.size, seed, CPU).to(compiling.dtype_of(arm))
        loop.train(run, model, model, task, lambda: None)
        run.status = "done"
        results.runs.append(run)
    assert [results.divergence(run) for run in results.runs] == ["", "diverged: no progress by the end", ""]
    histogram = results.of("histogram")[0]
    assert histogram.skipped == 0 and abs(results.gaps("histogram")[0]) < 0.05
    assert 2.0**10 <= histogram.scales[-1] <= 2.0**18


def test_how_far_gradients_move_is_told_from_end_to_end_and_as_a_trend() -> None:
    noisy = [1.0, 4.0] * bench.WINDOW + [2.0, 8.0] * bench.WINDOW  # medians over 20 steps: 2.5, 2.5, 5, 5
    found = bench._gradient([noisy, [3.0] * len(noisy), [1.0], [0.0] * len(noisy)])
    assert found == {"least_factor": 1.0, "largest_factor": 8.0, "largest_factor_of_medians": 2.0}
