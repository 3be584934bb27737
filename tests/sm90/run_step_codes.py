"""Script: lower and assemble optimizer steps that write codes of the weight. Prints JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import fake_h100
from .lowering import LoweredGraph
from .measures import measured, print_json
from .run_optimizer import CASES
from .scattered import scattered_stores
from .step_codes import lowered_with_codes

TURNED = "BF16, rounded stochastically"  # --turned: lowered with turned stores in the step, too
NAMES = ("FP32", "BF16, rounded stochastically", "BF16, split", "BF16, FP32 copy", "Lion")


def all_measures(graph: LoweredGraph) -> dict[str, Any]:
    return measured(graph) | {"scattered": [name for k in graph.kernels.values() for name in scattered_stores(k)]}


def report(names: Sequence[str], turned: bool = False) -> dict[str, Any]:
    """``{case: {"least_bytes", "numel", "step", "finish", "turned": measures}}``."""
    fake_h100.install()
    result: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        found = lowered_with_codes(case, turned=turned)
        across = found.turned_in_the_step
        result[name] = {
            "least_bytes": found.least_bytes,
            "numel": case.shape[0] * case.shape[1],
            "step": all_measures(found.step),
            "finish": all_measures(found.finish),
            "turned": None if across is None else measured(across),
        }
    return result


if __name__ == "__main__":
    if "--turned" in sys.argv:
        print_json(lambda: report([TURNED], turned=True))
    else:
        print_json(lambda: report(sys.argv[1:] or NAMES))
