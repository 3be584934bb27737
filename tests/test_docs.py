"""The documentation: its blocks run, its links lead somewhere, its tables are those of the code, its sentences are short."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import pkgutil
import re
import statistics
import sys
import types
from pathlib import Path

import pytest

import fp8compile
from docs import make_tables
from docs.pictures import make as make_picture
from fp8compile.compiler import dump
from fp8compile.reporting.report import SCHEMA
from fp8compile.saved import format as saved_format
from tests.mutants.run import MUTANTS
from tests.support.docs import (
    blocks,
    dead_links,
    is_printed,
    masked,
    program,
    sentences,
    words,
)
from tests.support.dumped import STEPS
from tests.support.sources import FILES, ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, ROOT / "README.md"]
GUIDES = ("CONTRIBUTING.md", "CHANGELOG.md", "passes/README.md", "fp8compile/numerics/states/README.md")
LONGEST, MEDIAN = 30, 18  # words of a sentence
README_LINES = 120


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PROGRAMS = [page for page in PAGES if program(blocks(page.read_text()))]


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one module, in a folder of their own; errors and reports name the lines of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # as wide as the pages show it
    module = types.ModuleType("train")
    monkeypatch.setitem(sys.modules, "train", module)
    parts = program(blocks(page.read_text()))
    source = _laid_out([(block.line, block.text) for block, _ in parts])
    Path("train.py").write_text(source)
    for block, output in parts:
        code = compile("\n" * (block.line - 1) + block.text, str(tmp_path / "train.py"), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        if output is not None:
            said = "\n".join(masked(printed.getvalue()))
            assert is_printed(output.text, printed.getvalue()), f"line {output.line}: what is printed is\n{said}"


def _laid_out(parts: list[tuple[int, str]]) -> str:
    """The blocks as one file, each line where it stands in the page."""
    lines: list[str] = []
    for line, text in parts:
        lines += [""] * (line - 1 - len(lines)) + text.split("\n")[:-1]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / name for name in GUIDES)], ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    found = [(words(each), each) for each in sentences(page.read_text())]
    assert [each for count, each in found if count > LONGEST] == []
    assert not found or statistics.median(count for count, _ in found) <= MEDIAN


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", make_tables.PAGES)
def test_tables_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text()
    assert make_tables.made(text) == text, "run python docs/make_tables.py"


def test_numbers_that_outputs_leave_out_are_those_of_the_code() -> None:
    """Blocks are compared apart from numbers, and docstrings not at all."""
    inspecting = (ROOT / "docs/guide/inspecting.md").read_text()
    for text in (inspecting, dump.__doc__ or ""):
        assert set(re.findall(r"\b\d\d-[a-z]+_\w+", text)) <= {*STEPS}
    assert set(re.findall(r"fp8compile\.report/\d+", inspecting)) == {SCHEMA}
    page = (ROOT / "docs/guide/saved-activations.md").read_text()
    measured = re.findall(r"-?\d+\.\d \(\d+\.\d\)", saved_format.__doc__ or "")
    assert len(measured) == 3 and all(f" {each} " in page for each in measured)
    compiling = (ROOT / "docs/guide/kernels.md").read_text().split("For a GPU a Llama")[1].split("\n\n")[0]
    factors = re.findall(r"\b\d\.\d\d\b", compiling)
    assert len(factors) == 5 and all(f"| {each} |" in (ROOT / "docs/results.md").read_text() for each in factors)
    near = re.search(r"\| (\d+) of (\d+) \(", (ROOT / "docs/zoo.md").read_text())
    readme = (ROOT / "README.md").read_text()
    assert near and f"trains {near[2]} small models" in readme and f"In {near[1]} of them" in readme
    mutants = re.search(r"`make mutants` puts (\d+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert mutants and int(mutants[1]) == len(MUTANTS)


def test_the_day_of_reading_is_no_longer_than_it_says() -> None:
    """A file's folder is named once, before the first file that is in it."""
    folder, lines = "", 0
    for name in re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/design/reading.md").read_text()):
        folder = name.rpartition("/")[0] or folder
        lines += len((ROOT / folder / name.rpartition("/")[2]).read_text().splitlines())
    assert 4000 < lines < 5000


def test_messages_are_those_of_the_code() -> None:
    """What troubleshooting quotes stands in a string of the package; ``...`` is what differs from case to case."""
    known = [text for path in FILES.values() for text in strings(path)]
    quoted = [block.text.strip() for block in blocks((ROOT / "docs/guide/troubleshooting.md").read_text())]
    assert len(quoted) > 40
    parts = [
        part.strip() for message in quoted for part in re.split(r"\.\.\.|: | \(|\)", message)
    ]  # a cure is put in
    assert [part for part in parts if not any(part in text for text in known)] == []


def strings(path: Path) -> list[str]:
    """The strings of a file, with what is formatted into them left out."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    whole = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return whole + ["".join(str(getattr(v, "value", "")) if isinstance(v, ast.Constant) else "\0" for v in n.values)
                    for n in nodes if isinstance(n, ast.JoinedStr)]  # fmt: skip


def test_every_public_name_has_its_docstring_in_the_api_page() -> None:
    text = (ROOT / "docs/api.md").read_text()
    listed = {line.removeprefix("::: ") for line in text.split("\n") if line.startswith("::: ")}
    of_rooms = {
        f"fp8compile.{room}.{name}"
        for room in ("tools", "optim", "amp")
        for name in getattr(fp8compile, room).__all__
    }
    own = {f"fp8compile.{name}" for name in fp8compile.__all__ if name not in ("__version__", "optim", "amp")}
    named = own | of_rooms | {"fp8compile.extras.watching.watch"}
    returned = listed - named
    assert named <= listed
    assert all(inspect.isclass(pkgutil.resolve_name(name)) for name in returned)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = {line.rsplit(": ", 1)[-1].strip(" -") for line in nav.split("\n") if line.endswith(".md")}
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in DOCS}


SEVERAL = "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\nx = 2\n```\n"
WITH_OUTPUT = "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n1\n```\n"


def test_blocks_know_where_they_stand_and_why_they_are_not_run() -> None:
    first, second = blocks(SEVERAL)
    assert (first.line, first.text, first.reason_not_run) == (3, "x = 1\n", None)
    assert (second.line, second.reason_not_run) == (7, "needs a GPU")
    assert program([first, second]) == [(first, None)]
    code, output = blocks(WITH_OUTPUT)
    assert program([code, output]) == [(code, output)]
    with pytest.raises(ValueError, match="line 1 is not closed"):
        blocks("```python\nx = 1\n")


def test_outputs_are_compared_up_to_numbers_and_left_out_lines() -> None:
    assert is_printed("loss 1.5e-3 at step 7\n", "loss   2.25 at step 12\n")
    assert not is_printed("loss 1.5\n", "gain 1.5\n")
    assert is_printed("first\n...\nlast\n", "first\nsecond\nthird\nlast\n")
    assert not is_printed("first\n...\nlast\n", "first\nsecond\n")


def test_sentences_and_links_are_found() -> None:
    text = "# A heading of a page\n\nOne is short. Dettmers et al. wrote `a.b. C`\nof [it](x.md#y).\n\n"
    text += "| a. B. | c. |\n\n- An item\n"
    assert sentences(text) == ["One is short.", "Dettmers et al wrote code of it.", "An item"]
    assert [words(each) for each in sentences(text)] == [3, 7, 2]


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n[a](page.md#two-words) [b](page.md#three) [c](no.md) [d](https://x.y) `[e](no.md)`\n"
    )
    assert dead_links(page) == ["page.md#three", "no.md"]


def test_pictures_are_what_their_script_draws() -> None:
    assert make_picture.FILE.read_text() == make_picture.svg(), "run python docs/pictures/make.py"
