"""Faults in what the explorer shows of a report."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DATA = ("tests/explorer/test_data.py",)

EXPLORER = (
    Mutant(
        "explorer: what is kept ends with the forward",
        "fp8compile/compiler/graph_picture.py",
        "_kind(node, codes), span.start, ends[node]",
        "_kind(node, codes), span.start, span.end",
        DATA,
    ),
    Mutant(
        "explorer: a name of the backward counts as one of the forward",
        "fp8compile/explorer/data.py",
        "(cut.parts[:1] if cut else ())",
        "(cut.parts if cut else ())",
        DATA,
    ),
    Mutant(
        "explorer: layers are alike whatever was done in them",
        "fp8compile/explorer/layers.py",
        "[*_texts(snapshot), *more]",
        "[*_texts(snapshot)]",
        DATA,
    ),
    Mutant(
        "explorer: a sum of gradients belongs to the summand that was there first",
        "fp8compile/explorer/homes.py",
        'made[-1].rpartition(".")[0]',
        'made[0].rpartition(".")[0]',
        DATA,
    ),
)
