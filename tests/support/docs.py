"""Markdown as the tests of the documentation see it: blocks of code, links, headings, sentences.

    <!-- not run: needs torchao -->      above a ```python block: why it is not run
    <!-- output -->                      above a ```text block: what the Python block before it prints

A page's Python blocks are one program: they run in order, in one module, as if pasted below each other into train.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
OUTPUT = "<!-- output -->"
FENCE = re.compile(r"^( *)```(.*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
ABBREVIATIONS = ("et al.", "e.g.", "i.e.", "vs.")


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its first line of code (from 1), its language, its text, the line above its fence."""

    line: int
    language: str
    text: str
    above: str

    @property
    def reason_not_run(self) -> str | None:
        """Why it is not run, None if it is; of Python blocks."""
        found = NOT_RUN.match(self.above)
        return found.group(1) if found else None

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.above == OUTPUT


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page. Raises ValueError for a fence that is not closed."""
    lines, found, at = text.split("\n"), [], 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened:
            indent = opened.group(1)
            end = next((i for i in range(at + 1, len(lines)) if lines[i] == f"{indent}```"), None)
            if end is None:
                raise ValueError(f"the fence of line {at + 1} is not closed")
            code = "".join(f"{line.removeprefix(indent)}\n" for line in lines[at + 1 : end])
            above = lines[at - 1].strip() if at else ""
            found.append(Block(at + 2, opened.group(2).strip(), code, above))
            at = end
        at += 1
    return found


def program(page: list[Block]) -> list[tuple[Block, Block | None]]:
    """The Python blocks of a page that are run, each with the output block that belongs to it."""
    pairs: list[tuple[Block, Block | None]] = []
    for block in page:
        if block.language == "python" and block.reason_not_run is None:
            pairs.append((block, None))
        elif block.is_output and pairs:
            pairs[-1] = pairs[-1][0], block
    return pairs


def masked(text: str) -> list[str]:
    """Printed lines with numbers as ``#`` and runs of blanks and rules as one blank, without empty lines."""
    text = re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "#", text)
    lines = (re.sub(r"[\s─━]+", " ", line).strip() for line in text.split("\n"))
    return [line for line in lines if line]


def is_printed(expected: str, printed: str) -> bool:
    """Whether a block says what was printed, up to numbers; ``...`` in it stands for any text, as a line for any lines."""
    patterns = (
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in masked(expected)
    )
    return re.fullmatch("".join(patterns), "".join(f"{line}\n" for line in masked(printed))) is not None


def without_blocks(text: str) -> str:
    """The page with its fenced blocks and comments left out, line for line."""
    lines, inside = [], False
    for line in text.split("\n"):
        fence = FENCE.match(line)
        lines.append("" if inside or fence else line)
        inside = inside != bool(fence)
    return re.sub(r"<!--.*?-->", lambda found: "\n" * found.group().count("\n"), "\n".join(lines), flags=re.S)


def headings(text: str) -> list[str]:
    """The headings of a page, as anchors."""
    return [anchor(line.lstrip("#")) for line in without_blocks(text).split("\n") if re.match(r"#+ ", line)]


def anchor(heading: str) -> str:
    """What GitHub makes of a heading; MkDocs makes the same of one without punctuation between blanks."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(text: str) -> Iterator[str]:
    """The targets of all links and pictures that lead to files or headings."""
    prose = re.sub(r"`[^`\n]*`", "code", without_blocks(text))
    for found in LINK.finditer(prose):
        target = found.group(1) or found.group(2)
        if not re.match(r"[a-z]+:", target):
            yield target


def dead_links(page: Path) -> list[str]:
    """The links of a page whose file or heading is not there."""
    dead = []
    for target in links(page.read_text()):
        name, _, place = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        known = headings(file.read_text()) if place and file.suffix == ".md" and file.exists() else [place]
        if not file.exists() or place not in known:
            dead.append(target)
    return dead


def sentences(text: str) -> list[str]:
    """The sentences of a page's paragraphs and lists: no headings, tables, blocks or comments; code is one word."""
    prose = re.sub(r"`[^`]*`", "code", without_blocks(text))
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)|</?[a-z][^>]*>", "", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    lines = ["" if re.match(r"\s*(\||#|:::)", line) else line for line in prose.split("\n")]
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n" + "\n".join(lines)):
        whole = " ".join(paragraph.split()).removeprefix("- ")
        for short in ABBREVIATIONS:
            whole = whole.replace(short, short.replace(".", ""))
        found += [each for each in re.split(r"(?<=[.?!])[)*_\"]*\s+", whole) if re.search(r"\w", each)]
    return found


def words(sentence: str) -> int:
    """How many words a sentence has; a dash or a sign alone is none."""
    return sum(bool(re.search(r"\w", each)) for each in sentence.split())
