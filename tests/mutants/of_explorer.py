"""Faults in what the explorer shows of a report."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DATA = ("tests/explorer/test_data.py",)

KERNELS = ("tests/compiler/test_kernels.py",)

EXPLORER = (
    Mutant(
        "kernels: those of a backward count as its forward's",
        "fp8compile/compiler/kernels.py",
        'if kwargs.get("is_backward")',
        "if False",
        KERNELS,
    ),
    Mutant(
        "kernels: a matmul has the operations that made its operands",
        "fp8compile/compiler/kernels.py",
        "inside = inside[-1:] if scheduled.is_extern() else inside",
        "inside = inside",
        KERNELS,
    ),
    Mutant(
        "explain: a frozen weight on the meta device trains",
        "fp8compile/tools/without_memory.py",
        "nn.Parameter(made, tensor.requires_grad)",
        "nn.Parameter(made)",
        ("tests/tools/test_without_memory.py",),
    ),
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
