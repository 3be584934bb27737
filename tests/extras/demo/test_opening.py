"""What the demo says before it trains: what it will do, the probe's figures, an estimate; that it refuses hours of FP16."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from fp8compile.cli import main
from fp8compile.extras.demo import arms, fp16_cost, loop
from fp8compile.extras.demo import run as demo
from fp8compile.extras.demo.estimate import REPEATS, Estimate, clock, estimate
from fp8compile.extras.demo.fp16_cost import TooSlow, refuse_hours
from fp8compile.extras.demo.model import SIZES, build_model
from fp8compile.extras.demo.opening import time_text
from fp8compile.extras.demo.precision import PROBE_REPEATS, PROBE_TOKENS, Precision, choose_precision, decide, probe
from tests.support.demo import CPU, FP32, corpus, run_tiny, without_compilers

BATCH = 2048  # bytes of a step of size "cpu"


def fp16(fp32_s: float, fp16_s: float) -> Precision:
    return Precision(torch.float16, "FP16: a test", {"float32": fp32_s, "float16": fp16_s})


# --- the probe


@pytest.mark.parametrize(("bf16_s", "name"), [(1.5, "bfloat16"), (1.6, "float32")])
def test_fp32_only_where_far_faster(bf16_s: float, name: str) -> None:
    assert decide({"float32": 1.0, "bfloat16": bf16_s}).dtype is getattr(torch, name)


def test_the_line_says_which_number_is_which() -> None:
    slow = decide({"float32": 0.0172, "bfloat16": 0.1104}).why
    assert slow.startswith(
        f"FP32 is chosen: forward and backward of {PROBE_TOKENS} bytes take 17.2 ms in FP32, 110.4 ms in BF16 (medians of 5; "
    )
    assert slow.endswith("BF16 is chosen up to 1.5 times FP32's time")
    assert decide({"float32": 0.2, "bfloat16": 0.1}).why.startswith("BF16 is chosen: ")


def test_the_probe_takes_the_median_of_five_in_turns_after_one_that_warms_up() -> None:
    told: list[str] = []

    def steps(name: str, seconds: list[float]) -> Callable[[], float]:
        def step() -> float:
            told.append(name)
            return seconds[told.count(name) - 1]

        return step

    times = {"float32": [90.0, 5.0, 1.0, 4.0, 2.0, 3.0], "bfloat16": [70.0, 1.0, 1.0, 8.0, 9.0, 9.0]}
    found = probe({name: steps(name, seconds) for name, seconds in times.items()})
    assert found == {"float32": 3.0, "bfloat16": 8.0}
    assert told == ["float32", "bfloat16"] * (1 + PROBE_REPEATS)


@pytest.mark.parametrize(("asked", "timed"), [("auto", {"float32", "bfloat16"}), ("fp16", {"float32", "float16"})])
def test_a_cpu_is_timed_on_the_model_which_stays_as_it_is(asked: str, timed: set[str]) -> None:
    model = build_model(SIZES["tiny"], 0, CPU)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = choose_precision(model, CPU, asked)
    assert set(found.probe_seconds) == timed and all(s > 0 for s in found.probe_seconds.values())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert choose_precision(model, CPU, "bf16").probe_seconds == {}


# --- the estimate


def test_the_estimate_counts_steps_and_evaluations_of_every_run() -> None:
    """By its own figures: 20 steps and 6 evaluations of 2 batches, a third of a step each, for 2 arms and 3 seeds."""
    task = loop.Task(SIZES["tiny"], FP32, corpus(), CPU, steps=20)
    found = estimate(build_model(task.size, 0, CPU), task, ("inductor", "fp8compile"), seeds=3)
    assert found is not None
    assert found.seconds == pytest.approx(3 * 2 * (20 + 6 * 2 / 3) * found.step_s[torch.float32])


def test_arms_in_fp16_are_timed_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.dtype] = []

    def one(model: torch.nn.Module, tokens: torch.Tensor, task: loop.Task) -> float:
        timed.append(next(model.parameters()).dtype)
        return 0.5

    monkeypatch.setattr("fp8compile.extras.demo.estimate._timed", one)
    task = loop.Task(SIZES["tiny"], FP32, corpus(), CPU, steps=20)
    found = estimate(build_model(task.size, 0, CPU), task, arms.FP16_ARMS, seeds=1)
    assert timed == [torch.float32] * (1 + REPEATS) + [torch.float16] * (1 + REPEATS)
    assert found is not None and found.seconds == pytest.approx(7 * 24 * 0.5)


def test_what_is_estimated_says_so_and_what_it_is_made_from() -> None:
    text = time_text(Estimate(200.0, {torch.float32: 0.31}))
    assert text.startswith("about 3 min of training, an estimate: an uncompiled step takes 310 ms here")
    assert "310 ms in float32, 20000 ms in float16" in time_text(
        Estimate(200.0, {torch.float32: 0.31, torch.float16: 20})
    )
    assert "known after the first steps" in time_text(None)
    assert [clock(s) for s in (0.2, 40.0, 200.0, 9000.0)] == ["1 s", "40 s", "3 min", "2.5 h"]


@pytest.mark.parametrize("width", [60, 80])
def test_the_demo_says_first_what_it_will_do(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    said = Console(file=io.StringIO(), width=width)
    assert run_tiny(tmp_path, said, seeds=2) == 0
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    words = [line.split()[0] for line in text.splitlines() if line[:1].strip()]
    first = ["timing", "trains", "arms", "precision", "time", "disk", "network", "to", "warming", "inductor,"]
    assert words[: len(first)] == first
    flat = " ".join(text.split())
    for said_of in ("6 steps of 128 bytes for each, from each of 2 seeds", "an estimate", "MiB in", "Ctrl-C"):
        assert said_of in flat


# --- FP16 on a CPU without its arithmetic


def test_hours_are_refused_with_the_reason_and_the_ways_out() -> None:
    """Seven arms of 150 steps of 2048 bytes: 32 probes a step; the FP32 arm is cheap, six are not."""
    with pytest.raises(TooSlow) as refused:
        refuse_hours(fp16(0.017, 0.5), arms.FP16_ARMS, 150 * BATCH)
    message = str(refused.value)
    assert "about 4.0 h here (an estimate)" in message  # 150 * 32 * (6 * 0.5 + 0.017) s
    assert "17.0 ms in FP32, 500.0 ms in FP16" in message and "without FP16 arithmetic" in message
    assert all(way in message for way in ("a GPU", "--arms", "--steps", "--tiny", "--slow"))


@pytest.mark.parametrize(
    "measured",
    [
        fp16(0.004, 0.004),  # 150 * 32 * 7 * 0.004 s: two minutes
        Precision(torch.float16, "a GPU: nothing was timed", {}),
        Precision(torch.float32, "FP32", {"float32": 0.017, "bfloat16": 9.0}),
    ],
)
def test_what_is_fast_or_not_fp16_is_not_refused(measured: Precision) -> None:
    refuse_hours(measured, arms.FP16_ARMS, 150 * BATCH)


def test_a_cpu_that_is_slow_at_both_is_not_said_to_lack_fp16() -> None:
    with pytest.raises(TooSlow, match="This CPU is slow, or busy: "):
        refuse_hours(fp16(0.5, 0.5), arms.FP16_ARMS, 150 * BATCH)


@pytest.mark.parametrize(("steps", "refused"), [(74, False), (76, True)])
def test_what_is_slow_but_short_is_not_refused(steps: int, refused: bool) -> None:
    """One arm, half a second a probe, 32 probes a step: 75 steps are 20 minutes."""
    assert fp16_cost.LONG_S == 75 * 32 * 0.5
    try:
        refuse_hours(fp16(0.01, 0.5), ("histogram",), steps * BATCH)
    except TooSlow:
        assert refused
    else:
        assert not refused


@pytest.mark.parametrize("slow", [False, True])
def test_the_command_refuses_before_anything_is_trained(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []
    without_compilers(monkeypatch)
    monkeypatch.setattr(demo, "choose_precision", lambda model, device, asked: fp16(0.01, 3600.0))
    monkeypatch.setattr(demo, "train_in_turns", lambda runs, *rest: trained.extend(run.arm for run in runs))
    monkeypatch.chdir(tmp_path)
    line = ["demo", "--tiny", "--precision", "fp16", "--arms", "fp32,histogram", *(["--slow"] if slow else [])]
    assert main.main(line) == (0 if slow else 1)
    assert trained == (["fp32", "histogram"] if slow else [])
    error = capsys.readouterr().err
    assert error.startswith("fp8compile demo: error: --precision fp16 would take about") != slow
