"""Graph dumps: their files, that they are equal from run to run, and that they change nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import fp8compile
from fp8compile import Recipe
from fp8compile.compiler import dump, pipeline
from fp8compile.compiler.hooks import JointPasses, Partitioner
from fp8compile.compiler.pipeline import On
from fp8compile.fx import dump_files, snapshot
from fp8compile.fx.graph import splice
from fp8compile.recipe.context import Context
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.entries import Notes
from tests.support.dumped import CUT, GENERATED, LATE, NAMES, STEPS, Gated, explained
from tests.support.measure import compiled
from tests.support.processes import run_in_process

FILES = ["after-full.dot", "after-full.txt", "after.dot", "after.txt", "before.txt", "diff.txt"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_files_of_every_pass_and_the_report(tmp_path: Path) -> None:
    fn = compiled(Gated(), **{"saved.min_numel": 0, "debug.dump": str(tmp_path / "new" / "dump")})
    fn(torch.randn(128, 64)).sum().backward()
    fn(torch.randn(64, 64)).sum().backward()  # another graph
    found = tree(tmp_path / "new" / "dump")
    one = [f"{step}/{file}" for step in STEPS for file in FILES] + ["report.json", "report.txt"]
    assert sorted(found) == [f"graph-{n}/{path}" for n in range(2) for path in one]
    head, after = found[f"graph-0/{STEPS[CUT]}/after.txt"].split(b"\n\n", 1)
    assert head.startswith(b"# cut_for_bytes: ") and after == found[f"graph-0/{STEPS[CUT + 1]}/before.txt"]
    assert b"# forward" in found[f"graph-0/{STEPS[-1]}/diff.txt"]
    reports = [json.loads(found[f"graph-{n}/report.json"]) for n in range(2)]
    told = json.loads(fp8compile.report(fn).to_json())["graphs"]  # type: ignore[arg-type]
    of_a_step = {"runs": None, "places": None}
    assert [r["graphs"][0] | of_a_step for r in reports] == [g | of_a_step for g in told]
    assert (
        b"stored as codes" in found["graph-0/report.txt"]
        and str(tmp_path).encode() not in found["graph-0/report.txt"]
    )


def test_a_pass_of_the_joint_graph_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def double_tanh(graph: Graph, ctx: Context) -> Notes:
        def doubled(x: Tensor) -> Tensor:
            return x * 2

        [tanh] = graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        new = splice(graph, doubled, tanh, before=tanh.next)
        tanh.replace_all_uses_with(new, lambda user: user is not new)
        return Notes()

    others = [each for each in pipeline.PIPELINE if each.on not in (On.PATTERNS, On.JOINT)]
    monkeypatch.setattr(pipeline, "PIPELINE", (pipeline.changes(double_tanh, On.JOINT), *others))
    compiled(Gated(), **{"debug.dump": str(tmp_path)})(torch.randn(128, 64)).sum().backward()
    folder = tmp_path / "graph-0" / "01-double_tanh"
    assert "fp8compile: doubled(tanh)" in (folder / "after.txt").read_text()
    assert "fp8compile" not in (folder / "before.txt").read_text()
    assert re.search(r"aten.mul.Tensor +2 +3 +\+1\n", (folder / "diff.txt").read_text())
    assert [p.name[3:] for p in sorted((tmp_path / "graph-0").glob("??-*"))][1:] == NAMES[CUT:]


def test_where_code_is_generated_its_passes_follow_half_by_half(tmp_path: Path) -> None:
    """The backward's when it first runs."""
    run = compiled(Gated(), **{"saved.min_numel": 0, "debug.dump": str(tmp_path), "debug.codegen": "inductor"})
    loss = run(torch.randn(128, 64)).sum()
    names = [step.name for step in sorted((tmp_path / "graph-0").glob("??-*"))]
    assert names == STEPS + GENERATED[: len(LATE)]
    loss.backward()
    assert [step.name for step in sorted((tmp_path / "graph-0").glob("??-*"))] == STEPS + GENERATED
    halves = [half for half in ("forward", "backward") for _ in LATE]
    for step, half in zip(GENERATED, halves, strict=True):
        page = (tmp_path / "graph-0" / step / "before.txt").read_text()
        assert page.startswith(f"# {half}\n") and ("fp8.encode" in page) == (half == "forward")


def test_a_disabled_pass_has_no_step(tmp_path: Path) -> None:
    with torch._inductor.config.patch(disabled_passes="recompute_kept"):
        compiled(Gated(), **{"debug.dump": str(tmp_path)})(torch.randn(128, 64)).sum().backward()
    names = sorted(p.name for p in (tmp_path / "graph-0").glob("??-*"))[: len(STEPS) - 1]
    others = [name for name in NAMES if name != "recompute_kept"]
    assert names == [f"{number:02}-{name}" for number, name in enumerate(others, 1)]


def test_steps_of_an_earlier_run_go_and_other_files_stay(tmp_path: Path) -> None:
    for path in ("graph-0/20-old_pass/before.txt", "graph-0/21-mine/notes.txt", "graph-0/21-mine/after.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("old")
    compiled(Gated(), **{"debug.dump": str(tmp_path)})(torch.randn(128, 64)).sum().backward()
    left = {
        p.relative_to(tmp_path / "graph-0").as_posix()
        for p in (tmp_path / "graph-0").rglob("*/*")
        if p.parent.name.startswith(("20", "21"))
    }
    assert left == {"21-mine/notes.txt"} and not (tmp_path / "graph-0" / "20-old_pass").exists()


def test_the_environment_names_the_folder_where_the_recipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dump_files.VARIABLE, str(tmp_path / "env"))
    compiled(Gated(), **{"debug.dump": str(tmp_path / "recipe")})(torch.randn(128, 64)).sum().backward()
    assert (tmp_path / "recipe").is_dir() and not (tmp_path / "env").exists()
    torch._dynamo.reset()
    compiled(Gated())(torch.randn(128, 64)).sum().backward()
    assert sorted(p.name for p in (tmp_path / "env").iterdir()) == ["graph-0"]


def test_a_rank_has_a_folder_of_its_own(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert dump_files.claim(str(tmp_path)) == tmp_path / "rank-0" / "graph-0"
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_files, "_said", set())


def trained(folder: Path, *several: type[nn.Module]) -> None:
    """A step of each of these models, compiled with a dump into ``folder``; gradients are there."""
    for kind in several:
        torch._dynamo.reset()
        model = kind()
        compiled(model, **{"debug.dump": str(folder)})(torch.randn(128, 64)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("in_the_way", ["", "graph-0", "graph-0/report.txt"])
def test_a_folder_that_cannot_be_written_costs_a_warning(
    in_the_way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As root, permissions stop nobody: what is in the way is a file where a folder must be, or the reverse."""
    root = tmp_path / "dump"
    if in_the_way.endswith("report.txt"):
        (root / in_the_way).mkdir(parents=True)
    else:
        (root / in_the_way).parent.mkdir(exist_ok=True)
        (root / in_the_way).write_text("in the way")
    with caplog.at_level(logging.WARNING, "fp8compile"):
        trained(root, Gated, Gated)
    assert caplog.text.count(f"graph dumps cannot be written to {root / 'graph-0'}") == 1
    assert caplog.text.count("graph dumps cannot be") == 1 and "Recipe.debug.dump" in caplog.text


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("fits", [0, 1, 6], ids=lambda fits: f"room for {fits} files")
def test_a_full_disk_costs_one_warning_and_leaves_no_half_file(
    fits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    write_text = Path.write_text

    def until_full(path: Path, text: str, **kwargs: object) -> int:
        if len(written) >= fits and tmp_path in path.parents:
            write_text(path, text[: len(text) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", until_full)
    with caplog.at_level(logging.WARNING, "fp8compile"):
        trained(tmp_path, Gated, Gated)
    assert caplog.text.count("No space left on device") == 1
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*written}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.usefixtures("nothing_said")
def test_a_file_system_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "report.txt").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "fp8compile"):
        assert not dump_files.write(tmp_path, {"report.txt": "text"})
        assert not dump_files.write(tmp_path, {"": "a folder"}, "x")
    assert caplog.text.count("graph dumps cannot be") == 1, "another obstacle, the same dump"


@pytest.mark.usefixtures("nothing_said")
def test_each_dump_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8compile"):
        for name in ("first", "second"):
            (tmp_path / name).write_text("in the way")
            trained(tmp_path / name, Gated, Gated)
            assert caplog.text.count(f"graph dumps cannot be written to {tmp_path / name / 'graph-0'}") == 1
    assert caplog.text.count("graph dumps cannot be") == 2


def test_no_snapshot_is_made_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dump_files.VARIABLE, raising=False)
    made: Counter[str] = Counter()
    original = snapshot._part
    monkeypatch.setattr(snapshot, "_part", lambda *args: made.update(["part"]) or original(*args))
    assert dump.watch_for(Recipe()) is None
    fn = compiled(Gated())
    fn(torch.randn(128, 64)).sum().backward()
    assert not made and not fp8compile.report(fn).graphs[0].steps  # type: ignore[arg-type]
    explained()
    around_joint, by_the_cut, around_halves = (
        2 * 4 + 1,
        2,
        2 * 2,
    )  # the cut sees the joint graph and leaves two halves
    assert made["part"] == around_joint + by_the_cut + 6 * around_halves


def test_the_key_knows_nothing_of_a_dump(tmp_path: Path) -> None:
    with_dump, without = Recipe(debug={"dump": str(tmp_path)}), Recipe()
    assert with_dump.key == without.key and with_dump == without
    told = [Context(recipe) for recipe in (with_dump, without)]
    assert Partitioner(told[0], "graph").uuid() == Partitioner(told[1], "graph").uuid()
    joint = [JointPasses(each, "graph") for each in told]
    assert joint[0].uuid() == joint[1].uuid() and joint[0].__reduce__() == joint[1].__reduce__()


@pytest.mark.parametrize("shapes", ["static", pytest.param("dynamic", marks=pytest.mark.sweep)])
def test_equal_files_from_two_processes_cold_and_warm(shapes: str, tmp_path: Path) -> None:
    """Cold with a dump and from a cache that was filled without one, where no pass runs but for the dump."""
    plain = run_in_process(tmp_path, {}, cache="a", shapes=shapes)
    warm = run_in_process(tmp_path, {}, cache="a", shapes=shapes, env={dump_files.VARIABLE: str(tmp_path / "warm")})
    cold = run_in_process(tmp_path, {"debug.dump": str(tmp_path / "cold")}, cache="b", shapes=shapes)
    hits = [ran["counters"]["autograd_cache_hit"] for ran in (plain, warm, cold)]
    assert hits == [0, 1, 0], "a dump is no part of the key"
    for ran in (warm, cold):
        assert json.loads(ran["report"])["graphs"] == json.loads(plain["report"])["graphs"]
        assert ran["gradients"] == plain["gradients"]
    found = tree(tmp_path / "cold")
    assert len(found) == len(STEPS + GENERATED) * len(FILES) + 2 and found == tree(tmp_path / "warm")


def test_steps_are_not_in_the_json() -> None:
    report = fp8compile.explain(Gated(), (torch.randn(128, 64),))
    assert report.graphs[0].steps and "steps" not in report.to_json() and "steps" not in repr(report)
    assert report.graphs[0] == GraphReport.from_dict(report.graphs[0].to_dict())


def test_torch_trace_holds_every_step(tmp_path: Path) -> None:
    """Without a folder for dumps; read by tlparse where that is installed."""
    ran = run_in_process(tmp_path, {}, shapes="static", env={"TORCH_TRACE": str(tmp_path / "trace")})
    assert ran["counters"]["autograd_cache_hit"] == 0
    [log] = (tmp_path / "trace").iterdir()
    names = re.findall(r'"artifact": \{"name": "(fp8compile_\w+)"', log.read_text())
    before, forward, backward = (
        [f"fp8compile_{step[3:]}_{what}" for step in steps for what in ("before", "after", "diff", "after_dot")]
        for steps in (STEPS, GENERATED[:2], GENERATED[2:])
    )
    assert names == [*before, *forward, "fp8compile_report", "fp8compile_report_json", *backward]
    program = shutil.which("tlparse")
    if program is None:
        pytest.skip("tlparse is not installed; the trace itself was checked")
    subprocess.run([program, str(log), "-o", str(tmp_path / "html"), "--no-browser"], check=True)
    pages = {re.sub(r"_\d+$", "", p.stem): p for p in (tmp_path / "html").rglob("fp8compile_*")}
    assert set(pages) == set(names)
    assert "# forward" in pages["fp8compile_encode_saved_after"].read_text()
    index = (tmp_path / "html" / "index.html").read_text()
    assert all(page.name in index for page in pages.values())
