"""README's GPU tables, made from the newest results of a GPU: between the markers nothing is typed.

python benchmarks/readme_tables.py          rewrites the block
python benchmarks/readme_tables.py --check  exits with 1 where the block is not what this script makes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a script's own folder is all that is there

from benchmarks import goals
from benchmarks.markdown import table
from benchmarks.results import FOLDER, newest_on_gpu

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks/readme_tables.py: begin -->", "<!-- benchmarks/readme_tables.py: end -->"
NOTHING_YET = "No GPU results yet: `bash benchmarks/gpu.sh`"


def block(folder: Path = FOLDER) -> str:
    """What stands between the markers."""
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


def replaced(text: str, new: str) -> str:
    """``text`` with ``new`` between the markers.

    Raises:
        ValueError: the markers are not there, once each and in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each, in this order. Cure: put them back.")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text = README.read_text()
    new = replaced(text, block())
    if not args.check:
        README.write_text(new)
    return int(args.check and new != text)


if __name__ == "__main__":
    sys.exit(main())
