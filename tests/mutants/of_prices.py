"""Faults in what codes of a saved value are predicted to cost, and in what is left for that."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PRICE, KERNELS = "fp8compile/saved/price.py", "fp8compile/cost/generated.py"
ALLOWANCE = "fp8compile/saved/allowance.py"
CUT_FOR_TIME, OF_CUT = "passes/cut_for_time.py", ("tests/passes/test_cut_for_time.py",)
OF_ALLOWANCE = ("tests/saved/test_allowance.py",)
OF_PRICE, OF_KERNELS = ("tests/saved/test_price.py",), ("tests/cost/test_generated.py",)

PRICES = (
    Mutant(
        "price: encodes by themselves are free",
        PRICE,
        "return self._apart(whole + codes, instructions)",
        "return 0.0",
        OF_PRICE,
    ),
    Mutant(
        "price: decodes for matmuls are free",
        PRICE,
        "return self._apart(codes + whole, instructions)",
        "return 0.0",
        OF_PRICE,
    ),
    Mutant("price: nothing has a worth", PRICE, "self.us <= max_cost * self.worth_us", "self.us <= 0.0", OF_PRICE),
    Mutant("price: a norm's kernel encodes", PRICE, "if not kernel.sums_rows:", "if True:", OF_PRICE),
    Mutant(
        "price: plain writes nothing for the backward",
        PRICE,
        'freed = nbytes(made.meta["val"]) if self._is_for_the_backward_alone(made, kernel.nodes) else 0',
        "freed = 0",
        OF_PRICE,
    ),
    Mutant("price: instructions of encodes are free", PRICE, "each * numel(value)", "0", OF_PRICE),
    Mutant("price: sides are kept for nothing", PRICE, "ENCODE + SIDES * keeps_sides", "ENCODE", OF_ALLOWANCE),
    Mutant(
        "price: what is made again for a product is not written",
        PRICE,
        "self._apart(sum(reads.values()) + whole, again.instructions)",
        "self._apart(sum(reads.values()), again.instructions)",
        OF_ALLOWANCE,
    ),
    Mutant(
        "encode_saved: whatever it costs",
        "fp8compile/saved/plan.py",
        "if e.backward in dear else found",
        "if e.backward in () else found",
        OF_PRICE,
    ),
    Mutant("allowance: by default codes have no price", ALLOWANCE, 'else "auto"', 'else "any"', OF_PRICE),
    Mutant("allowance: who asks for memory pays as well", ALLOWANCE, "recipe.asks_for_memory or ", "", OF_PRICE),
    Mutant(
        "allowance: who checkpoints pays as well",
        ALLOWANCE,
        "return any(map(has_regions, self._graphs))",
        "return False",
        OF_PRICE,
    ),
    Mutant(
        "allowance: a choice of bits measures what pays alone",
        ALLOWANCE,
        "ctx.measures_saved or ",
        "",
        OF_ALLOWANCE,
    ),
    Mutant(
        "allowance: a step may take any time longer",
        ALLOWANCE,
        "not us or spent + us <= self._limit",
        "True",
        OF_ALLOWANCE,
    ),
    Mutant("allowance: what linears save is lost", ALLOWANCE, " + self._split.to_spend_us", "", OF_ALLOWANCE),
    Mutant(
        "allowance: all that linears save is spent",
        "fp8compile/compiler/hooks.py",
        "OF_GAIN * sum(",
        "sum(",
        OF_ALLOWANCE,
    ),
    Mutant(
        "allowance: the dearest bytes first", ALLOWANCE, "option.price.rate)", "-option.price.rate)", OF_ALLOWANCE
    ),
    Mutant(
        "recompute_kept: whatever it takes",
        "passes/recompute_kept.py",
        "edge.forward in fixed or edge.backward not in worth",
        "edge.forward in fixed",
        OF_ALLOWANCE,
    ),
    Mutant(
        "pipeline: our cut where time counts",
        "fp8compile/compiler/pipeline.py",
        "rewrites(at) and not counts_time(at.ctx, [at.graph])",
        "rewrites(at)",
        OF_ALLOWANCE,
    ),
    Mutant(
        "cut_for_time: codes are made again as ever",
        CUT_FOR_TIME,
        "node.meta[private.RECOMPUTE] = CheckpointPolicy.MUST_SAVE",
        "pass",
        OF_CUT,
    ),
    Mutant(
        "cut_for_time: codes look as if the user kept them",
        CUT_FOR_TIME,
        "node.meta.pop(private.RECOMPUTE, None)",
        "pass",
        OF_CUT,
    ),
    Mutant(
        "cut_for_time: what the user asked for is overwritten",
        CUT_FOR_TIME,
        " and private.RECOMPUTE not in n.meta",
        "",
        OF_CUT,
    ),
    Mutant("cut_for_time: a byte a parameter", CUT_FOR_TIME, " and n not in fixed", "", OF_CUT),
    Mutant(
        "recipe: who wants no codes asks for memory",
        "fp8compile/recipe/recipe.py",
        'saved.format not in ("off", FIELDS["saved.format"])',
        'saved.format != FIELDS["saved.format"]',
        OF_CUT,
    ),
    Mutant(
        "rates: FP32 is multiplied at BF16's rate",
        "fp8compile/cost/device_rates.py",
        "self.bf16 if itemsize <= 2 else self.fp32",
        "self.bf16",
        ("tests/cost/test_op_cost.py",),
    ),
    Mutant(
        "rates: TF32 is for nobody",
        "fp8compile/recipe/rates.py",
        "torch.backends.cuda.matmul.allow_tf32",
        "False",
        ("tests/linears/test_paying.py",),
    ),
    Mutant(
        "op_cost: a convolution's backward has one product",
        "fp8compile/cost/op_cost.py",
        "sum(map(bool, wanted[:2]))",
        "1",
        ("tests/cost/test_op_cost.py",),
    ),
    Mutant(
        "generated: one kernel on both sides of a product",
        KERNELS,
        "is_generated(n) and self._products[n] in allowed",
        "is_generated(n)",
        OF_KERNELS,
    ),
    Mutant(
        "generated: what is saved is made apart",
        KERNELS,
        "{products, 0} if self.is_backward",
        "{products} if self.is_backward",
        OF_KERNELS,
    ),
    Mutant(
        "generated: instructions wait for bytes",
        KERNELS,
        "max(num_bytes / rates.copy, instructions / rates.lanes)",
        "(num_bytes / rates.copy + instructions / rates.lanes)",
        OF_KERNELS,
    ),
    Mutant(
        "generated: a table joins all that read it", KERNELS, " and _size(operand) >= _size(node)", "", OF_KERNELS
    ),
)
