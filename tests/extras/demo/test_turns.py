"""Arms in turns: alone and side by side they train alike, bit for bit, and an interruption finds them at the same step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from fp8compile.extras.demo import compiling, loop
from fp8compile.extras.demo import run as demo
from fp8compile.extras.demo.memory import ArmMemory
from fp8compile.extras.demo.model import SIZES, build_model, build_optimizer
from fp8compile.extras.demo.precision import Precision
from fp8compile.extras.demo.results import Evaluation, Run
from fp8compile.extras.demo.turns import BLOCK, blocks, cut_to_common_step, train_in_turns
from tests.support.demo import CPU, FP32, corpus, documents, interrupt_after, run_tiny, without_compilers

FILES = {"report.txt", "report.json", "results.json", "loss.png", "saved_bytes.png"}
QUICK = {"debug.codegen": "eager", "saved.min_numel": 1}  # fp8compile's rewritten graph, without Inductor's kernels


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)


class Order:
    """Which arm took each step."""

    def __init__(self) -> None:
        self.arms: list[str] = []

    def begins(self, run: Run) -> None: ...
    def stopped(self, run: Run) -> None: ...
    def stepped(self, run: Run) -> None:
        self.arms.append(run.arm)


def in_turns(names: tuple[str, ...], steps: int, precision: Precision = FP32) -> tuple[list[Run], list[str]]:
    """The runs of these arms from seed 0 beside each other, and the arm of each step."""
    runs, order = [Run(arm, 0) for arm in names], Order()
    train_in_turns(runs, loop.Task(SIZES["tiny"], precision, corpus(), CPU, steps), QUICK, order)
    return runs, order.arms


# --- turns


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 300])
def test_blocks_are_short_and_together_all_steps(steps: int) -> None:
    lengths = list(blocks(steps))
    assert sum(lengths) == steps and lengths[0] == 1 and max(lengths) <= BLOCK


def test_the_order_turns_round_with_every_block(uncompiled: None) -> None:
    runs, order = in_turns(("inductor", "fp8compile"), steps=1 + BLOCK + 2)
    first, second = ["inductor"], ["fp8compile"]
    assert order == first + second + BLOCK * second + BLOCK * first + 2 * first + 2 * second
    assert {run.status for run in runs} == {"done"}


def test_an_arm_that_fails_leaves_the_others_and_its_traceback(
    tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(1, RuntimeError("no such kernel"), monkeypatch)
    assert run_tiny(tmp_path, arms=("inductor", "fp8compile", "eager")) == 1
    results, text = documents(tmp_path)
    assert [run["status"] for run in results["runs"]] == ["done", "failed: RuntimeError: no such kernel", "done"]
    assert [len(run["losses"]) for run in results["runs"]] == [6, 0, 6]
    assert "Traceback" in text


# --- alone and side by side


@pytest.mark.sweep  # in CI: the arms of --precision fp16, below
def test_an_arm_trains_alike_alone_and_beside_others() -> None:
    """Compiled: Inductor's arm and ours share a process, a code object and nothing else."""
    together, _ = in_turns(("inductor", "fp8compile", "eager"), steps=8)
    assert [run.status for run in together] == ["done"] * 3, [run.traceback for run in together]
    for run in together:
        ((alone,), _) = in_turns((run.arm,), steps=8)
        assert run.losses == alone.losses
        assert [e.loss for e in run.evaluations] == [e.loss for e in alone.evaluations]
        assert run.saved_bytes == alone.saved_bytes
    assert len({tuple(run.losses) for run in together}) == 3, "three arms, three roundings: they are not one code"
    inductor, ours, _ = together
    assert ours.report is not None and ours.saved_bytes == ours.report.saved_bytes
    assert ours.report.saved_bytes_plain == inductor.saved_bytes


def test_arms_that_scale_the_loss_train_alike_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    monkeypatch.setattr(loop, "build_optimizer", lambda model, rate: build_optimizer(model, rate, compiled=False))
    fp16 = Precision(torch.float16, "FP16: a test", {})
    together, _ = in_turns(("fp32", "static 2^22", "dynamic", "histogram"), steps=12, precision=fp16)
    for run in together:
        ((alone,), _) = in_turns((run.arm,), steps=12, precision=fp16)
        assert (run.losses, run.scales, run.skipped_steps) == (alone.losses, alone.scales, alone.skipped_steps)
    assert together[1].skipped == 12 and len(set(together[3].scales)) > 4


# --- interruption


@pytest.mark.parametrize("arm_of_the_last_step", ["inductor", "fp8compile"])
def test_an_interruption_finds_all_arms_at_the_same_step(
    arm_of_the_last_step: str, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At about 30 % of 2 x 50 steps: once inside the first arm's block, once inside the second's."""
    both_have = 1 + 3 * BLOCK  # the fifth block is taken in the first's order: inductor begins
    taken = 2 * both_have + (3 if arm_of_the_last_step == "inductor" else BLOCK + 3)
    interrupt_after(taken, KeyboardInterrupt(), monkeypatch)
    assert run_tiny(tmp_path, steps=50) == 130
    step = both_have if arm_of_the_last_step == "inductor" else both_have + 3
    results, text = documents(tmp_path)
    first, second = results["runs"]
    assert len(first["losses"]) == len(second["losses"]) == step
    assert len(first["step_seconds"]) == len(second["step_seconds"]) == step
    assert first["losses"] == second["losses"], "equal arms at equal steps"
    assert [e["step"] for e in first["evaluations"]] == [e["step"] for e in second["evaluations"]] == [0, 10]
    assert results["interrupted"] and results["interrupted_at"] == step
    assert results["gap"]["per_seed"] == [0.0] and results["gap"]["after_step"] == 10
    assert text.startswith(f"INTERRUPTED at step {step} of 50: all arms have taken it, and are compared there; ")
    assert "those after step 10" in text and "the limit of +0.3% is for a training to its end" in text
    assert {p.name for p in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("calls", [0, 1])
def test_an_interruption_before_all_have_begun_leaves_nothing_to_compare(
    calls: int, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(calls, KeyboardInterrupt(), monkeypatch)
    assert run_tiny(tmp_path) == 130
    results, text = documents(tmp_path)
    assert [run["status"] for run in results["runs"]] == ["interrupted"] * 2
    assert [run["losses"] for run in results["runs"]] == [[], []] and results["gap"]["mean"] is None
    assert text.startswith("INTERRUPTED before every arm had taken its first step: there is nothing to compare\n")
    assert {p.name for p in tmp_path.iterdir()} == FILES


def test_an_interruption_in_a_later_seed_leaves_the_gap_to_those_before(
    tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2 * 6 + 2 * 1 + 3, KeyboardInterrupt(), monkeypatch)
    assert run_tiny(tmp_path, seeds=2) == 130
    results, text = documents(tmp_path)
    assert [len(run["losses"]) for run in results["runs"]] == [6, 6, 1, 1]
    assert results["gap"]["per_seed"] == [0.0] and results["gap"]["after_step"] == 6
    assert text.startswith("INTERRUPTED in seed 1, at step 1 of 6: losses are of the seeds before it")
    row = next(line for line in text.splitlines() if line.startswith("train loss  "))
    assert f"{results['runs'][0]['train_loss']:.4f}" in row, "a loss after one step is no part of the mean"


def test_sigterm_does_what_ctrl_c_does(tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before, step, count = signal.getsignal(signal.SIGTERM), loop.train_step, [0]

    def stub(*args: Any) -> float:
        count[0] += 1
        if count[0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    monkeypatch.setattr(loop, "train_step", stub)
    assert run_tiny(tmp_path) == demo.INTERRUPTED
    assert documents(tmp_path)[0]["interrupted"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cut_drops_what_one_arm_lacks() -> None:
    longer = Run("histogram", 0, [3.0, 2.0, 1.0], [9.0, 1.0, 1.0], [Evaluation(k, 2.0, 0.1) for k in (0, 2, 3)])
    longer.scales, longer.skipped_steps = [1.0, 2.0, 4.0, 8.0], [1, 3]
    shorter = Run("fp32", 0, [3.0, 2.0], [9.0, 1.0], [Evaluation(0, 2.0, 0.1)])
    cut_to_common_step([longer, shorter])
    assert (longer.losses, longer.step_seconds, longer.scales) == ([3.0, 2.0], [9.0, 1.0], [1.0, 2.0])
    assert longer.skipped == 1 and [e.step for e in longer.evaluations] == [0]
    cut_to_common_step([])


# --- memory


def test_an_arms_memory_is_counted_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by hand, a GPU by a stand-in: another arm holds 1000, ours 100 and then 130, its steps reach 700 and 500 more."""
    allocated, peak = [1000], [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, allocated[0]))
    memory = ArmMemory(torch.device("cuda"))
    with memory.counted():
        allocated[0] += 100
    assert (memory.held, memory.peak) == (100, None)
    allocated[0] += 5000  # the other arm's turn
    for more, kept in ((700, 30), (500, 0)):
        with memory.counted(a_step=True):
            peak[0] = allocated[0] + more
            allocated[0] += kept
    assert (memory.held, memory.peak) == (130, 800)


def test_models_of_all_arms_begin_alike() -> None:
    """The second is built after the first was trained: what is drawn depends on the seed alone."""
    first = build_model(SIZES["tiny"], 3, CPU)
    torch.rand(5)
    second = build_model(SIZES["tiny"], 3, CPU).to(compiling.dtype_of("fp32"))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
