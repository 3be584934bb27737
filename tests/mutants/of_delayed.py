"""Faults in what delayed scaling learns of a clipped backward, among ranks and from saved states."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBERS = ("tests/numerics/test_delayed.py",)
TRAINING = "tests/linears/test_delayed.py"
ANOTHER = ("tests/linears/test_starved_operands.py::test_the_gradient_of_another_loss_is_remembered",)
RANKS = ("tests/linears/test_ranks.py",)
PARTED = ("tests/passes/test_part_scales.py",)
OLD = ("tests/linears/test_delayed_state.py::test_a_state_from_before_zeros_were_left_out_is_loaded",)

HISTORY, AGREED, GROWTH = (f"fp8compile/linears/{name}.py" for name in ("history", "agreed", "growth"))

DELAYED = (
    Mutant(
        "clipped backward: what is computed from clipped gradients is taken as it is",
        HISTORY,
        "(entry[late] * by[:-1])",
        "entry[late]",
        ANOTHER,
    ),
    Mutant(
        "part_scales: memory of scales passes for free",
        "fp8compile/fx/rows_apart.py",
        "first_of_rows(Tensor(a) x, int[] rows) -> Tensor(a)[]",
        "first_of_rows(Tensor x, int[] rows) -> Tensor[]",
        PARTED,
    ),
    Mutant(
        "part_scales: rows are taken in the order in which they are read",
        "fp8compile/fx/rows_apart.py",
        "return [every[row] for row in rows]",
        "return list(every[: len(rows)])",
        PARTED,
    ),
    Mutant(
        "part_scales: another column is a scale",
        "passes/part_scales.py",
        "if _one_of(first, 1) == 0}",
        "if _one_of(first, 1) is not None}",
        PARTED,
    ),
    Mutant(
        "part_scales: the user's own rows are taken",
        "passes/part_scales.py",
        " or SPLICED not in node.meta or len",
        " or len",
        PARTED,
    ),
    Mutant(
        "clipped backward: gradients are taken in the opposite order",
        HISTORY,
        "sorted((o.order,",
        "sorted((-o.order,",
        ANOTHER,
    ),
    Mutant(
        "clipped backward: the next graph begins anew",
        GROWTH,
        "== backward != OUTSIDE",
        "== backward == OUTSIDE",
        ANOTHER,
    ),
    Mutant(
        "clipped backward: the next backward goes on from it",
        GROWTH,
        "private.current_backward() == backward != OUTSIDE",
        "backward != OUTSIDE",
        (f"{TRAINING}::test_a_clipped_backward_enlarges_no_other_one",),
    ),
    Mutant(
        "clipped backward: an operand that was unknown counts",
        "fp8compile/numerics/delayed.py",
        " & (inv_scale > SMALLEST_INV_SCALE)",
        "",
        NUMBERS,
    ),
    Mutant(
        "clipped backward: what is not finite counts",
        "fp8compile/numerics/delayed.py",
        "counts = fell_back & (amax < torch.inf) &",
        "counts = fell_back &",
        NUMBERS,
    ),
    Mutant(
        "ptxas: Blackwell's is told of as if it were this one",
        "fp8compile/compiler/store_check.py",
        "torch.version.hip is None and torch.cuda.get_device_capability(device) < (10, 0)",
        "True",
        ("tests/compiler/test_store_check.py",),
    ),
    Mutant(
        "delayed late: what comes late has the smallest scale",
        "fp8compile/numerics/delayed.py",
        "torch.where(amax > 0, amax, largest[kinds])",
        "amax",
        ("tests/linears/test_starved_operands.py::test_an_expert_that_comes_late_has_the_scales_of_its_kind",),
    ),
    Mutant(
        "delayed late: all operands are of one kind",
        "fp8compile/numerics/delayed.py",
        "scatter_reduce(0, kinds, amax",
        "scatter_reduce(0, 0 * kinds, amax",
        NUMBERS,
    ),
    Mutant("ranks: each keeps its own history", AGREED, "then.view_as(self._then)", "self._then", RANKS),
    Mutant(
        "ranks: one that has learned nothing tells its last amax again",
        AGREED,
        "torch.minimum(self._entry, amaxes.amax(1))",
        "amaxes[:, 0]",
        RANKS,
    ),
    Mutant(
        "ranks: a long run tells its largest amax of all",
        AGREED,
        "torch.minimum(self._entry, amaxes.amax(1))",
        "self._entry",
        RANKS,
    ),
    Mutant("ranks: one that did not run has all measure", AGREED, " & (measured == 0)", "", RANKS),
    Mutant(
        "state: one without patience is refused",
        HISTORY,
        'state.get("patience", torch.tensor([0, PATIENCE]))',
        'state["patience"]',
        OLD,
    ),
    Mutant(
        "state: zeros stay among the amaxes",
        HISTORY,
        'without_zeros(state["amaxes"].to(device))',
        'state["amaxes"].to(device)',
        OLD,
    ),
)
