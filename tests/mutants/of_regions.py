"""Faults in what checkpointed regions keep."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REGIONS = (
    Mutant(
        "checkpointed: a product of codes is of no region",
        "fp8compile/encoding/products.py",
        "    stand_in(product, node)\n",
        "",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "checkpointed: what is read outside joins a region",
        "fp8compile/fx/checkpointed.py",
        "if not regions or OUTSIDE in regions or",
        "if not regions or",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "checkpointed: what the backward alone reads stays outside",
        "fp8compile/fx/checkpointed.py",
        "        if not read_in[node]:",
        "        if False:",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "saved: codes of channels-last values have four dimensions",
        "fp8compile/encoding/stored.py",
        "order is not None and codes.dim() == 4 and static",
        "order is None and codes.dim() == 4 and static",
        ("tests/sm90/test_regions_sm90.py",),
    ),
)
