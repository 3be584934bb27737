"""The command line as a process: what it imports, how wide it prints, how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8compile
from fp8compile.cli.commands import COMMANDS
from fp8compile.cli.ends import EXIT_CODES

HELP = ["--help", *(f"{command.name} --help" for command in COMMANDS)]
MODULES_AFTERWARDS = """
import sys
from fp8compile.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print(code, *{name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "sympy", "rich"}, file=sys.stderr)
"""


def ended(*arguments: str, columns: int = 80, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process that ran the command line, or ``code`` with its arguments."""
    command = [sys.executable, *(("-m", "fp8compile") if code is None else ("-c", code)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": str(columns)})


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *((line, 0) for line in ("--version", *HELP)),
        *(
            (line, 2)
            for line in ("", "dmeo", "demo --step 3", "demo --preset x", "explain mod", "bench --minutes no")
        ),
    ],
)
def test_what_only_parses_imports_no_torch(line: str, code: int) -> None:
    done = ended(*line.split(), code=MODULES_AFTERWARDS)
    assert done.stderr.splitlines()[-1] == str(code), done.stderr


def test_help_comes_where_there_is_no_torch() -> None:
    done = ended("--help", code="import sys; sys.modules['torch'] = None\n" + MODULES_AFTERWARDS)
    assert done.stdout.startswith("usage: fp8compile") and done.stderr.splitlines()[-1] == "0 torch"  # the None


def test_the_modules_would_be_seen() -> None:
    """The test above can fail: a command that runs imports torch."""
    done = ended("explain", "no.such:factory", code=MODULES_AFTERWARDS)
    assert done.stderr.splitlines()[-1].startswith("2 ") and "torch" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("line", HELP)
def test_help_fits_and_tells_the_exit_codes(line: str, columns: int) -> None:
    done = ended(*line.split(), columns=columns)
    assert done.returncode == 0 and not done.stderr
    assert [text for text in done.stdout.splitlines() if len(text) > columns] == []
    assert done.stdout.endswith("\n") and EXIT_CODES in " ".join(done.stdout.split())


def test_python_m_fp8compile() -> None:
    done = ended("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fp8compile {fp8compile.__version__}\n", "")


def test_errors_go_to_standard_error() -> None:
    done = ended("demo", "--steps", "0")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1] == (
        "fp8compile demo: error: argument --steps: '0' is not a whole number of at least 1"
    )


MISSHAPEN = """
import torch
def factory():
    return torch.nn.Linear(64, 256), torch.randn(128, 65)
"""


@pytest.fixture
def misshapen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory in the current directory, whose model refuses its input."""
    (tmp_path / "misshapen.py").write_text(MISSHAPEN)
    monkeypatch.chdir(tmp_path)


def test_what_a_model_raises_is_one_line(misshapen: None) -> None:
    """In a process, for torch's log would write past pytest."""
    done = ended("explain", "misshapen:factory")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("fp8compile explain: error: TorchRuntimeError: ") and done.stderr.count("\n") == 1
    assert "RuntimeError: a and b must have same reduction dim, but got [128, 65] X [64, 256]" in done.stderr


def test_the_whole_traceback_is_there_for_who_asks(misshapen: None) -> None:
    done = ended("explain", "misshapen:factory", "--traceback")
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fp8compile explain: error: TorchRuntimeError: ")


@pytest.mark.parametrize("line", ["--help", "demo --help", "--version"])
def test_a_reader_that_goes_away_is_no_traceback(line: str) -> None:
    """As ``fp8compile --help | true``; the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "fp8compile", *line.split()],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # argparse ignores what its own writing raises
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_without_an_output_nothing_fails() -> None:
    script = f"{sys.executable} -m fp8compile --version >&-"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str) -> None:
    pytest.importorskip("shtab")
    done = ended("--completion", shell)
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in ("explain", "preset", "exact", "traceback"))


def test_bash_reads_the_completion(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    path = tmp_path / "completion.bash"
    path.write_text(ended("--completion", "bash").stdout)
    asked = "COMP_WORDS=(fp8compile explain --pre); COMP_CWORD=2; _shtab_fp8compile; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"source {path}; {asked}"], capture_output=True, text=True)
    assert done.stdout.split() == ["--preset"], done.stderr


def test_without_shtab_there_is_no_completion() -> None:
    code = "import sys; sys.modules['shtab'] = None\n" + MODULES_AFTERWARDS
    assert "--completion" not in ended("--help", code=code).stdout
    done = ended("--completion", "bash", code=code)
    assert done.stderr.splitlines()[-1] == "2"
