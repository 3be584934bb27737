"""First contact: arms that fail, hang, die, lack a peer or memory cost themselves alone; a killed run goes on."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.first import facts, plan, runner
from benchmarks.first.plan import Arm
from tests.support.first_contact import command, ended, told

ENDS = {
    "trial fails": facts.FAILED,
    "trial hangs": facts.LATE,
    "trial hangs-timed": facts.LATE,
    "trial memory": facts.NO_MEMORY,
    "trial missing": facts.MISSING,
    "trial dies": facts.DIED,
}


def test_an_arm_costs_itself_alone(tmp_path: Path) -> None:
    """Good ones stand around the bad: all are timed, one after another, each in a line with device, versions and commit."""
    arms = ["trial fine", *ENDS, "trial fine 2"]
    began = time.monotonic()
    subprocess.run(
        command(tmp_path, "--slots", "4", "--compiling", "2", "--timed", "1", *arms), check=True, capture_output=True
    )
    assert time.monotonic() - began < 20
    assert ended(tmp_path) == {
        **{text.replace(" ", "-"): how for text, how in ENDS.items()},
        "trial-fine": facts.DONE,
        "trial-fine-2": facts.DONE,
    }
    assert all({"device", "versions", "commit"} <= set(fact) for fact in told(tmp_path))
    over = next(fact for fact in told(tmp_path) if fact["what"] == "over")
    assert over["not_reached"] == []


def test_arms_are_timed_alone_and_in_order(tmp_path: Path) -> None:
    arms = [f"trial slow {number}" for number in range(3)]
    subprocess.run(command(tmp_path, "--slots", "3", *arms), check=True, capture_output=True)
    begins = [(f["job"], f["began_at"]) for f in told(tmp_path) if f["what"] == "timed"]
    ends = [f["at"] for f in told(tmp_path) if f["what"] == "timed through"]
    assert [job for job, _ in begins] == [Arm.of(text).name for text in arms]
    assert all(end <= begin for end, (_, begin) in zip(ends[:-1], begins[1:], strict=True))


def test_a_killed_run_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    """Killed without a word, with one arm in the middle of being timed and a line cut in half."""
    arms = [f"trial slow {number}" for number in range(3)]
    run = subprocess.Popen(command(tmp_path, *arms), stdout=subprocess.DEVNULL)
    while "trial-slow-0" not in ended(tmp_path):
        time.sleep(0.02)
    group = children(run.pid)
    assert group
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() and running(pid) for pid in group):
        assert time.monotonic() < until, "an arm outlives its run"
        time.sleep(0.05)
    file = next(tmp_path.glob("*.jsonl"))
    file.write_text(file.read_text() + '{"job": "trial-slow-1", "wha')
    subprocess.run(command(tmp_path, *arms), check=True, capture_output=True)
    assert [fact["job"] for fact in told(tmp_path) if fact["what"] == facts.END] == [
        Arm.of(text).name for text in arms
    ]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_seconds_bound_a_run_and_what_is_cut_off_comes_next_time(tmp_path: Path) -> None:
    began = time.monotonic()
    arms = ["trial fine", "trial hangs", "trial hangs-timed"]
    subprocess.run(command(tmp_path, *arms, seconds=3), check=True, capture_output=True)
    assert time.monotonic() - began < 10
    over = next(fact for fact in told(tmp_path) if fact["what"] == "over")
    assert ended(tmp_path) == {"trial-fine": facts.DONE}
    assert over["not_reached"] == ["trial-hangs", "trial-hangs-timed"]


@pytest.mark.parametrize(("left", "late"), [(5.0, ["timed"]), (0.0, [])])
def test_an_arm_is_late_in_its_own_time_and_not_at_the_end_of_all(left: float, late: list[str]) -> None:
    found: list[str] = []
    run = SimpleNamespace(
        limits=SimpleNamespace(timed=0.0),
        _left=lambda: left,
        _late=lambda process, when, limit: found.append(when),
        _settle_the_done=lambda: None,
    )
    runner.Run._watched(run, SimpleNamespace(done=False), 0.0)  # type: ignore[arg-type]
    assert found == late


def test_a_run_that_is_told_to_end_writes_its_table(tmp_path: Path) -> None:
    """As ``timeout`` tells it."""
    run = subprocess.Popen(command(tmp_path, "trial fine", "trial hangs"), stdout=subprocess.DEVNULL)
    while not any(fact["what"] == "compiling" for fact in told(tmp_path)):
        time.sleep(0.02)
    run.terminate()
    assert run.wait(timeout=10) == 143
    assert any(fact["what"] == "over" for fact in told(tmp_path)) and list(tmp_path.glob("*.md"))


def test_again_runs_what_did_not_end_well(tmp_path: Path) -> None:
    arms = ["trial fine", "trial fails"]
    for words in ((), (), ("--again",)):
        subprocess.run(command(tmp_path, *words, *arms), check=True, capture_output=True)
    assert [f["arms"] for f in told(tmp_path) if f["what"] == "begun"] == [
        ["trial-fine", "trial-fails"],
        [],
        ["trial-fails"],
    ]


def test_arms_that_the_card_has_no_room_for_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 GiB for each set-up until it is compiled: two at a time on a card of 30."""
    started: list[str] = []

    class Busy:
        def __init__(self, arm: Arm, *_: object) -> None:
            self.arm, self.gib, self.busy = arm, arm.kind.compiling_gib, True
            started.append(arm.name)

    monkeypatch.setattr(runner, "Process", Busy)
    arms = plan.arms(["setup vit default", "setup gpt2 default", "setup llama default"])
    run = runner.Run(arms, runner.Limits(60, gib=30), tmp_path / "facts.jsonl", "cpu", True, {})
    run._start_some()
    assert started == ["setup-vit-default", "setup-gpt2-default"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("laier default 7b", "begin with one of card, layer"), ("LAYERS!ncu vit default", "NAME=VALUE before")],
)
def test_a_plan_is_read_with_care(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Arm.of(text)


def test_an_arm_has_one_name() -> None:
    assert Arm.of("LAYERS=2!ncu vit default").name == "ncu-vit-default-layers2"
    with pytest.raises(ValueError, match="twice"):
        plan.arms(["card", "card"])


@pytest.mark.parametrize(("name", "seconds"), [("first", 520), ("then", 240)])
def test_a_plan_fits_its_lease(name: str, seconds: float) -> None:
    """By the seconds that being timed took on an H200; compiling takes no more than its share."""
    texts: Sequence[str] = plan.PLANS[name]
    assert sum(arm.kind.seconds for arm in plan.arms(texts)) <= seconds


def test_a_line_cut_in_half_is_no_fact(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    facts.append(path, {"job": "a", "what": "end"})
    path.write_text(path.read_text() + '{"job": "b", "wh')
    facts.mended(path)
    facts.append(path, {"job": "c", "what": "end", "outcome": facts.FAILED})
    assert facts.outcomes(facts.read(path)) == {"a": facts.DONE, "c": facts.FAILED}
    assert json.loads(path.read_text().splitlines()[-1])["job"] == "c"


@pytest.mark.parametrize("kind", plan.KINDS)
def test_a_kind_has_its_module(kind: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.first.arms.{plan.KINDS[kind].module}") is not None
