"""A folder of runs as a snapshot reads it: whatever its files hold, it says what it left out, and shows the rest."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fp8compile.cli import main
from fp8compile.extras.watching.folder import files_of, runs_of
from fp8compile.extras.watching.lines import SCHEMA, line_of_step, text_of
from fp8compile.extras.watching.reading import LoggedRun, NoRun, read_run

HEADER = text_of({"schema": SCHEMA, "model": "Net"})


def step(number: int, begun: str | None = None, **others: Any) -> str:
    """A step's line; ``begun``: the module where an inf began."""
    if begun is not None:
        layer = {"module": begun, "direction": "forward"}
        others["overflow"] = {"line": f"step {number}: {begun}", "count": 1, "layers": [layer]}
    return line_of_step({"step": number, "loss": 1.0, **others})


def read(tmp_path: Path, text: str | bytes, most: int = 1000) -> LoggedRun:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_run("rank0", path, most)


def numbers(run: LoggedRun) -> list[int]:
    found = [json.loads(line) for line in run.text.splitlines()]
    return [line["step"] for line in found if "step" in line]


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    text = HEADER + step(1) + step(2)
    assert read(tmp_path, text) == LoggedRun("rank0", text, 2, 0, 0, ())


def test_a_last_line_without_an_end_is_being_written_and_others_are_corrupt(tmp_path: Path) -> None:
    half = step(3)[:9]
    run = read(tmp_path, HEADER + half + "\n" + step(2) + "[1]\n\n\x00\xff\n" + half)
    assert (run.steps, run.corrupt, run.left_out) == (1, 3, 0)
    assert run.text == HEADER + step(2) + half


@pytest.mark.parametrize("cut", range(0, len(HEADER) + len(step(1)), 7))
def test_it_can_be_cut_off_anywhere(tmp_path: Path, cut: int) -> None:
    text = (HEADER + step(1))[:cut]
    run = read(tmp_path, text)
    assert (run.text, run.corrupt) == (text, 0)


def test_steps_that_come_again_replace_the_later_ones(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + step(1) + step(2) + step(3, "gone") + HEADER + step(2) + step(3))
    assert (numbers(run), run.steps, run.overflows) == ([1, 2, 3], 3, ())
    assert run.text.count(SCHEMA) == 2


def test_overflows_are_told_where_they_begin(tmp_path: Path) -> None:
    places = [None, "a", "a", None, "a", "b", "b"]
    run = read(tmp_path, HEADER + "".join(step(n, place) for n, place in enumerate(places, 1)))
    assert run.overflows == ("step 2: a", "step 5: a", "step 6: b")


def test_a_long_run_is_thinned_evenly_and_keeps_what_is_rare(tmp_path: Path) -> None:
    lines = [step(n, "a" if n == 7778 else None, skipped=n == 3333) for n in range(1, 10_001)]
    run = read(tmp_path, HEADER + "".join(lines), most=100)
    kept = numbers(run)
    assert len(kept) <= 100 and run.left_out == 10_000 - len(kept) and run.steps == 10_000
    assert {1, 3333, 7778, 10_000} <= set(kept)
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert max(gaps) <= 10_000 / 49  # half of the lines are for the others


def test_a_run_that_overflows_in_each_step_is_thinned_too(tmp_path: Path) -> None:
    run = read(tmp_path, HEADER + "".join(step(n, "ab"[n % 2], skipped=True) for n in range(1, 5001)), most=100)
    assert len(numbers(run)) <= 150 and len(run.overflows) == 5000


@pytest.mark.parametrize(
    ("schema", "named"), [("fp8compile.run/9", "fp8compile.run/9"), ("</script>", "'</script>'")]
)
def test_another_version_is_refused(tmp_path: Path, schema: str, named: str) -> None:
    with pytest.raises(NoRun, match="is written as") as refused:
        read(tmp_path, json.dumps({"schema": schema}) + "\n")
    assert named in str(refused.value) and SCHEMA in str(refused.value)


def test_values_of_any_kind_are_read(tmp_path: Path) -> None:
    strange = [
        {"step": "1"},
        {"step": 1, "overflow": "x"},
        {"step": 2, "overflow": {"layers": 3}},
        {"step": 3, "overflow": {"layers": [4]}},
    ]
    run = read(tmp_path, HEADER + "".join(json.dumps(each) + "\n" for each in strange) + "[" * 100_000 + "\n")
    assert (run.steps, run.corrupt) == (3, 2)


def test_files_are_found_by_name_and_by_number(tmp_path: Path) -> None:
    for name in ("rank10", "rank9", "b/rank0", "a/deep/rank0", "a/much/too/rank0", "other"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.jsonl"
    outside.write_text(HEADER)
    (tmp_path / "rank3.jsonl").symlink_to(outside)
    assert list(files_of(tmp_path)) == ["rank9", "rank10", "a/deep/rank0", "b/rank0"]


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="holds no run"):
        list(runs_of(tmp_path))
    with pytest.raises(NoRun, match="there is no folder"):
        list(runs_of(tmp_path / "none"))


def test_the_command_writes_a_page_and_tells_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.jsonl").write_text(HEADER + step(1) + "x\n" + step(2, "b\x1b[2J"))
    assert main.main(["watch", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rank0: 2 steps, 1 corrupt line left out, inf or NaN began 1 time"
    assert said[1:] == ["  step 2: b?[2J", str(tmp_path / "run.html")]
    assert "step 2: b" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("given", "code", "error"),
    [
        (["--serve", "--port", "70000"], 2, "argument --port: '70000' is not a whole number from 0 to 65535"),
        (["--port", "-1"], 2, "argument --port: '-1' is not a whole number from 0 to 65535"),
        ([], 2, "holds no run"),
        (["--out", "none/page.html"], 1, "No such file or directory"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], code: int, error: str
) -> None:
    if "--out" in given:
        (tmp_path / "rank0.jsonl").write_text(HEADER)
        given = ["--out", str(tmp_path / given[1])]
    try:
        ended = main.main(["watch", str(tmp_path), *given])
    except SystemExit as stopped:
        ended = int(str(stopped.code))
    assert ended == code
    assert error in capsys.readouterr().err
