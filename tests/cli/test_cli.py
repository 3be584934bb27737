"""The command line: what it passes on, and what it answers to a slip."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fp8compile
from fp8compile.cli import main
from fp8compile.extras.demo import run


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[run.DemoOptions]:
    """The options that reach the demo, which does not run."""
    options: list[run.DemoOptions] = []

    def record(values: run.DemoOptions) -> int:
        options.append(values)
        return 0

    monkeypatch.setattr(run, "run_demo", record)
    return options


def test_defaults(given: list[run.DemoOptions]) -> None:
    assert main.main(["demo"]) == 0
    assert given == [run.DemoOptions()]
    assert given[0].backend_options == {"preset": "default"}


def test_every_option_arrives(given: list[run.DemoOptions]) -> None:
    fields = {"saved": "int8", "linears.emulate": True}
    line = "demo --out o --steps 5 --seeds 3 --seed 7 --arms eager,fp8compile --tiny --threads 2 --precision bf16"
    assert main.main([*line.split(), "--preset", "memory", "-o", "saved=int8", "-o", "linears.emulate=true"]) == 0
    assert given == [run.DemoOptions(Path("o"), 5, 3, 7, ("eager", "fp8compile"), "memory", fields, "bf16", True, 2)]
    assert given[0].backend_options == {"preset": "memory", **fields}


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
        ("demo --steps none", "'none' is not a whole number of at least 1"),
        ("demo --seeds 0", "'0' is not a whole number of at least 1"),
        ("demo --precision fp61", "invalid choice: 'fp61'"),
        ("demo --seed -1", "'-1' is not a whole number of at least 0"),
        ("explain pkg.mod", "'pkg.mod' is not of the form pkg.mod:factory"),
        ("explain pkg.mod:pair --preset defualt", "there is no preset 'defualt'. Did you mean 'default'?"),
        ("explain pkg.mod:pair -o saved", "-o takes FIELD=VALUE, not 'saved'"),
        ("dump pkg.mod:pair", "the following arguments are required: --out"),
    ],
)
def test_a_slip_is_named_with_the_nearest_right_value(
    line: str, message: str, capsys: pytest.CaptureFixture[str], given: list[run.DemoOptions]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(line.split())
    assert exit_.value.code == 2 and not given
    assert message in capsys.readouterr().err


def test_arms_go_with_the_precision(capsys: pytest.CaptureFixture[str], given: list[run.DemoOptions]) -> None:
    assert main.main(["demo", "--precision", "fp16"]) == 0
    assert (
        given[0].chosen_arms[0] == "fp32"
        and given[0].chosen_arms[-1] == "histogram"
        and len(given[0].chosen_arms) == 7
    )
    assert main.main(["demo", "--precision", "fp16", "--arms", "static 2^15,histogram"]) == 0
    assert given[1].chosen_arms == ("static 2^15", "histogram")
    assert run.DemoOptions().chosen_arms == ("inductor", "fp8compile")
    for line in ("--arms histogram", "--precision fp16 --arms inductor"):
        assert main.main(["demo", *line.split()]) == 2
        assert f"there is no arm '{line.split()[-1]}': " in capsys.readouterr().err
    assert len(given) == 2


def test_a_wrong_field_of_the_recipe_is_named(
    capsys: pytest.CaptureFixture[str], given: list[run.DemoOptions]
) -> None:
    assert main.main(["demo", "-o", "saved=e4m4"]) == 2 and not given
    assert "Recipe.saved.format cannot be 'e4m4'. Did you mean 'e4m3'?" in capsys.readouterr().err


FACTORIES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
    def forward(self, x, scale=1.0):
        return torch.tanh(self.up(x)) * scale
def factory(): return Net(), (torch.randn(128, 64),), {"scale": 2.0}
def pair(): return Net(), torch.randn(128, 64)
def alone(): return Net()
def strange(): return Net(), 3
def broken(): raise RuntimeError("the user's own")
def silent(): raise NotImplementedError
def chained():
    try:
        return {}["up.weight"]
    except KeyError as error:
        raise LookupError("no weights") from error
class Nothing(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x
def nothing(): return Nothing(), (torch.ones(2),)
number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of factories in a package."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(FACTORIES)
    (tmp_path / "pkg" / "incomplete.py").write_text("import no_such_dependency")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("pkg", "pkg.mod", "pkg.incomplete"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_explain_prints_the_report(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "pkg.mod:factory"]) == 0
    assert "saved for backward: 32.5 KiB, plain Inductor 128.0 KiB (25%)" in capsys.readouterr().out
    assert main.main(["explain", "pkg.mod:factory", "--full"]) == 0
    assert "1 tensor stored as codes" in (text := capsys.readouterr().out) and "left as they are" in text
    line = "explain pkg.mod:pair --json --preset memory -o saved=int8 -o saved.group_size=64 -o skip=head.*"
    assert main.main(line.split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["graphs"][0]["notes"]["saved"][0]["codec"] == "int8 1x64"
    assert "'budget': 0.7" in data["recipe"] and "skip=('head.*',)" in data["recipe"]
    assert sorted(p.name for p in factories.iterdir()) == ["pkg"], "nothing is written"


def test_explain_writes_a_page(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "pkg.mod:factory", "--html", "graph.html"]) == 0
    assert (
        Path("graph.html").read_text().startswith("<!doctype html>")
    ) and "page: graph.html" in capsys.readouterr().err
    assert main.main(["explain", "pkg.mod:factory", "--html", "none/graph.html"]) == 1
    assert "No such file or directory: 'none/graph.html'" in capsys.readouterr().err


def test_the_report_fits_the_terminal(
    factories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = {}
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main.main(["explain", "pkg.mod:factory"]) == 0
        lines = capsys.readouterr().out.splitlines()
        widths[columns] = max(map(len, lines))
        assert "saved for backward: 32.5 KiB" in " ".join(lines)
    assert widths["80"] <= 80 < widths["120"] <= 120


def test_dump_writes_the_graphs_too(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["dump", "pkg.mod:factory", "--out", "graphs", "-o", "saved.min_numel=0", "--json"]) == 0
    printed, said = capsys.readouterr()
    of_the_graph = json.loads((factories / "graphs" / "graph-0" / "report.json").read_text())
    (of_the_step,), (of_the_compilation,) = json.loads(printed)["graphs"], of_the_graph["graphs"]
    assert of_the_step == of_the_compilation | {name: of_the_step[name] for name in ("runs", "places")}
    assert "graphs" in said
    (encoded,) = (factories / "graphs" / "graph-0").glob("*-encode_saved/after.txt")
    assert "= fp8.encode(addmm)" in encoded.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no.such:factory", "cannot import no.such: No module named 'no'"),
        ("pkg.incomplete:factory", "cannot import pkg.incomplete: No module named 'no_such_dependency'"),
        ("pkg.mod:factroy", "pkg.mod has no 'factroy'. Did you mean 'factory'?"),
        ("pkg.mod:number", "pkg.mod:number is of type int, not a callable that returns (model, args)"),
        ("pkg.mod:alone", "pkg.mod:alone returned a value of type Net, not (model, args) or (model, args, kwargs)"),
        ("pkg.mod:strange", "pkg.mod:strange returned a value of type tuple, not (model, args)"),
        ("pkg.mod:pair -o saved_fromat=int8", "Recipe has no field 'saved_fromat'. Did you mean 'saved.format'?"),
        ("pkg.mod:pair -o saved=int4", "Recipe.saved.format cannot be 'int4'."),
    ],
)
@pytest.mark.parametrize("command", ["explain", "dump --out graphs"])
def test_a_slip_in_explain_or_dump_is_one_line(
    command: str, line: str, message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(f"{command} {line}".split()) == 2
    printed, said = capsys.readouterr()
    name = command.split()[0]
    assert not printed and said.startswith(f"fp8compile {name}: error: ") and message in said
    assert said.count("\n") == 1 and not (factories / "graphs").exists()


def test_what_the_model_or_the_folder_does_not_allow(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "pkg.mod:nothing"]) == 1
    assert "compiled no graph" in capsys.readouterr().err
    assert main.main(["dump", "pkg.mod:pair", "--out", "pkg/mod.py"]) == 1
    said = capsys.readouterr().err
    assert "graph dumps cannot be written to" in said and "pkg/mod.py/graph-0" in said and said.count("\n") == 1


@pytest.mark.parametrize("command", ["explain", "dump --out graphs"])
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("broken", "RuntimeError: the user's own"),
        ("chained", "LookupError: no weights; caused by KeyError: 'up.weight'"),
        ("silent", "NotImplementedError"),
    ],
)
def test_what_a_factory_raises_is_one_line(
    command: str, factory: str, message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command.split(), f"pkg.mod:{factory}"]) == 1
    printed, said = capsys.readouterr()
    assert not printed and said == f"fp8compile {command.split()[0]}: error: {message}\n"


def test_the_whole_traceback_is_there_for_who_asks(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "pkg.mod:broken", "--traceback"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said and "in broken" in said
    assert said.endswith("fp8compile explain: error: RuntimeError: the user's own\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"fp8compile {fp8compile.__version__}\n"


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main([])
    assert exit_.value.code == 2 and "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["transformers", "matplotlib"])
def test_a_missing_extra_is_named_with_its_cure(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main.main(["demo", "--tiny", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"needs {missing}, " in error or f"{missing} and" in error
    assert "pip install 'fp8compile[demo]'" in error


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    assert main.main(["demo", "--tiny", "--out", str(tmp_path / "file")]) == 1
    assert "file" in capsys.readouterr().err


def test_ctrl_c_outside_of_the_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(values: run.DemoOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupt)
    assert main.main(["demo"]) == 130
    assert capsys.readouterr().err == "fp8compile demo: interrupted\n"
