"""Faults in what the explorer shows of a report."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DATA = ("tests/explorer/test_data.py",)

KERNELS = ("tests/compiler/test_kernels.py",)

SCENE = ("tests/explorer/test_scene.py",)

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
    Mutant(
        "explorer: what begins above the sight is not drawn",
        "fp8compile/explorer/assets/shelves.js",
        "let at = Math.floor(top / size) - 1;",
        "let at = Math.floor(top / size);",
        SCENE,
    ),
    Mutant(
        "explorer: a click is on the outermost box",
        "fp8compile/explorer/assets/scene.js",
        "this.open.within(y, y).filter(holds).pop()",
        "this.open.within(y, y).find(holds)",
        SCENE,
    ),
    Mutant(
        "explorer: from afar a line that is cut has another slope",
        "fp8compile/explorer/assets/lines.js",
        "x1 = e.x1 + slope * (y1 - e.y1)",
        "x1 = e.x1",
        SCENE,
    ),
)
