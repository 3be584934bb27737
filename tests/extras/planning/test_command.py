"""``fp8compile plan``: what it passes on, what it answers to a slip, what it imports."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from fp8compile.cli import main

MODULES_AFTERWARDS = """
import sys
from fp8compile.cli.main import main
code = main(sys.argv[1:])
print(code, *{name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "sympy"}, file=sys.stderr)
"""
CPU_SECONDS = 0.3


def test_every_option_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --params 8B --gpus 64 --seq 4096 --batch 256 --micro-batch 2 --card-gib 40 --tp 2 --pp 4 --json"
    assert main.main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"]["name"] == "Llama-3-8B" and found["gpus"] == 64 and found["card"] == 40 * 2**30
    assert found["step"] == {"seq": 4096, "batch": 256, "micro_batch": 2}
    assert [row["layout"] for row in found["rows"]] == [{"fsdp": 8, "tp": 2, "pp": 4}]


@pytest.mark.parametrize("written", ["70e9", "70B", "70b", "0.07T", "70000M", "70000000000"])
def test_parameters_are_written_in_several_ways(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "--params", written, "--gpus", "8"]) == 0
    assert "Llama-3-70B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--gpus 8", "the following arguments are required: --params"),
        ("--params many --gpus 8", "'many' is not a number of parameters such as 70e9 or 70B"),
        ("--params -7e9 --gpus 8", "argument --params: expected one argument"),
        ("--params 7e9 --gpus 0", "'0' is not a whole number of at least 1"),
        ("--params 7e9 --gpus 8 --card-gib none", "'none' is not the memory of a GPU in GiB, such as 80"),
        ("--params 7e9 --gpus 8 --sequence 1", "no option '--sequence'. Did you mean '--seq'?"),
    ],
)
def test_a_slip_is_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(["plan", *line.split()])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_what_does_not_divide_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "--params 7 --gpus 8",
        "--params 7e9 --gpus 12 --tp 8 --pp 1",
        "--params 7e9 --gpus 8 --seq 9000000",
    ):
        assert main.main(["plan", *line.split()]) == 2
        printed, said = capsys.readouterr()
        assert not printed and said.startswith("fp8compile plan: error: ") and said.count("\n") == 1


def cpu_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_it_imports_no_torch_and_starts_at_once() -> None:
    """Seconds of the CPU, the least of three starts: another process beside it makes a start no shorter."""
    found = []
    for _ in range(3):
        before = cpu_seconds()
        line = [sys.executable, "-c", MODULES_AFTERWARDS, "plan", "--params", "70e9", "--gpus", "256"]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
        found.append(cpu_seconds() - before)
        assert done.stderr == "0\n" and "Llama-3-70B" in done.stdout
    assert min(found) < CPU_SECONDS
