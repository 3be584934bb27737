"""Faults in what Inductor is told to store: residuals, sums, parts of a concatenation, tables."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESIDUALS = ("tests/passes/test_store_residuals.py",)
SUMS = ("tests/passes/test_store_sums.py",)
PARTS = ("tests/passes/test_store_parts.py",)
TABLES = ("tests/passes/test_store_tables.py",)

STORES = (
    Mutant(
        "store_residuals: what a matmul does not divide is stored too",
        "fp8compile/analysis/residuals.py",
        "        if contracts(node):\n            across[node] |= behind[node]\n        elif",
        "        across[node] |= behind[node]\n        if",
        RESIDUALS,
    ),
    Mutant(
        "store_residuals: what is cheap to compute is stored too",
        "fp8compile/analysis/residuals.py",
        ' and _bytes_read(node, found) > nbytes(node.meta["val"])',
        "",
        RESIDUALS,
    ),
    Mutant(
        "store_sums: what takes codes is stored by the plain limit too",
        "fp8compile/analysis/stored_values.py",
        "limits.few if any(each.holds_codes for each in takes) else min(limits.few, without_codes)",
        "min(limits.few, without_codes)",
        SUMS,
    ),
    Mutant(
        "store_sums: images are laid out as the graph says, beside convolutions too",
        "passes/store_sums.py",
        "convolves = any(opname(node) in (CONVOLUTION, ITS_BACKWARD) for node in graph.nodes)",
        "convolves = False",
        SUMS,
    ),
    Mutant(
        "store_sums: a value is stored as FP32",
        "passes/store_sums.py",
        "found = (behind_casts(node, graph.output_node()) for",
        "found = (node for",
        SUMS,
    ),
    Mutant(
        "store_sums: what one kernel along rows reads is stored",
        "passes/store_sums.py",
        " and not _is_along_rows(node)",
        "",
        SUMS,
    ),
    Mutant(
        "store_sums: nothing waits for a matmul",
        "passes/store_sums.py",
        "waits if fused else waits | computed",
        "waits",
        SUMS,
    ),
    Mutant(
        "store_sums: a mask holds codes",
        "fp8compile/analysis/stored_values.py",
        "value.itemsize == 1 and value.dtype != torch.bool",
        "value.itemsize == 1",
        SUMS,
    ),
    *(
        Mutant(f"store_tables: {fault}", "passes/store_tables.py", sound, broken, TABLES)
        for fault, sound, broken in (
            ("numbers of rows are tables", ' and node.meta["val"].shape[-1:] != (1,)', ""),
            ("a table is rounded", ' and node.meta["val"].dtype == float32', ""),
            ("what is stored anyway is marked", " and not is_read_from_memory(node)", ""),
            (
                "cheap operations count",
                "INSTRUCTIONS.get(opname(node), 0) >= LEAST",
                "INSTRUCTIONS.get(opname(node), 0)",
            ),
            ("readers of any size count", "LARGER * numel", "numel"),
            ("a reader counts for each way to it", "seen.add(user)", "pass"),
            ("casts are not looked through", "is_pointwise(user) or is_view_or_part(user)", "is_view_or_part(user)"),
        )
    ),
    Mutant(
        "store_parts: parts with readers of their own are stored twice",
        "passes/store_parts.py",
        " and len(part.users) == 1 for part",
        " for part",
        PARTS,
    ),
    Mutant(
        "store_parts: parts of different tensors are taken",
        "passes/store_parts.py",
        "bool(set.intersection(*read))",
        "bool(read)",
        PARTS,
    ),
    Mutant(
        "store_parts: what a sum reads is stored",
        "passes/store_parts.py",
        "any(map(is_generated, users))",
        "any(map(is_pointwise, users))",
        PARTS,
    ),
    Mutant(
        "store_parts: a part begins anywhere",
        "passes/store_parts.py",
        "return along % ALIGNED == 0",
        "return along > 0",
        PARTS,
    ),
)
