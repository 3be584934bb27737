"""A published ablation in small, from a checkout.

python -m benchmarks.papers coat
python -m benchmarks.papers 8bit --seeds 3 --out folder
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.papers import PAPERS
from fp8compile.cli.ends import DONE, FAILED
from fp8compile.cli.values import at_least, one_of


def main(words: Sequence[str] | None = None) -> int:
    """Run one paper's ablation; returns the exit code, 1 where something that it needs is missing.

    Raises:
        SystemExit: with 0 after --help, with 2 where the command line cannot be parsed.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.papers", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", type=one_of("paper", PAPERS), metavar="NAME", help=" | ".join(PAPERS))
    parser.add_argument("--out", type=Path, default=Path("reproduce-output"), metavar="DIR", help="for JSON and plot")
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help="trainings that are averaged")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="steps of each training")
    values = parser.parse_args(words)

    from benchmarks.papers import run  # torch, once the line is known to be right
    from fp8compile.extras.demo.data import NoSource
    from fp8compile.extras.demo.extras import MissingExtra

    try:
        run.run(run.ReproduceOptions(values.name, values.out, values.seeds, values.steps))
    except (MissingExtra, NoSource, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
