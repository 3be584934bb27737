"""The demo's parts on toy sizes, uncompiled where the compiler is not the point; nothing here needs a GPU."""

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

from fp8compile.extras.demo import arms, compiling, loop
from fp8compile.extras.demo.data import Corpus, NoSource, is_held_out, load_corpus, train_batches, validation_batches
from fp8compile.extras.demo.eta import TimeLeft, time_left
from fp8compile.extras.demo.loss_curve import curve_steps, curve_table, running_mean
from fp8compile.extras.demo.model import BYTES_PER_PARAMETER, GIB, SIZES, build_model, large_card_bytes, rate_schedule
from fp8compile.extras.demo.progress import BarScreen, Screen, screen_for
from fp8compile.extras.demo.results import Evaluation, Results, Run, gap, gap_sentence, mean_of
from fp8compile.extras.demo.saved_bytes import saved_bytes_of_step
from fp8compile.extras.demo.table import summary
from fp8compile.tools.step_memory import UNHOOKED_ATTRIBUTE, saved_bytes
from tests.support.demo import CPU, FP32, documents, run_tiny, without_compilers
from tests.support.demo import corpus as the_corpus

FILES = {"report.txt", "report.json", "results.json", "loss.png", "saved_bytes.png"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return the_corpus()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)


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
    assert results["gap"] == {
        "per_seed": [0.0, 0.0],
        "mean": 0.0,
        "standard_error": 0.0,
        "limit": 0.003,
        "after_step": 6,
    }
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert "mean of 2 seeds" in text and "the report" in text
    assert json.loads((tmp_path / "report.json").read_text()) == {"saved_bytes": 7}


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
    compiled = compiling.compile_arm("fp8compile", model, {"debug.codegen": "eager", "saved.min_numel": 1})
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


@pytest.mark.parametrize(("taken", "steps"), [(300, [1, 75, 150, 225, 300]), (2, [1, 2]), (1, [1]), (0, [])])
def test_the_curve_has_the_first_step_and_every_quarter(taken: int, steps: list[int]) -> None:
    assert curve_steps(taken) == steps
    results = Results(SIZES["tiny"], FP32, 300, (0,), arms.ARMS[:2])
    results.runs = [Run(arm, 0, [float(k) for k in range(taken)], status="done") for arm in results.arms]
    table = curve_table(results)
    assert [c.header for c in table.columns] == ["train loss at", *(f"step {k}" if k == 1 else str(k) for k in steps)]
    assert list(table.columns[0].cells) == ["inductor", "fp8compile"]
    if taken == 300:  # the mean of the last twelve
        assert list(table.columns[-1].cells) == ["293.500"] * 2


@pytest.mark.parametrize("width", [60, 80, None])
def test_the_table_fits(width: int | None) -> None:
    results = Results(SIZES["cpu"], FP32, 300, (0, 1, 2), arms.ARMS[:2], "preset default", 97804292)
    for seed in results.seeds:
        for arm in results.arms:
            run = ended(arm, seed, 2.0049 + seed / 100)
            run.saved_bytes, run.peak_bytes, run.losses = 77832260, 12 * GIB, [5.5621] * 300
            results.runs.append(run)
    text = summary(results, width)
    _, table, curve, _ = text.split("\n\n")
    assert "+0.00% ± 0.00%" in table and max(map(len, (table + "\n" + curve).splitlines())) <= 60
    assert width is None or max(map(len, text.splitlines())) <= width


def test_the_large_size_needs_room_for_every_arm() -> None:
    size = SIZES["gpu"]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_model(size, 0, torch.device("meta")).parameters())
    assert large_card_bytes(1) == 20 * GIB
    assert large_card_bytes(3) == pytest.approx(20 * GIB + 2 * BYTES_PER_PARAMETER * parameters, rel=1e-4)


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
    with screen_for(Console(force_terminal=False, width=60), STEPS) as screen:
        assert type(screen) is Screen
        screen.begin(begun("inductor", 0))
        for steps in range(1, STEPS + 1):
            for arm in ("inductor", "fp8compile"):
                behind = begun("fp8compile", steps - (arm == "inductor"))
                runs = [begun("inductor", steps), behind]
                screen.step(runs, runs[arm == "fp8compile"], TimeLeft(83, at_least=True))
    assert capsys.readouterr().out.splitlines() == [
        "inductor, seed 0: compiling",
        "inductor, seed 0: first step after 21.0 s, loss 2.000",
        "fp8compile, seed 0: first step after 32.0 s, loss 2.000",
        "seed 0, step 10 of 10: loss inductor 2.000, fp8compile ",
        "2.000; time left at least 1:23",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_terminal_progress_is_a_bar_for_each_arm(width: int, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        console = Console(file=file, force_terminal=True, width=width, no_color=True)
        with screen_for(console, STEPS) as screen:
            assert isinstance(screen, BarScreen)
            runs = [begun("inductor", 7), begun("fp8compile", 3)]
            for run in runs:
                screen.begin(run)
            for run in runs:
                screen.step(runs, run, TimeLeft(3723, at_least=True))
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    for done, state in (("7/10", "loss 2.000  1000 ms"), ("3/10", "loss 2.000  2000 ms"), ("10/20", "1:02:03")):
        assert any(done in line and state in line for line in lines)
