"""Faults in how the storage of attention keeps what is known of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT_SUMS = "fp8compile/numerics/unit_sums.py"
SOFTMAX = "fp8compile/analysis/softmax.py"
CENTRING, RESULT = "fp8compile/numerics/centring.py", "fp8compile/saved/attention_result.py"
OF_CENTRE, OF_RESULT = ("tests/numerics/test_centring.py",), ("tests/saved/test_attention_result.py",)
OF_PRICE = ("tests/saved/test_price.py",)
OF_SUMS, OF_SOFTMAX = ("tests/numerics/test_unit_sums.py",), ("tests/analysis/test_softmax.py",)
OF_PASS = ("tests/passes/test_encode_saved_sums.py",)

ATTENTION = (
    Mutant(
        "unit sums: rows without a sum", UNIT_SUMS, "(total >= LEAST) & (total <= MOST)", "total <= MOST", OF_SUMS
    ),
    Mutant(
        "unit sums: an inf is divided by", UNIT_SUMS, "(total >= LEAST) & (total <= MOST)", "total >= LEAST", OF_SUMS
    ),
    Mutant(
        "unit sums: nothing is divided",
        UNIT_SUMS,
        "torch.where(known, total, 1.0)",
        "torch.where(known, 1.0, 1.0)",
        OF_SUMS,
    ),
    Mutant("softmax: any quotient", SOFTMAX, "packet(original(e)) not in EXPONENTIALS", "False", OF_SOFTMAX),
    Mutant("softmax: any sum", SOFTMAX, "not same(total.args[0], e)", "False", OF_SOFTMAX),
    Mutant(
        "softmax: broadcast along any axis",
        SOFTMAX,
        "if is_laid_along(place.shape, total, dims)",
        "if True",
        OF_SOFTMAX,
    ),
    Mutant(
        "softmax: masks of elements",
        SOFTMAX,
        "(at < 0 or statically_known_true(of_mask[at] == 1))",
        "True",
        OF_SOFTMAX,
    ),
    Mutant("softmax: any constant beside it", SOFTMAX, "a.args[0]) == 0]", "a.args[0]) is not None]", OF_SOFTMAX),
    Mutant(
        "softmax: views that cut rows",
        SOFTMAX,
        "if _same_product(before[dim + 1 :], after[at + 1 :])",
        "if True",
        OF_SOFTMAX,
    ),
    Mutant(
        "encode_saved: sums where a pole was kept away from",
        "fp8compile/saved/judge.py",
        "not self.sensitivity.needs_no_range(edge.backward, codec.format)",
        "False",
        OF_PASS,
    ),
    Mutant(
        "sensitivity: what is restored may be proven",
        "fp8compile/analysis/sensitivity/analysis.py",
        "self._is_small_still(used, fmt, Error(amplification=RESCALED))",
        "self.reason_to_stay_exact(used, fmt) is None",
        OF_PASS,
    ),
    Mutant(
        "stored: sums along another dimension",
        "fp8compile/saved/stored.py",
        "with_unit_sums(found, self.softmax_dim)",
        "with_unit_sums(found, 0)",
        OF_PASS,
    ),
    Mutant(
        "centring: no centre but a NaN",
        CENTRING,
        "torch.where(mean_N1C.abs() < LARGEST, mean_N1C, 0.0)",
        "mean_N1C",
        OF_CENTRE,
    ),
    Mutant(
        "centring: not the centre that is kept", CENTRING, "rounded_to_bf16(torch.where", "(torch.where", OF_CENTRE
    ),
    Mutant("centring: for however little", CENTRING, "amax * WORTH", "amax", OF_CENTRE),
    Mutant("centring: added to all", CENTRING, "torch.where(signed < 0, added, 0.0)", "added", OF_CENTRE),
    Mutant("centring: the result does not saturate", CENTRING, "found.clamp(-limit, limit)", "found", OF_CENTRE),
    Mutant("centring: the first tokens for all", CENTRING, "1, 0, None, step)", "1, 0, SAMPLES, 1)", OF_CENTRE),
    Mutant("attention result: heads for tokens", RESULT, "result.stride(2)", "result.shape[3]", OF_RESULT),
    Mutant("attention result: however few", RESULT, "if length >= FEWEST", "if length", OF_RESULT),
    Mutant("attention result: a part of it", RESULT, "or value.numel() != result.numel()", "", OF_RESULT),
    Mutant("attention result: with gaps", RESULT, "not (_is_dense(result) and _is_dense(value))", "False", OF_RESULT),
    Mutant(
        "encode_saved: a centre in any format",
        "fp8compile/saved/judge.py",
        " or codec.format is not INT8",
        "",
        ("tests/passes/test_encode_saved_centre.py",),
    ),
    Mutant(
        "price: all keys of a causal one",
        "fp8compile/cost/op_cost.py",
        '(0.5 if argument_of(node, "is_causal", False) else 1.0)',
        "1.0",
        (*OF_PRICE, "tests/cost/test_op_cost.py"),
    ),
    Mutant(
        "validation: 1 is True",
        "fp8compile/recipe/validation.py",
        " or isinstance(value, int) != isinstance(value, bool)",
        "",
        ("tests/recipe/test_recipe.py",),
    ),
)
