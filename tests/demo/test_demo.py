"""The demo's parts on toy sizes, uncompiled where the compiler is not the point; nothing here needs a GPU."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from fp8compile.demo import arms, compiling, loop
from fp8compile.demo import run as demo
from fp8compile.demo.data import Corpus, NoSource, is_held_out, load_corpus, train_batches, validation_batches
from fp8compile.demo.eta import TimeLeft, time_left
from fp8compile.demo.model import SIZES, build_model, rate_schedule
from fp8compile.demo.plots import running_mean
from fp8compile.demo.precision import Precision, decide
from fp8compile.demo.progress import Screen, screen_for
from fp8compile.demo.results import Evaluation, Results, Run, gap, gap_sentence, mean_of
from fp8compile.demo.saved_bytes import UNHOOKED_ATTRIBUTE, saved_bytes, saved_bytes_of_step
from fp8compile.demo.table import summary

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, "FP32: a test", {})
FILES = {"report.txt", "report.json", "results.json", "loss.png", "saved_bytes.png"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def uncompiled(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm runs the eager model in FP32; fp8compile's has a report all the same."""

    def report_of(arm: str, compiled: Any) -> compiling.BackendReport | None:
        return compiling.BackendReport("the report", '{"saved_bytes": 7}', 7, 9) if arm == arms.OURS else None

    monkeypatch.setattr(demo, "load_corpus", lambda: corpus)
    monkeypatch.setattr(demo, "choose_precision", lambda model, device, asked: FP32)
    monkeypatch.setattr(compiling, "warm_up_compiler", lambda device: None)
    monkeypatch.setattr(compiling, "compile_arm", lambda arm, model, options: model)
    monkeypatch.setattr(compiling, "report_of", report_of)


def run_tiny(folder: Path, **options: Any) -> int:
    return demo.run_demo(demo.Options(out=folder, tiny=True, **options), Console(quiet=True))


def documents(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / "results.json").read_text()), (folder / "report.txt").read_text(encoding="utf-8")


# --- data


def test_split_is_by_file_disjoint_and_the_same_every_time(corpus: Corpus) -> None:
    train, held = set(corpus.train_files), set(corpus.validation_files)
    assert not train & held
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))
    assert 0.02 < len(held) / (len(held) + len(train)) < 0.10
    assert load_corpus().sha256 == corpus.sha256
    assert not any(part in name.split("/") for name in train | held for part in ("test", "site-packages", "idlelib"))


def test_text_is_the_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = [f"m{k}.py" for k in range(200)]
    for name in reversed(names):
        (tmp_path / name).write_bytes(name.encode() * 200)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_bytes(b"left out" * 1000)
    corpus = load_corpus(tmp_path)
    kept = sorted(n for n in names if not is_held_out(n))
    assert corpus.train_files == tuple(kept)
    assert bytes(corpus.train.tolist()) == b"".join(n.encode() * 200 + b"\0" for n in kept)


def test_no_source_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoSource, match="ships them"):
        load_corpus(tmp_path)


def test_batches_depend_on_the_seed_and_on_nothing_else(corpus: Corpus) -> None:
    def batches(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)  # the global generator must not matter
        return torch.stack(list(train_batches(corpus.train, batch=2, length=16, seed=seed, steps=3)))

    assert torch.equal(batches(5), batches(5))
    assert not torch.equal(batches(5), batches(6))
    assert batches(5).shape == (3, 2, 16) and batches(5).dtype == torch.int64
    assert int(batches(5).max()) < 256


def test_validation_windows_are_fixed_and_span_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    first, last = validation_batches(text, batch=2, length=10, windows=4)
    assert first[0].tolist() == list(range(10)) and last[-1].tolist() == list(range(90, 100))


# --- training


def test_equal_seeds_give_equal_models() -> None:
    a, b, c = (build_model(SIZES["tiny"], seed, CPU).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_rate_rises_then_falls_to_a_tenth() -> None:
    factor = rate_schedule(100)
    assert factor(0) == pytest.approx(1 / 20) and factor(19) == 1.0
    assert all(factor(k) >= factor(k + 1) for k in range(20, 99))
    assert factor(100) == pytest.approx(0.1)


def test_loop_learns_and_records(corpus: Corpus) -> None:
    task = loop.Task(SIZES["tiny"], FP32, corpus, CPU, steps=30)
    run, told = Run("eager", seed=0), []
    model = build_model(task.size, 0, CPU)
    loop.train(run, model, model, task, lambda: told.append(len(run.losses)))
    assert told == list(range(1, 31)) and len(run.step_seconds) == 30
    assert run.evaluations[0].step == 0 and run.evaluations[0].loss == pytest.approx(math.log(256), abs=0.3)
    assert run.validation_loss is not None and run.validation_loss < 4.0
    assert [e.step for e in run.evaluations] == [0, 6, 12, 18, 24, 30]
    assert run.saved_bytes is not None and run.saved_bytes > 0


def test_arms_that_compute_the_same_have_no_gap(tmp_path: Path, uncompiled: None) -> None:
    assert run_tiny(tmp_path, seeds=2) == 0
    results, text = documents(tmp_path)
    losses = {(run["arm"], run["seed"]): run["losses"] for run in results["runs"]}
    assert losses["inductor", 0] == losses["fp8compile", 0] != losses["fp8compile", 1]
    assert results["gap"] == {"per_seed": [0.0, 0.0], "mean": 0.0, "standard_error": 0.0, "limit": 0.003}
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert "mean of 2 seeds" in text and "the report" in text
    assert json.loads((tmp_path / "report.json").read_text()) == {"saved_bytes": 7}


@pytest.mark.parametrize("calls", [0, 9])
def test_ctrl_c_keeps_what_was_measured(
    calls: int, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(calls, KeyboardInterrupt(), monkeypatch)
    assert run_tiny(tmp_path) == 130
    results, text = documents(tmp_path)
    assert text.startswith("INTERRUPTED") and results["interrupted"]
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert [len(run["losses"]) for run in results["runs"]] == ([calls] if calls < 6 else [6, calls - 6])
    assert results["runs"][-1]["status"] == "interrupted" and results["gap"]["mean"] is None


def test_an_arm_that_fails_leaves_the_others_and_its_traceback(
    tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(8, RuntimeError("no such kernel"), monkeypatch)
    assert run_tiny(tmp_path, arms=("inductor", "fp8compile", "eager")) == 1
    results, text = documents(tmp_path)
    assert [run["status"] for run in results["runs"]] == [
        "done",
        "failed: RuntimeError: no such kernel",
        "done",
    ]
    assert "Traceback" in text


def interrupt_after(calls: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """``error`` once, instead of training step number ``calls``."""
    step, count = loop.train_step, [0]

    def stub(*args: Any) -> float:
        count[0] += 1
        if count[0] == calls + 1:
            raise error
        return step(*args)

    monkeypatch.setattr(loop, "train_step", stub)


# --- saved bytes


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    x, weight = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        y = (x @ weight).exp()  # keeps x, and exp's result
        return (y * y.view(8, 4)).sum()  # keeps that result again

    assert saved_bytes(forward, [weight]) == (x.numel() + 32) * 4
    assert saved_bytes(forward, [weight, x]) == 32 * 4


def test_saved_bytes_sees_what_hooks_do_not() -> None:
    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            setattr(ctx, UNHOOKED_ATTRIBUTE, [torch.zeros(10)])
            return x.clone()

    x = torch.ones(3, requires_grad=True)
    assert saved_bytes(lambda: Stash.apply(x).sum(), [x]) == 40


def test_measured_and_reported_bytes_agree_and_are_fewer_than_plain() -> None:
    torch._dynamo.reset()
    size = SIZES["tiny"]
    model = build_model(size, 0, CPU)
    compiled = compiling.compile_arm("fp8compile", model, {"codegen": "eager", "min_saved_numel": 1})
    tokens = torch.arange(size.tokens_per_step).reshape(size.batch, size.length)
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    report = compiling.report_of("fp8compile", compiled)
    assert report is not None and json.loads(report.json)
    assert saved_bytes_of_step(compiled, model, tokens) == report.saved_bytes < report.saved_bytes_plain


# --- results


def ended(arm: str, seed: int, loss: float) -> Run:
    return Run(arm, seed, [loss], [1.0, 0.5], [Evaluation(1, loss, 0.1)], status="done")


def test_gap_and_standard_error() -> None:
    assert gap(2.02, 2.0) == pytest.approx(0.01)
    mean = mean_of([0.01, 0.02, None, 0.06])
    assert mean is not None and mean.n == 3
    assert mean.mean == pytest.approx(0.03)
    assert mean.error == pytest.approx(math.sqrt((0.02**2 + 0.01**2 + 0.03**2) / 2) / math.sqrt(3))
    assert mean_of([None]) is None
    single = mean_of([0.01])
    assert single is not None and single.error is None


def test_gaps_pair_runs_of_one_seed() -> None:
    results = Results(SIZES["tiny"], FP32, 1, (0, 1, 2), arms.ARMS[:2])
    results.runs = [ended("inductor", 0, 2.0), ended("fp8compile", 0, 2.002), ended("inductor", 1, 4.0)]
    assert results.gaps() == [pytest.approx(0.001)]
    results.runs += [ended("fp8compile", 1, 4.04), ended("inductor", 2, 1.0)]
    assert results.gaps() == [pytest.approx(0.001), pytest.approx(0.01)]
    assert "+0.55% from" in gap_sentence(results) and "over the limit" in gap_sentence(results)
    assert "± 0.45%" in summary(results)


def test_compile_time_is_the_first_step_less_a_median_one() -> None:
    run = Run("inductor", 0, step_seconds=[10.0, 1.0, 3.0, 1.0])
    assert run.compile_s == 9.0 and run.median_step_s == 1.0
    assert Run("inductor", 0, step_seconds=[10.0]).compile_s is None


def test_running_mean() -> None:
    assert running_mean([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]


@pytest.mark.parametrize(("bf16_s", "name"), [(1.5, "bfloat16"), (1.6, "float32")])
def test_fp32_only_where_far_faster(bf16_s: float, name: str) -> None:
    assert decide(1.0, bf16_s).dtype is getattr(torch, name)


# --- the time left

COSTS = {
    "inductor": (20.0, 1.0),
    "fp8compile": (30.0, 2.0),
    "eager": (0.0, 3.0),
}  # seconds to compile, of a step
STEPS, EVALUATION_S = 10, 4.0


def begun(arm: str, steps: int) -> Run:
    """A run after ``steps`` steps and both of its evaluations due by then."""
    compile_s, step_s = COSTS[arm]
    seconds = [compile_s + step_s, *[step_s] * (steps - 1)] if steps else []
    evaluations = [Evaluation(k, 2.0, EVALUATION_S) for k in (0, STEPS) if k <= steps]
    return Run(arm, 0, [2.0] * steps, seconds, evaluations, status="done" if steps == STEPS else "running")


def truth(plan: list[str], runs: list[Run]) -> float:
    """What the rest really takes."""
    spent = sum(sum(run.step_seconds) + EVALUATION_S * len(run.evaluations) for run in runs)
    return sum(sum(COSTS[arm]) + (STEPS - 1) * COSTS[arm][1] + 2 * EVALUATION_S for arm in plan) - spent


def test_nothing_is_claimed_before_the_second_step() -> None:
    assert time_left(["inductor"], [begun("inductor", 1)], STEPS, 2) is None


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_arms_not_timed_make_it_a_lower_bound(steps: int) -> None:
    plan, runs = ["inductor", "fp8compile"], [begun("inductor", steps)]
    left = time_left(plan, runs, STEPS, 2)
    assert left is not None and left.at_least
    assert 0 < left.seconds <= truth(plan, runs)
    assert left.seconds >= COSTS["inductor"][0] + STEPS * COSTS["inductor"][1]


@pytest.mark.parametrize("steps", [2, 9, 10])
def test_exact_once_every_arm_was_timed(steps: int) -> None:
    plan = ["inductor", "fp8compile"] * 2
    runs = [begun("inductor", STEPS), begun("fp8compile", steps)]
    left = time_left(plan, runs, STEPS, 2)
    assert left is not None and not left.at_least
    assert left.seconds == pytest.approx(truth(plan, runs))


def test_a_run_that_failed_takes_no_more_time() -> None:
    failed = begun("fp8compile", 3)
    failed.status = "failed: x"
    left = time_left(["inductor", "fp8compile"], [begun("inductor", STEPS), failed], STEPS, 2)
    assert left == TimeLeft(0.0, at_least=False)


def test_time_left_reads_as_a_clock() -> None:
    assert str(TimeLeft(83.4, at_least=False)) == "1:23"
    assert str(TimeLeft(3605, at_least=True)) == "at least 1:00:05"


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with screen_for(Console(force_terminal=False, width=80), STEPS, 100) as screen:
        assert type(screen) is Screen
        for steps in range(1, STEPS + 1):
            screen.step(begun("inductor", steps), TimeLeft(steps, at_least=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("inductor   seed 0: step 1/10  loss 2.000  -- tokens/s")
    assert lines[1].endswith("100 tokens/s  time left at least 0:10")


def test_on_a_terminal_progress_is_a_bar(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        console = Console(file=file, force_terminal=True, width=120)
        with screen_for(console, STEPS, 100) as screen:
            screen.begin(begun("inductor", 0))
            screen.step(begun("inductor", 7), TimeLeft(83, at_least=False))
    written = (tmp_path / "out").read_text(encoding="utf-8")
    assert "7/10" in written and "time left 1:23" in written


def test_a_reader_of_the_output_that_is_gone_is_told_to_the_caller() -> None:
    """By default rich ends the process with 1; the command line has another exit code for it."""
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), os.fdopen(write, "w") as output:
        demo.DemoConsole(file=output).print("a line")
