"""README's status and table, made from results files: nothing in them is typed. Others are made by results_page.py.

    gpu  what was measured on a GPU: what is faster than plain Inductor and what is slower, by the newest first contact

The status is the line that begins with **Alpha**.

python benchmarks/readme_tables.py          rewrites the blocks
python benchmarks/readme_tables.py --check  exits with 1 where a block is not what this script makes
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there

from benchmarks import goals
from benchmarks.first import readings
from benchmarks.harness.markdown import table
from benchmarks.harness.results import FOLDER, newest_on_gpu

README = Path(__file__).resolve().parents[1] / "README.md"
NOTHING_YET = "No GPU results yet: `bash benchmarks/gpu.sh`"
NO_STATUS = "**Alpha. Nothing here has run on a GPU yet.**"
STATUS = re.compile(r"^\*\*Alpha\..*?\*\*", re.MULTILINE)


def measured(folder: Path = FOLDER) -> str:
    """The newest results of a GPU, against the goals and by benchmark."""
    results = newest_on_gpu(folder)
    if results is None:
        return NOTHING_YET
    head = results.head
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    lines = [f"{head['device']}, {versions}; [all figures](benchmarks/results/{results.path.name}).", ""]
    lines += goals.table(results.rows)
    for name in dict.fromkeys(row["benchmark"] for row in results.rows.values() if "arms" in row):
        rows = [row for row in results.rows.values() if row["benchmark"] == name]
        lines += ["", f"**{name}**", "", *table(rows)]
    return "\n".join(lines)


def first_contact(folder: Path = FOLDER) -> str:
    """The newest first contact; without one, what else was measured."""
    found = readings.newest(folder)
    return measured(folder) if found is None else readings.summary(found, "docs/results.md#gpu")


def status(folder: Path = FOLDER) -> str:
    """How far it is, in a sentence."""
    found = readings.newest(folder)
    return NO_STATUS if found is None else readings.status(found)


BLOCKS: Mapping[str, Callable[[Path], str]] = {
    "gpu": first_contact,
}


def markers(name: str) -> tuple[str, str]:
    """What stands before and behind a block."""
    begin, end = (f"<!-- benchmarks/readme_tables.py: {name}, {where} -->" for where in ("begin", "end"))
    return begin, end


def replaced(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between the markers of a block.

    Raises:
        ValueError: the markers are not there, once each and in this order.
    """
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md must hold {begin!r} and {end!r} once each, in this order. Fix: put them back.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


def made(text: str, folder: Path = FOLDER) -> str:
    """``text`` with the status and every block made anew.

    Raises:
        ValueError: markers or the status are not there.
    """
    if len(STATUS.findall(text)) != 1:
        raise ValueError("README.md must hold one line that begins with **Alpha. Fix: put its status back.")
    text = STATUS.sub(lambda _: status(folder), text)
    for name, make in BLOCKS.items():
        text = replaced(text, name, make(folder))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text = README.read_text()
    new = made(text)
    if not args.check:
        README.write_text(new)
    return int(args.check and new != text)


if __name__ == "__main__":
    sys.exit(main())
