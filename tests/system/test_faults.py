"""What faults around files may cost: a kill during a save, a cache that is damaged, full or shared. Nothing saved is lost."""

from __future__ import annotations

import errno
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8compile
from fp8compile.compiler import report_store
from fp8compile.reporting.compiled_graph import GraphReport
from tests.support.checkpoints import Net, everything, of
from tests.support.saving import AFTER_REPLACE, IN_PLACE, MOMENTS, NAME, loaded, one_step, save
from tests.support.saving import everything as checkpoint
from tests.support.sources import ROOT
from tests.support.two_processes import losses_and_report, together

STEPS, MORE, KILLS = 3, 2, 20
AOT_CACHE = "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache"
LOST = "does not hold its report"


def trained(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer with encoded states after so many steps, never saved."""
    net = Net()
    optimizer = of("AdamW", net)
    step = 0
    while step < steps:
        step = one_step(net, optimizer, step)
    return net, optimizer


def moments_at_random(count: int) -> list[str]:
    """Fractions of the bytes that are written, and the moments between and after the writing."""
    drawn = random.Random(18)
    return [*MOMENTS, *(f"{drawn.random():.6f}" for _ in range(count - len(MOMENTS)))]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders whose checkpoint, of step ``STEPS``, another process was killed in replacing; named by how and by when."""
    net, optimizer = trained(STEPS)
    names = [*(f"safe-{moment}" for moment in moments_at_random(KILLS)), f"{IN_PLACE}-0.1", f"{IN_PLACE}-0.9"]
    folders = [tmp_path_factory.mktemp("killed") / name for name in names]
    for folder in folders:
        folder.mkdir()
        save(checkpoint(net, optimizer, STEPS), str(folder / NAME))
    line = [sys.executable, "-m", "tests.support.saving", *map(str, folders)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folders


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(killed: list[Path]) -> None:
    """The old one before ``os.replace``, the new one after it; both go on as if nothing had been killed, bit for bit."""
    wanted = {steps: everything(*trained(steps)) for steps in (STEPS, STEPS + 1, STEPS + 1 + MORE)}
    safe = [folder for folder in killed if not folder.name.startswith(IN_PLACE)]
    assert len(safe) == KILLS
    for folder in safe:
        net, optimizer, step = loaded(folder / NAME)
        assert step == STEPS + folder.name.endswith(AFTER_REPLACE), folder.name
        assert everything(net, optimizer) == wanted[step], folder.name
    while step < STEPS + 1 + MORE:
        step = one_step(net, optimizer, step)
    assert everything(net, optimizer) == wanted[step]
    left_over = [folder for folder in safe if list(folder.glob(f"{NAME}.*.tmp"))]
    assert len(left_over) == KILLS - 1, "all but the one that was done were killed while they saved"


def test_the_same_kills_break_a_file_that_is_written_in_place(killed: list[Path]) -> None:
    """The test above can fail: ``torch.save(state, path)`` leaves neither the old checkpoint nor the new one."""
    for folder in (folder for folder in killed if folder.name.startswith(IN_PLACE)):
        with pytest.raises((RuntimeError, EOFError, OSError)):
            loaded(folder / NAME)
        assert (folder / NAME).stat().st_size > 0, folder.name


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernels of ``losses_and_report()``, which take long, and without entries and reports."""
    folder = tmp_path_factory.mktemp("kernels") / "cache"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        losses_and_report()
    for name in ("aotautograd", "fxgraph", "fp8compile"):
        shutil.rmtree(folder / name)
    return folder


@pytest.fixture
def cache(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache folder for a test, with kernels alone."""
    folder = tmp_path / "cache"
    shutil.copytree(kernels, folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def stored(cache: Path) -> tuple[Path, tuple[GraphReport, ...]]:
    """The file of a report of a real graph, and the report."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    graphs = fp8compile.explain(model, (torch.randn(128, 64),)).graphs
    report_store._write("key", graphs)
    assert report_store._read("key") == tuple(GraphReport.from_dict(g.to_dict()) for g in graphs)
    return cache / "fp8compile" / "key.json", report_store._read("key")


def damaged(content: bytes) -> Iterator[bytes]:
    """A file that was cut, overwritten, or changed in one byte."""
    yield from (b"", b"garbage", b"\xff\xfe\x00", b"[]", b"{}", b"null", b"3", b'["x"]', b"[" * 100_000)
    whole: dict[str, Any] = json.loads(content)
    yield json.dumps(whole["reports"]).encode()  # as it was written before it held a digest
    yield json.dumps({**whole, "reports": []}).encode()
    yield json.dumps({**whole, "sha256": None}).encode()
    yield content.replace(b'"saved_bytes": ', b'"saved_bytes": 1', 1)
    drawn = random.Random(18)
    yield from (content[: drawn.randrange(len(content))] for _ in range(100))
    for _ in range(400):
        at = drawn.randrange(len(content))
        yield content[:at] + bytes([content[at] ^ 1 << drawn.randrange(8)]) + content[at + 1 :]


def test_a_damaged_report_is_lost_and_never_wrong(stored: tuple[Path, tuple[GraphReport, ...]]) -> None:
    path, graphs = stored
    content = path.read_bytes()
    for each in damaged(content):
        assert each != content
        path.write_bytes(each)
        assert report_store._read("key") in ((), graphs)
        if len(each) == len(content) and json_or_none(each) != json_or_none(content):
            assert report_store._read("key") == (), "a change that a reader sees"
    path.unlink()
    path.mkdir()
    assert report_store._read("key") == ()


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def said(result: dict[str, Any]) -> list[str]:
    """The remarks of all graphs."""
    return [remark for graph in result["report"]["graphs"] for remark in graph["remarks"]]


def hits() -> tuple[int, int]:
    """Hits and misses of AOTAutograd's cache since it was asked last."""
    found = counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]
    counters.clear()
    return found


def entries(cache: Path) -> list[Path]:
    return [path for name in ("aotautograd", "fxgraph") for path in (cache / name).rglob("*") if path.is_file()]


def test_damaged_entries_and_reports_cost_a_compilation_or_a_remark(cache: Path) -> None:
    hits()
    cold = losses_and_report()
    assert hits() == (0, 1) and said(cold) == [] and len(entries(cache)) == 3
    assert losses_and_report() == cold and hits() == (1, 0)

    for damage in (lambda content: b"garbage", lambda content: content[: len(content) // 2]):
        for path in entries(cache):
            path.write_bytes(damage(path.read_bytes()))
        assert losses_and_report() == cold, "compiled again, and the same"
        assert hits() == (0, 1)

    (report,) = (cache / "fp8compile").iterdir()
    report.write_text(report.read_text()[:-9])
    lost = losses_and_report()
    assert hits() == (1, 0) and (lost["losses"], lost["weights"]) == (cold["losses"], cold["weights"])
    assert len(said(lost)) == 1 and LOST in said(lost)[0], "told, not shown as empty"


def test_a_full_disk_costs_the_cache_and_no_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither entries nor reports can be written; kernels can, or no backend of Inductor would run."""
    cold = losses_and_report()
    for path in [*entries(cache), *(cache / "fp8compile").iterdir()]:
        path.unlink()

    def full(where: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(where))

    for kind in ("torch._inductor.codecache.FxGraphCache", AOT_CACHE):
        monkeypatch.setattr(f"{kind}._write_to_local_cache", full)
    monkeypatch.setattr("os.replace", lambda _, path: full(path))
    hits()
    for _ in range(2):
        assert losses_and_report() == cold
        assert hits() == (0, 1)
    assert entries(cache) == [] and list((cache / "fp8compile").iterdir()) == []
    assert "the report cannot be kept beside the cache: [Errno 28] No space left on device" in caplog.text


def test_where_reports_cannot_be_kept_training_goes_on_with_a_remark(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file lies where their folder would be: what a read-only folder is for others, and it stops root too."""
    (cache / "fp8compile").write_text("in the way")
    cold = losses_and_report()
    assert said(cold) == [] and "the report cannot be kept beside the cache: [Errno 17] File exists" in caplog.text
    warm = losses_and_report()
    assert (warm["losses"], warm["weights"]) == (cold["losses"], cold["weights"])
    assert len(said(warm)) == 1 and LOST in said(warm)[0]


@pytest.mark.parametrize("backend", ["eager", "inductor", "fp8compile"])
def test_where_no_cache_folder_can_be_made_torch_compiles_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the backend: ``torch.compile`` itself asks for the folder. The guide says so."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(NotADirectoryError):
        torch.compile(nn.Linear(4, 4), backend=backend)


def test_a_folder_that_goes_away_costs_the_kept_report(
    stored: tuple[Path, tuple[GraphReport, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    report_store._write("key", stored[1])
    assert report_store._read("key") == ()
    assert "the report cannot be kept beside the cache: [Errno 20] Not a directory" in caplog.text


def test_two_processes_may_compile_into_one_cache_at_once(kernels: Path) -> None:
    """The folder itself: kernels are found by a key that their folder's path is part of."""
    check_together(kernels, 1)


@pytest.mark.sweep
@pytest.mark.timeout(3600)  # 20 times two processes with all their kernels
def test_two_processes_may_make_their_kernels_in_one_cache_at_once(tmp_path: Path) -> None:
    check_together(tmp_path / "cache", 20)


def check_together(cache: Path, rounds: int) -> None:
    first, second = together(cache, 2, rounds)
    assert len(first) == rounds and first == second, "losses, weights and reports, whole and the same"
    for result in first:
        assert said(result) == [] and result["report"]["graphs"][0]["notes"]["saved"]
    reports = list((cache / "fp8compile").iterdir())
    assert [path.suffix for path in reports] == [".json"] * rounds, "no temporary file is left"
