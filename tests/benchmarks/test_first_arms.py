"""The arms of the first contact, in toy sizes on a CPU: facts, and the outcome of each."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from benchmarks.first import facts, nsight, plan
from benchmarks.first.plan import KINDS, Arm
from tests.support.first_contact import command, ended, told


def test_a_tiny_run_tells_facts_and_keeps_its_seconds(tmp_path: Path) -> None:
    """The plan that CI runs; peers that are not there are facts, and the table stands beside."""
    seconds = 400
    arms = [Arm.of(text) for text in plan.TINY]
    done = subprocess.run(command(tmp_path, seconds=seconds), capture_output=True, text=True, timeout=seconds + 60)
    assert done.returncode == 0
    outcomes = ended(tmp_path)
    cut = next(fact for fact in told(tmp_path) if fact["what"] == "over")["not_reached"]
    assert outcomes["card"] == facts.DONE and {arm.name for arm in arms} == {*outcomes, *cut}, (
        done.stdout + done.stderr
    )
    missing = {"opt-flash": "flashoptim", "setup-resnet50-default": "torchvision"}
    for name, outcome in outcomes.items():
        peer = missing.get(name)
        expected = facts.MISSING if peer and importlib.util.find_spec(peer) is None else facts.DONE
        assert outcome == expected, (name, [f for f in told(tmp_path) if f["job"] == name])
    if cut:
        pytest.skip(f"this machine did not reach {', '.join(cut)} in {seconds} s")
    by_kind = {fact["what"]: fact for fact in told(tmp_path)}
    assert by_kind["layer"]["shape"] and by_kind["optimizer"]["bits"] > 0 and by_kind["copy"]["n"] == 3
    assert by_kind["layer gradients"]["worst"] > 10
    text = next(tmp_path.glob("*.md")).read_text()
    assert "Llama-2-7B layer" in text and "e4m3_expanded" in text


ARMS = (
    "setup vit eager",
    "setup llama default",
    "train eager fused",
    "big inductor fused",
    "nan eager fused",
    "right opt",
    "ncu vit eager-host",
    "kernels",
)


@pytest.mark.parametrize("text", ARMS)
def test_an_arm_of_each_kind_runs(text: str, tmp_path: Path) -> None:
    subprocess.run(command(tmp_path, text, seconds=280), check=True, capture_output=True)
    assert ended(tmp_path) == {Arm.of(text).name: facts.DONE}, told(tmp_path)[-2:]


def test_every_kind_has_an_arm_that_runs() -> None:
    """But for ``check``, whose fault only a GPU's assembler makes."""
    run = {Arm.of(text).words[0] for text in (*ARMS, *plan.TINY)} | {"trial", "check"}
    assert run == set(KINDS)


def test_counters_are_read_without_what_ncu_says_around_them() -> None:
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","gpu__time_duration.sum","other"\n'
        '"","","ns",""\n'
        '"0","triton_poi_fused_0","1,234","x"\n'
    )
    rows = nsight.rows(text)
    assert rows == [
        {"gpu__time_duration.sum": "ns"},
        {"Kernel Name": "triton_poi_fused_0", "gpu__time_duration.sum": "1,234"},
    ]
