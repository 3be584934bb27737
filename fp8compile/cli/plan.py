"""``fp8compile plan --params 70e9 --gpus 256``: memory and traffic per GPU by arithmetic; no torch is imported.

The options stand here, for what runs the command needs no more than they do.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from fp8compile.cli.ends import DONE, WRONG, said
from fp8compile.cli.values import at_least

BILLION = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def parameters(text: str) -> float:
    """``70e9`` or ``70B`` as a number."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([MBT]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a number of parameters such as 70e9 or 70B")
    return float(found[1]) * BILLION[found[2].upper()]


def gibibytes(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not the memory of a GPU in GiB, such as 80")
    return value


def add_plan_options(parser: ArgumentParser) -> None:
    parser.add_argument("--params", type=parameters, required=True, metavar="N", help="parameters, as 70e9 or 70B")
    parser.add_argument("--gpus", type=at_least(1), required=True, metavar="N", help="all GPUs of the run")
    parser.add_argument("--seq", type=at_least(1), default=8192, metavar="N", help="tokens of a sequence (8192)")
    parser.add_argument(
        "--batch", type=at_least(1), metavar="N", help="sequences of a step over all GPUs (one for each)"
    )
    parser.add_argument(
        "--micro-batch",
        type=at_least(1),
        metavar="N",
        help="sequences that a replica computes at once (all of its own; one in a pipeline)",
    )
    parser.add_argument("--card-gib", type=gibibytes, default=80.0, metavar="GIB", help="memory of a GPU (80)")
    parser.add_argument("--tp", type=at_least(1), metavar="N", help="GPUs that split each matrix (all that fit)")
    parser.add_argument("--pp", type=at_least(1), metavar="N", help="pipeline stages (all that fit)")
    parser.add_argument("--json", action="store_true", help="every layout and every part in bytes, as JSON")


def run_plan(values: Namespace) -> int:
    from fp8compile.extras.planning.table import plan

    try:
        made = plan(
            values.params,
            values.gpus,
            values.seq,
            values.batch,
            values.card_gib,
            values.tp,
            values.pp,
            values.micro_batch,
        )
    except ValueError as error:
        return said("plan", error, WRONG)
    print(json.dumps(made.to_dict(), indent=1) if values.json else made)
    return DONE
