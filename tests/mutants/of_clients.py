"""Faults in what stands between the backend and where people train: ranks, paths, files, plans."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLIENTS = (
    Mutant(
        "wire: a mean is a sum",
        "fp8compile/fx/wire.py",
        "rows.sum(0) / self.ranks if self.mean else rows.sum(0)",
        "rows.sum(0)",
        ("tests/fx/test_wire.py",),
    ),
    Mutant(
        "wire: rows are not filled up to groups",
        "fp8compile/fx/wire.py",
        "(0, self.ranks * self.row - x.numel())",
        "(self.ranks * self.row - x.numel(), 0)",
        ("tests/fx/test_wire.py",),
    ),
    Mutant(
        "collectives: every reduction is a sum",
        "passes/compress_collectives.py",
        'SUMS = ("sum", "avg")',
        'SUMS = ("sum", "avg", "max")',
        ("tests/passes/test_compress_collectives.py",),
    ),
    Mutant(
        "fsdp: each rank's own scale",
        "fp8compile/integrations/fsdp.py",
        "dist.all_reduce(amax, dist.ReduceOp.MAX, group)",
        "pass",
        ("tests/integrations/test_fsdp.py",),
    ),
    Mutant(
        "paths: a replaced forward keeps its argument",
        "fp8compile/fx/provenance.py",
        "\"L['self']\", path)",
        'r"\\g<0>", path)',
        ("tests/system/test_wrapped.py",),
    ),
    Mutant(
        "sensitivity: functions of complex numbers are those of real ones",
        "fp8compile/analysis/sensitivity/responses.py",
        "return packet(node) in OF_COMPLEX or not any(map(is_complex, (node, *node.all_input_nodes)))",
        "return True",
        ("tests/analysis/sensitivity/test_analysis.py",),
    ),
    Mutant(
        "sensitivity: complex pairs are not known",
        "fp8compile/analysis/sensitivity/responses.py",
        '"view_as_complex view_as_real ',
        '"view_as_real ',
        ("tests/analysis/sensitivity/test_analysis.py",),
    ),
    Mutant(
        "report store: a damaged report is read",
        "fp8compile/compiler/report_store.py",
        " if whole else ()",
        "",
        ("tests/system/test_faults.py",),
    ),
    Mutant(
        "report store: any model with the same layers is served",
        "fp8compile/compiler/backend.py",
        "({own} if own else set())",
        "set()",
        ("tests/compiler/test_report_store.py",),
    ),
    Mutant(
        "plan: every stage holds all micro-batches",
        "fp8compile/extras/planning/bytes.py",
        "in_flight = min(layout.pp - stage.index, count)",
        "in_flight = count",
        ("tests/extras/planning/test_bytes.py",),
    ),
    Mutant(
        "plan: no gather for the backward",
        "fp8compile/extras/planning/traffic.py",
        "3 * count",
        "2 * count",
        ("tests/extras/planning/test_traffic.py",),
    ),
    Mutant(
        "graph_trainer: what was overwritten is saved as if it were not",
        "fp8compile/integrations/graph_halves.py",
        "(OVERWRITTEN, writes.touched.intersection(saved)),",
        "",
        ("tests/integrations/test_graph_halves.py",),
    ),
    Mutant(
        "graph_trainer: its memory policy takes gradients' codes for the forward's",
        "fp8compile/integrations/graph_trainer.py",
        "            node.meta[BACKWARD] = True\n",
        "            pass\n",
        ("tests/integrations/test_graph_trainer.py",),
    ),
    Mutant(
        "graph_trainer: a frozen weight is data",
        "fp8compile/integrations/graph_trainer.py",
        "range(trained if state is None else state)",
        "range(trained)",
        ("tests/integrations/test_graph_trainer.py",),
    ),
    Mutant(
        "graph_trainer: one region for all codecs, the forward's and the backward's",
        "fp8compile/integrations/graph_trainer.py",
        "is_backward(node) != is_backward(node.prev) or ",
        "",
        ("tests/integrations/test_graph_trainer.py",),
    ),
    Mutant(
        "graph_trainer: a tensor that somebody else reads is not overwritten any more",
        "fp8compile/integrations/overwriting.py",
        "if sharing[_memory(written)] == 1 + _same_memory_from(node):",
        "if True:",
        ("tests/integrations/test_overwriting.py",),
    ),
    Mutant(
        "FSDP2: a gradient is counted by the graph and once more by the optimizer",
        "fp8compile/compiler/running_model.py",
        "[parts.get(id(p), p) for p in parameters]",
        "list(parameters)",
        ("tests/observe/test_fsdp.py",),
    ),
)
