"""Faults in how values that norms read are stored: rows, statistics, sides of edges."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NORMS = (
    Mutant(
        "groups: they span rows",
        "fp8compile/numerics/groups.py",
        "while k < len(shape) and _is_short(shape[-k:])",
        "while k < len(shape) and (True or _is_short(shape[-k:]))",
        ("tests/numerics/test_groups.py",),
    ),
    Mutant(
        "rows: a pair representation is taken for heads of tokens",
        "fp8compile/encoding/saved_rows.py",
        "and _is_of_attention(edge)",
        "and True",
        ("tests/encoding/test_saved_rows.py",),
    ),
    Mutant(
        "save_normalised: what a parameter scales is saved as a product",
        "passes/save_normalised.py",
        " or _is_scaled(early)",
        "",
        ("tests/passes/test_save_normalised.py",),
    ),
    Mutant(
        "save_normalised: the forward reads what is saved",
        "passes/save_normalised.py",
        "early if has_codes else _copied(early)",
        "early",
        ("tests/passes/test_save_normalised.py",),
    ),
    Mutant(
        "sensitivity: what is normalised may be made of codes",
        "fp8compile/analysis/sensitivity/walk.py",
        "if self.of.is_normalised(node):",
        "if False:",
        ("tests/passes/test_save_normalised.py",),
    ),
    Mutant(
        "norms: no deviation, though channels differ",
        "fp8compile/encoding/about.py",
        "None if within else norm.scale",
        "None",
        ("tests/passes/test_encode_saved_norms.py", "tests/encoding/test_about.py"),
    ),
    Mutant(
        "norms: a mean beside something else is one",
        "fp8compile/analysis/norms.py",
        "if direct is not None and itself(direct) is value and plain and node.args[0] is direct:",
        "if direct is not None:",
        ("tests/analysis/test_norms.py",),
    ),
    Mutant(
        "recomputed: constants are not known",
        "fp8compile/analysis/recomputed.py",
        "if operands else forward.find_nodes(op=late.op, target=late.target)",
        "if operands else ()",
        ("tests/analysis/test_recomputed.py", "tests/passes/test_encode_saved_dynamic.py"),
    ),
    Mutant(
        "recomputed: random numbers are the same",
        "fp8compile/analysis/recomputed.py",
        " or draws_random_numbers(late)",
        "",
        ("tests/analysis/test_recomputed.py",),
    ),
    Mutant(
        "recomputed: an operation on sizes of a run has none in the forward",
        "fp8compile/analysis/recomputed.py",
        "operands = [n for n in late.all_input_nodes if not is_size(n)]",
        "operands = [n for n in late.all_input_nodes if not is_size(n)]\n"
        "    if len(operands) < len(late.all_input_nodes):\n        return None",
        ("tests/passes/test_encode_saved_dynamic.py",),
    ),
    Mutant(
        "about: an error of E4M3 about a mean is relative to the value",
        "fp8compile/encoding/about.py",
        "shifted=self.mean is not None",
        "shifted=False",
        ("tests/passes/test_encode_saved_norms.py",),
    ),
    Mutant(
        "about: a range bounds the error of what is stored in deviations",
        "fp8compile/encoding/about.py",
        "2.0 if self.scale is None else math.inf",
        "2.0",
        ("tests/passes/test_encode_saved_norms.py",),
    ),
    Mutant(
        "kept_beside: what is kept for codes alone is not counted",
        "passes/encode_saved.py",
        "for n in made) + more",
        "for n in made)",
        ("tests/encoding/test_kept_beside.py",),
    ),
    Mutant(
        "kept_beside: what the backward makes again is kept besides",
        "fp8compile/encoding/kept_beside.py",
        "if node in self._again:",
        "if False:",
        ("tests/encoding/test_kept_beside.py",),
    ),
    Mutant(
        "kept_beside: what is made again stands where it stood",
        "fp8compile/encoding/kept_beside.py",
        "before.prepend(each)",
        "pass",
        ("tests/encoding/test_kept_beside.py",),
    ),
    Mutant(
        "frozen norms: statistics that the forward overwrites are read behind it",
        "fp8compile/encoding/saved_judge.py",
        "if not all(map(split.costs_nothing_to_keep, given)):",
        "if False:",
        ("tests/passes/test_encode_saved_frozen.py",),
    ),
    Mutant(
        "frozen norms: none is found",
        "fp8compile/analysis/frozen_norms.py",
        "{**_frozen_norms_of(graph), **norms_of(graph)}",
        "norms_of(graph)",
        ("tests/passes/test_encode_saved_frozen.py",),
    ),
    Mutant(
        "about: nobody knows the sizes of its views",
        "fp8compile/encoding/about.py",
        "views, tuple(sizes))",
        "views)",
        ("tests/passes/test_encode_saved_dynamic.py",),
    ),
    Mutant(
        "sides: a code goes away from its value",
        "fp8compile/encoding/sides.py",
        "torch.where(is_above, 1, -1)",
        "torch.where(is_above, -1, 1)",
        ("tests/encoding/test_sides.py",),
    ),
    Mutant(
        "sides: an edge of another code counts as known",
        "fp8compile/encoding/sides.py",
        "any(n in inexact or n not in in_forward for n in others)",
        "any(n not in in_forward for n in others)",
        ("tests/encoding/test_sides.py",),
    ),
)
