"""The benchmarks: all are declared and run, and a run that is cut off can go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import suite
from benchmarks.e2e import bench_capacity
from benchmarks.harness import peers, plots, results, run_alone, timing
from benchmarks.harness.llama import TINY, Layer, Shape
from benchmarks.registry import PARTS, Benchmark, Case, Row, Setting
from fp8compile.cli import bench, main
from fp8compile.cli import bench as command

torch.set_num_threads(1)
CPU = Setting.on("cpu", tiny=True)


def test_the_command_finds_all_that_it_asks_the_suite_for() -> None:
    asked = set(re.findall(r"\bsuite\.(?!py\b)(\w+)", Path(command.__file__).read_text()))
    assert asked >= {"run", "failed", "written"} and all(hasattr(suite, name) for name in asked)


@pytest.mark.parametrize("one", suite.BENCHMARKS, ids=lambda b: b.name)
def test_every_benchmark_runs(one: Benchmark, nothing_generated: None) -> None:
    for case in one.tiny:
        row = run_alone.measured_row(one, case, CPU)
        assert "error" not in row, row["error"]
        arms = {**row["arms"], **row["left_out"], **row.get("capacity", {})}
        assert arms.keys() - {"ours"} <= {*one.compared_with, *_ours(one)}
        assert all(why in ALLOWED for why in row["left_out"].values()), row["left_out"]
        assert all(lap["seconds"] > 0 for laps in row["arms"].values() for lap in laps.values())
        json.dumps(row)


# What may be missing where the tests run: packages, and a GPU.
ALLOWED = {f"not installed ({peer.install})" for peer in peers.PEERS.values()}
ALLOWED |= {"its kernels need a GPU", "has no GELU of one input"}


def _ours(benchmark: Benchmark) -> set[str]:
    named = {"cast_transpose": {"ours, scale known", "ours, scale taken"}, "optimizer_step": {"ours e4m3_expanded"}}
    return named.get(benchmark.name, set())


def test_the_registry_is_complete() -> None:
    names = [b.name for b in suite.BENCHMARKS]
    assert len(set(names)) == len(names) and {b.part for b in suite.BENCHMARKS} == set(PARTS)
    for b in suite.BENCHMARKS:
        cases = [case.name for case in (*b.cases, *b.tiny)]
        assert len(set(cases)) == len(cases) and b.compared_with and b.tiny
        assert b.measure.__module__.split(".")[:2] == ["benchmarks", b.part]  # its room
    scripts = {path.stem for path in (suite.ROOT / "benchmarks").glob("*/bench_*.py")}
    declared = {b.measure.__module__.split(".")[2] for b in suite.BENCHMARKS}
    assert declared <= scripts


def test_the_gpt_layer_runs_too() -> None:
    """The only shape that no tiny case has: LayerNorm, GELU, biases."""
    layer = Layer(Shape(128, 256, 2, 2, gated=False))
    x = torch.randn(1, 8, 128, requires_grad=True)
    layer(x, torch.ones(8, 64), torch.zeros(8, 64)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_flops_of_a_layer_are_those_of_its_linears_and_attention() -> None:
    layer = Layer(TINY)
    assert TINY.linear_weights == sum(p.numel() for name, p in layer.named_parameters() if "norm" not in name)


# ------------------------------------------------------------------------------------------------------- timing


def test_arms_are_timed_in_turn_and_one_that_fails_is_left_out() -> None:
    called: list[str] = []

    def arm(name: str) -> timing.Arm:
        def run(lap: timing.Lap) -> None:
            called.append(name)
            lap("one")
            lap("two")

        return run

    def broken(lap: timing.Lap) -> None:
        raise RuntimeError("no such kernel\nsecond line")

    times, failed = timing.measured({"a": arm("a"), "x": broken, "b": arm("b")}, torch.device("cpu"), 3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]
    assert times.keys() == {"a", "b"} and times["a"].keys() == {"one", "two"}
    assert failed == {"x": "RuntimeError: no such kernel"}


def test_reasons() -> None:
    assert timing.reason(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == timing.OUT_OF_MEMORY
    assert timing.reason(ValueError()) == "ValueError: "


def test_summary() -> None:
    assert timing.summary([3.0]) == {"seconds": 3.0, "spread": 0.0}
    assert timing.summary([1.0, 2.0, 3.0, 4.0, 5.0]) == {"seconds": 3.0, "spread": 1.0}  # quartiles 1.5 and 4.5


# ----------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize(("fixed", "slope", "expected"), [(10, 5, 18), (95, 1, 5), (10, 60, 1), (200, 1, 0)])
def test_the_largest_that_fits(fixed: int, slope: int, expected: int) -> None:
    found = bench_capacity.largest(lambda n: fixed + slope * n, 100, 1, (1, 2))
    assert found["largest"] == expected


def test_running_out_of_memory_is_an_answer() -> None:
    """Memory runs out below the card's size (fragmentation): a step back, to what was run and fitted."""
    found = bench_capacity.largest(lambda n: None if n > 60 else 1.0 * n, 100, 1, (1, 2))
    assert found["fails"] == 82 and found["tries"][2][0] == 100 and found["largest"] == 2
    found = bench_capacity.largest(lambda n: None if n > 90 else 1.0 * n, 100, 1, (1, 2))
    assert found["largest"] == 82 and found["fails"] == 94


# -------------------------------------------------------------------------------------------------- runs of a suite


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[suite.Options]:
    """A run of the one benchmark that is quickest."""
    yield suite.Options(names=("amax",), device="cpu", tiny=True, out=tmp_path)


def test_a_run_writes_and_goes_on(tree: suite.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # of the worker: the run is tried, not the compiler
    found = suite.run(tree)
    assert found.rows.keys() == {"amax: 32x64"} and "error" not in found.rows["amax: 32x64"]
    before = found.path.read_text()
    assert json.loads(before)["rows"] == found.rows and json.loads(before)["tiny"]
    assert suite.run(tree).path == found.path and found.path.read_text() == before  # nothing measured again
    files = plots.written(found)
    assert [path.suffix for path in files] == [".json", ".md", ".png", ".png"]
    assert all(path.stat().st_size for path in files)
    assert "| 32x64 | ours | amax " in files[1].read_text()


def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit: int = 20) -> suite.Options:
    """A run whose workers are ``code``, in the place of benchmarks/worker.py."""
    worker = tmp_path / "benchmarks" / "worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text(code)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "START_SECONDS", 20)
    cases = (Case("first"), Case("second"), Case("third"))
    made = Benchmark("made", "kernels", "", ("x",), (), cases, lambda case, setting: Row(), limit=limit)
    monkeypatch.setattr(suite, "BENCHMARKS", (made,))
    return suite.Options(device="cpu", tiny=True, out=tmp_path / "out")


HEAD = """
import json, os, sys, time
_, parent, device, tiny, name, *cases = sys.argv
def row(case):
    print("noise")
    print("@row " + json.dumps({"benchmark": name, "case": case, "arms": {}, "nan": float("nan")}), flush=True)
"""


def test_a_process_that_dies_costs_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _stand_in(
        tmp_path,
        monkeypatch,
        HEAD + "for c in cases:\n    if c == 'second': sys.exit('no device')\n    row(c)\n",
    )
    found = suite.run(options)
    rows = found.rows
    assert suite.failed(found, options) == ["made: second: its process died: no device"]
    assert list(rows) == ["made: first", "made: second", "made: third"]
    assert rows["made: second"]["error"] == "its process died: no device" and rows["made: third"]["nan"] is None


def test_a_row_over_its_limit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = HEAD + "for c in cases:\n    if c == 'second': time.sleep(60)\n    row(c)\n"
    options = _stand_in(tmp_path, monkeypatch, code, limit=2)
    rows = suite.run(options).rows
    assert rows["made: second"]["error"] == "over its limit of 2 s" and rows.keys() >= {"made: first", "made: third"}


def test_a_worker_ends_with_the_run_that_started_it() -> None:
    """Also if that is killed while the worker still imports."""
    worker = suite.ROOT / "benchmarks" / "harness" / "worker.py"
    code = f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, {str(worker)!r}, str(os.getpid()), 'cpu', '1',"
    code += " 'linear', 'tiny'], stdout=subprocess.PIPE); print(p.pid, flush=True); os.kill(os.getpid(), 9)"
    pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout)
    for _ in range(200):
        if not _runs(pid):
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    raise AssertionError("it runs on")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_the_end_of_a_run_records_nothing_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = HEAD + "row(cases[0])\ntime.sleep(60)\n"
    options = _stand_in(tmp_path, monkeypatch, code)
    rows = suite.run(suite.Options(**{**vars(options), "minutes": 3 / 60})).rows
    assert rows.keys() == {"made: first"}
    (tmp_path / "benchmarks" / "worker.py").write_text(HEAD + "for c in cases: row(c)\n")
    assert suite.run(options).rows.keys() == {"made: first", "made: second", "made: third"}


def test_a_file_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    found = results.Results.opened(tmp_path, "cpu", tiny=True)
    for i in range(20):
        found.add({"benchmark": "b", "case": str(i)})
        assert len(json.loads(found.path.read_text())["rows"]) == i + 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


# ------------------------------------------------------------------------------------------------ the command line


def test_list_names_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # with a width given, lines are broken to fit it
    assert main.main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    for b in suite.BENCHMARKS:
        assert f"  {b.name}: {b.about}\n" in text
        assert "; ".join(case.name for case in b.cases) in text and "; ".join(b.compared_with) in text


def test_the_list_fits_the_width_that_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()) == " ".join(suite.listing().split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench amx", "there is no benchmark 'amx'. Did you mean 'amax'?"),
        ("bench --device cpu", "'layer' at full size needs a GPU. Fix: --tiny, or name kernels alone."),
        ("bench --device cuda", "--device 'cuda': torch sees no GPU here. Fix: --device cpu --tiny"),
    ],
)
def test_a_slip_is_named_with_its_cure(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(line.split()) == 2
    printed, said = capsys.readouterr()
    assert not printed and said.startswith("fp8compile bench: error: ") and message in said


@pytest.mark.parametrize("text", ["none", "0", "-1", "nan"])
def test_minutes_are_a_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "--minutes", text])
    assert f"{text!r} is not a number of minutes above 0" in capsys.readouterr().err


def test_without_a_checkout_the_cure_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Fix: run this in a checkout of fp8compile"):
        bench.found_suite([tmp_path])
    assert str(tmp_path) not in sys.path


def test_a_script_runs_the_cases_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (Case("one"), Case("two"))
    made = Benchmark("made", "kernels", "", ("x",), cases, cases, lambda case, setting: {"arms": {}, "left_out": {}})
    path = tmp_path / "made.json"
    line = ["--device", "cpu", "--tiny", "--case", "two", "--json", str(path)]
    assert run_alone.run_alone([made], "", line).keys() == {"made: two"}
    assert json.loads(path.read_text())["rows"].keys() == {"made: two"}
    with pytest.raises(SystemExit):
        run_alone.run_alone([made], "", ["--case", "tow"])
    assert "there is no case 'tow'. Did you mean 'two'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernel", "there is no part 'kernel'. Known: first then tests kernels layers e2e parity; --device cpu|cuda"),
        ("--device tpu", "--device is cpu or cuda, not 'tpu'"),
    ],
)
def test_a_slip_in_the_gpu_command(line: str, message: str) -> None:
    script = suite.ROOT / "benchmarks" / "gpu.sh"
    done = subprocess.run(["bash", str(script), *line.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"gpu.sh: {message}\n" and not done.stdout


def test_names_may_be_parts() -> None:
    assert {b.part for b in suite.Options(names=("layers",)).benchmarks} == {"layers"}
    assert [b.name for b in suite.Options(names=("amax", "e2e")).benchmarks] == ["amax", "training_step", "capacity"]
    assert suite.Options().benchmarks == suite.BENCHMARKS
