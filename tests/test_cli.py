"""The command line: what it passes on, and what it answers to a slip."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fp8compile
from fp8compile import cli
from fp8compile.train import demo


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[demo.Options]:
    """The options that reach the demo, which does not run."""
    options: list[demo.Options] = []

    def record(values: demo.Options) -> int:
        options.append(values)
        return 0

    monkeypatch.setattr(demo, "run_demo", record)
    return options


def test_defaults(given: list[demo.Options]) -> None:
    assert cli.main(["demo"]) == 0
    assert given == [demo.Options()]
    assert given[0].backend_options == {"preset": "default"}


def test_every_option_arrives(given: list[demo.Options]) -> None:
    line = "demo --out o --steps 5 --seeds 3 --seed 7 --arms eager,fp8compile --tiny --threads 2"
    assert cli.main([*line.split(), "--preset", "conservative", "--format", "int8"]) == 0
    assert given == [
        demo.Options(Path("o"), 5, 3, 7, ("eager", "fp8compile"), "conservative", "int8", tiny=True, threads=2)
    ]
    assert given[0].backend_options == {"preset": "conservative", "saved_format": "int8"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dmeo", "there is no command 'dmeo'. Did you mean 'demo'?"),
        ("demo --step 3", "no option '--step'. Did you mean '--steps'?"),
        ("demo --stesp=3", "no option '--stesp'. Did you mean '--steps'?"),
        ("demo more", "what is 'more'?"),
        ("demo --arms inductr", "there is no arm 'inductr'. Did you mean 'inductor'?"),
        ("demo --arms eager,eager", "'eager,eager' names an arm twice"),
        ("demo --preset defualt", "there is no preset 'defualt'. Did you mean 'default'?"),
        ("demo --format e4m4", "there is no format 'e4m4'. Did you mean 'e4m3'?"),
        ("demo --steps none", "'none' is not a whole number of at least 1"),
        ("demo --seeds 0", "'0' is not a whole number of at least 1"),
        ("demo --seed -1", "'-1' is not a whole number of at least 0"),
    ],
)
def test_a_slip_is_named_with_the_nearest_right_value(
    line: str, message: str, capsys: pytest.CaptureFixture[str], given: list[demo.Options]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(line.split())
    assert exit_.value.code == 2 and not given
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"fp8compile {fp8compile.__version__}\n"


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2 and "COMMAND" in capsys.readouterr().err


def test_python_m_fp8compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8compile", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("fp8compile", run_name="__main__")
    assert exit_.value.code == 0 and capsys.readouterr().out.startswith("fp8compile ")


@pytest.mark.parametrize("missing", ["transformers", "matplotlib"])
def test_a_missing_extra_is_named_with_its_cure(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["demo", "--tiny", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"needs {missing}, " in error or f"{missing} and" in error
    assert "pip install 'fp8compile[demo]'" in error


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["demo", "--tiny", "--out", str(tmp_path / "file")]) == 1
    assert "file" in capsys.readouterr().err


def test_ctrl_c_before_anything_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(values: demo.Options) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    assert cli.main(["demo"]) == 130
    assert "before anything was measured" in capsys.readouterr().err
