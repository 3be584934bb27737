"""Faults in the table of kernels: what is left out of it, or set beside the wrong figure."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TABLE = ("tests/benchmarks/test_kernel_table.py",)
KERNEL_TABLES = (
    Mutant(
        "kernel table: what has no price is dropped",
        "benchmarks/harness/kernel_lines.py",
        'yield {**head, "least": found, "no_price": NOT_LOWERED}',
        "continue",
        TABLE,
    ),
    Mutant(
        "kernel table: a spill hides behind a kernel that has none",
        "benchmarks/harness/kernel_prices.py",
        'spilled=max((each["spilled"]',
        'spilled=min((each["spilled"]',
        TABLE,
    ),
    Mutant(
        "kernel table: a kernel that is launched twice is one launch",
        "benchmarks/harness/kernel_prices.py",
        'parts["launch"] += each["launches"] * LAUNCH',
        'parts["launch"] += LAUNCH',
        TABLE,
    ),
    Mutant(
        "kernel table: a kernel that was rewritten has an error",
        "benchmarks/harness/kernel_lines.py",
        "if measured.is_of_other_kernels(benchmark, arm):",
        "if not found:",
        TABLE,
    ),
)
