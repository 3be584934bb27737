"""What the models of the sweep leave exact, by reason, and the operations that the sensitivity analysis does not know.

    python -m benchmarks.studies.left_exact [--json PATH] [--models llama bert] [--tiny] [--least 4096]

For every model that can be built here (timm and torchvision may be missing), under BF16 autocast and in FP32: the tensors
that stay exact although they are floating-point activations, counted by reason with the bytes that they keep; then, over all
models, the operations named as not known, by how many tensors each keeps exact. No kernel is generated.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp8compile
from benchmarks.studies.measuring import in_precision
from benchmarks.studies.models import MODELS, TRANSFORMERS, Case
from fp8compile.reporting.entries import SAVED
from fp8compile.reporting.report import Report

PRECISIONS = ("amp", "fp32")
NOT_KNOWN = re.compile(r"read in the backward by (.+), which the sensitivity analysis does not know")
OF_THE_TENSOR = re.compile(  # reasons that lie in what the tensor is, or what the recipe says, not in how it is used
    r"integers that nothing bounds|not worth a kernel|a mask|made from parameters alone|a table or mask|fewer than|Recipe\."
    r"|a statistic|is left alone"
)


@dataclass(frozen=True)
class Left:
    """Tensors that stay exact in one model, in one precision, for one reason."""

    model: str
    precision: str
    reason: str
    made_by: str
    tensors: int
    nbytes: int


def left_by(report: Report, model: str, precision: str) -> list[Left]:
    """What a report says stays exact for how it is used, by reason and by the operation that made it."""
    counts: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    for skip in report.notes.skipped(SAVED):
        if not OF_THE_TENSOR.search(skip.reason):
            entry = counts[skip.reason, skip.origin.op]
            entry[0] += 1
            entry[1] += skip.bytes
    return [Left(model, precision, reason, op, n, size) for (reason, op), (n, size) in counts.items()]


def unknown_operations(left: Sequence[Left]) -> dict[str, int]:
    """The operations that the sensitivity analysis does not know, by how many tensors they keep exact; most first."""
    counts: collections.Counter[str] = collections.Counter()
    for entry in left:
        if found := NOT_KNOWN.search(entry.reason):
            counts[found[1]] += entry.tensors
    return dict(counts.most_common())


def models(names: Sequence[str], tiny: bool) -> Iterator[tuple[str, Case]]:
    """The models that can be built here; the demo's Llama is the first."""
    for name, make in {"demo": _demo, **MODELS}.items():
        if names and name not in names:
            continue
        small = {"tiny": True} if tiny and (name in TRANSFORMERS or name == "demo") else {}
        with contextlib.suppress(ImportError):
            yield name, make(0, **small)


def _demo(seed: int, tiny: bool = False) -> Case:
    from benchmarks.harness.batches import next_bytes, own_loss
    from fp8compile.extras.demo.model import build_model, size_for

    size = size_for(torch.device("cpu"), tiny)
    model = build_model(size, seed, torch.device("cpu")).train()
    return Case("the demo's Llama", model, lambda n: next_bytes(n, 2, size.length), own_loss)


def explained(case: Case, precision: str, recipe: Mapping[str, Any]) -> Report:
    """What fp8compile does to a model, in one step that generates nothing."""
    batch = case.batch(0)
    loss: Callable[[Any], torch.Tensor] = lambda out: case.loss(out, batch)  # noqa: E731
    with in_precision(precision):
        return fp8compile.explain(case.model, batch.args, batch.kwargs, recipe, loss)


def text_of(left: Sequence[Left]) -> str:
    lines = []
    for model, precision in dict.fromkeys((x.model, x.precision) for x in left):
        lines.append(f"{model}, {precision}")
        own = [x for x in left if (x.model, x.precision) == (model, precision) and x.reason]
        lines += [f"  {x.nbytes:>9} bytes in {x.tensors} by {x.made_by}: {x.reason}" for x in own]
    unknown = unknown_operations(left)
    lines.append(f"operations that the sensitivity analysis does not know: {len(unknown)}")
    return "\n".join(lines + [f"  {n:4} {op}" for op, n in unknown.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--tiny", action="store_true", help="smaller models: the same operations")
    parser.add_argument("--least", type=int, default=4096, help="Recipe.saved.min_numel; 0: every tensor is judged")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    left, built = [], []
    for name, case in models(args.models, args.tiny):
        built.append(name)
        for precision in args.precisions:
            report = explained(case, precision, {"saved.min_numel": args.least})
            found = left_by(report, name, precision) or [Left(name, precision, "", "", 0, 0)]
            left += found
            print(f"{name}, {precision}: {sum(x.tensors for x in found)} left exact for their use", flush=True)
    print(text_of(left))
    if args.json:
        rows = [vars(x) for x in left]
        document = {"built": built, "min_saved_numel": args.least, "unknown": unknown_operations(left), "left": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
