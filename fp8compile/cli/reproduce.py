"""``fp8compile reproduce NAME``: a published ablation in small.

The options stand here; what runs it is imported when it runs.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fp8compile.cli.ends import DONE, FAILED, said
from fp8compile.cli.values import at_least, one_of
from fp8compile.reproduce.papers import PAPERS


def add_reproduce_options(parser: ArgumentParser) -> None:
    parser.add_argument("name", type=one_of("paper", PAPERS), metavar="NAME", help=" | ".join(PAPERS))
    parser.add_argument(
        "--out", type=Path, default=Path("reproduce-output"), metavar="DIR", help="folder for JSON and plot"
    )
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help="trainings that are averaged")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="steps of each training")


def run_reproduce(values: Namespace) -> int:
    from fp8compile.demo.data import NoSource
    from fp8compile.demo.extras import MissingExtra
    from fp8compile.reproduce import run

    try:
        run.run(run.ReproduceOptions(values.name, values.out, values.seeds, values.steps))
    except BrokenPipeError:
        raise  # an OSError too, but not the folder's fault
    except (MissingExtra, NoSource, OSError) as error:
        return said("reproduce", error, FAILED)
    return DONE
