"""The table of mutants: one small fault each, where it is put, and the nearest tests, which are to notice it.

``old`` stands once in its file; the runner (``run.py``) refuses a table that does not fit the sources any more. Faults are
such as a hurried change makes: a bound on the wrong side, a case forgotten, the last for the first, a mark not handed on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: area and what is wrong.
        file: from the root of the repository.
        old, new: the text that stands there once, and what is put in its place.
        tests: what pytest is asked for, nearest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


NUMERICS = (
    Mutant(
        "scaling: codes of an infinite amax",
        "fp8compile/numerics/scaling.py",
        "finite = amax < torch.inf",
        "finite = amax <= torch.inf",
        ("tests/numerics/test_scaling.py", "tests/numerics/test_codecs.py"),
    ),
    Mutant(
        "scaling: codes do not saturate",
        "fp8compile/numerics/scaling.py",
        "scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)",
        "scaled.to(fmt.dtype)",
        ("tests/numerics/test_scaling.py",),
    ),
    Mutant(
        "scaling: decoded values do not saturate",
        "fp8compile/numerics/scaling.py",
        "inv_scale_value(inv_scale)).clamp(-limit, limit)",
        "inv_scale_value(inv_scale))",
        ("tests/numerics/test_scaling.py",),
    ),
    Mutant(
        "scaling: E8M0 rounded down",
        "fp8compile/numerics/scaling.py",
        "((bits & _MANTISSA_MASK) > 0)",
        "((bits & _MANTISSA_MASK) < 0)",
        ("tests/numerics/test_scaling.py",),
    ),
    Mutant(
        "codecs: tail under the first group's scale",
        "fp8compile/numerics/codecs.py",
        "inv_scale[:, -1:].expand(rows, tail)",
        "inv_scale[:, :1].expand(rows, tail)",
        ("tests/numerics/test_codecs.py",),
    ),
    Mutant(
        "codecs: the worse of two formats",
        "fp8compile/numerics/codecs.py",
        "error_i < error_f",
        "error_i > error_f",
        ("tests/numerics/test_codecs.py",),
    ),
    Mutant(
        "dither: biased where codes are not even steps",
        "fp8compile/numerics/dither.py",
        "chance = rest * (1 - bend * (1 - rest))",
        "chance = rest * (1 - 0 * bend)",
        ("tests/numerics/test_dither.py",),
    ),
    Mutant(
        "rounding: the largest finite value becomes inf",
        "fp8compile/numerics/rounding.py",
        "pattern.clamp_max(GRIDS[dtype].largest)",
        "pattern.clamp_max(GRIDS[dtype].largest + 1)",
        ("tests/numerics/test_rounding.py",),
    ),
    Mutant(
        "split weights: ties always up",
        "fp8compile/numerics/split_weights.py",
        "odd = (quotient >> 32) & 1",
        "odd = 1",
        ("tests/numerics/test_split_weights.py",),
    ),
    Mutant(
        "histogram: edge of FP16 before it is rounded",
        "fp8compile/numerics/histogram.py",
        "small=EDGE + 4",
        "small=EDGE",
        ("tests/numerics/test_histogram.py", "tests/test_slot.py::test_generated_code_counts_what_it_stores"),
    ),
    Mutant(
        "states: a range is spread beyond the format",
        "fp8compile/numerics/range_expansion.py",
        "k = torch.floor(",
        "k = torch.ceil(",
        ("tests/numerics/test_state_expanded.py", "tests/numerics/test_state_properties.py"),
    ),
    Mutant(
        "states: the larger of two amaxes",
        "fp8compile/numerics/four_bit.py",
        "linear_values(codes_RC, torch.minimum(",
        "linear_values(codes_RC, torch.maximum(",
        ("tests/numerics/test_state_four_bit.py",),
    ),
)

PASSES = (
    Mutant(
        "encode_saved: the memory order for its inverse",
        "passes/encode_saved.py",
        "tuple(order.index(d) for d in range(len(order)))",
        "tuple(order)",
        ("tests/passes/test_encode_saved_layouts.py",),
    ),
    Mutant(
        "encode_saved: values of an FP32 island are encoded",
        "passes/encode_saved.py",
        "(WIDENED in storage_root(edge.made).meta and",
        "(False and",
        ("tests/passes/test_widen_unsafe_ops.py",),
    ),
    Mutant(
        "recompute_kept: what values are made from is dropped too",
        "passes/recompute_kept.py",
        "fixed.update(",
        "set().update(",
        ("tests/passes/test_recompute_kept_fixed.py",),
    ),
    Mutant(
        "split: the no-version-check mark is lost",
        "fp8compile/split.py",
        "value.made.meta[NO_VERSION_CHECK] = True",
        "pass",
        ("tests/test_split.py",),
    ),
    Mutant(
        "split: one more value is kept last, not first",
        "fp8compile/split.py",
        "self.edges.insert(0, ",
        "self.edges.insert(len(self.edges), ",
        ("tests/test_split.py", "tests/test_slot.py::test_counts_equal_those_of_eager_hooks_exactly"),
    ),
    Mutant(
        "operands: codes of another format are shared",
        "fp8compile/operands.py",
        "key = (base, width, axis, fmt)\n        if key not in self._encoded",
        "key = (base, width, axis)\n        if key not in self._encoded",
        ("tests/test_operands.py",),
    ),
    Mutant(
        "quantize_linears: gradients in E4M3",
        "passes/quantize_linears.py",
        'gradient = E5M2 if recipe.linear_formats == "hybrid" else E4M3',
        "gradient = E4M3",
        ("tests/passes/test_quantize_linears.py::test_every_product_of_every_linear_is_rewritten",),
    ),
    Mutant(
        "share_casts: casts to different dtypes are one",
        "passes/share_casts.py",
        "first.setdefault(node.args, node)",
        "first.setdefault(node.args[:1], node)",
        ("tests/passes/test_share_casts_dtypes.py",),
    ),
    Mutant(
        "sum_bias_gradients: sums in 16 bits",
        "passes/sum_bias_gradients.py",
        "blocks.sum(1, dtype=torch.float32)",
        "blocks.sum(1)",
        ("tests/passes/test_sum_bias_gradients.py",),
    ),
    Mutant(
        "saturate_gradients: other dtypes are clipped too",
        "passes/saturate_gradients.py",
        'root.meta["val"].dtype == torch.float16 and ',
        "",
        ("tests/passes/test_saturate_gradients.py", "tests/test_slot.py"),
    ),
    Mutant(
        "observe_gradients: lines of the backward stand first",
        "passes/observe_gradients.py",
        "(0, 0, of_forward, lines - len(values) - len(rest))",
        "(0, 0, 0, of_forward + lines - len(values) - len(rest))",
        ("tests/test_slot.py::test_counts_equal_those_of_eager_hooks_exactly",),
    ),
    Mutant(
        "observe_forward: each amax on its neighbour's line",
        "passes/observe_forward.py",
        "zip(by_groups, lines, strict=True)",
        "zip(reversed(by_groups), lines, strict=True)",
        (
            "tests/test_slot.py::test_counts_equal_those_of_eager_hooks_exactly",
            "tests/passes/test_observe_gradients.py",
        ),
    ),
)

ANALYSES = (
    Mutant(
        "sensitivity: negative powers down to -1 are no poles",
        "fp8compile/sensitivity/walk.py",
        "if exponent < 1:",
        "if exponent < -1:",
        ("tests/sensitivity/test_powers.py",),
    ),
    Mutant(
        "formats_by_use: compared with anything",
        "fp8compile/formats_by_use.py",
        "bool(user.args[1] == 0)",
        "True",
        ("tests/test_formats_by_use.py",),
    ),
    Mutant(
        "flow: what the user puts in FP32 is not seen",
        "fp8compile/flow.py",
        "inside or _is_contraction(node) or _is_user_upcast(node)",
        "inside or _is_contraction(node)",
        (
            "tests/passes/test_encode_saved.py::test_what_the_user_puts_in_fp32_stays_fp32",
            "tests/passes/test_quantize_linears.py::test_what_the_user_upcast_stays",
        ),
    ),
    Mutant(
        "products: M for N",
        "fp8compile/products.py",
        'weight_on_the_right=kinds[1] == "parameter"',
        'weight_on_the_right=kinds[0] == "parameter"',
        ("tests/passes/test_quantize_linears.py::test_every_product_of_every_linear_is_rewritten",),
    ),
    Mutant(
        "ranges: an exponential never vanishes",
        "fp8compile/ranges/rules.py",
        "monotone(x, math.exp, at_least(x.lower) < math.log(SMALLEST_NORMAL))",
        "monotone(x, math.exp, False)",
        ("tests/ranges/test_wrong_sides.py",),
    ),
    Mutant(
        "ranges: a cube is a square",
        "fp8compile/ranges/rules.py",
        "if n == int(n) and n % 2 == 0:",
        "if n == int(n):",
        ("tests/ranges/test_rules.py", "tests/ranges/test_random.py"),
    ),
    Mutant(
        "ranges: a softmax over other dimensions than its maximum",
        "fp8compile/ranges/relations.py",
        "or not dims <= set(reduced(node))",
        "or False",
        ("tests/ranges/test_wrong_sides.py",),
    ),
    Mutant(
        "islands: a quotient of what flushes to zero",
        "fp8compile/islands.py",
        "return not self._fits(node) or (is_pole(user, node) and not self._is_off_zero(node))",
        "return not self._fits(node)",
        ("tests/passes/test_widen_unsafe_ops.py", "tests/test_islands.py"),
    ),
    Mutant(
        "islands: the backward stays in 16 bits",
        "fp8compile/islands.py",
        "belongs = number in whole or ",
        "belongs = ",
        ("tests/passes/test_widen_unsafe_ops.py", "tests/test_islands.py"),
    ),
    Mutant(
        "liveness: nothing outlives its operation",
        "fp8compile/liveness.py",
        "leaving[max(end[node], at)] += size",
        "leaving[at] += size",
        ("tests/test_memory.py::test_working_memory_is_what_no_kernel_fuses_beyond_what_is_kept",),
    ),
    Mutant(
        "memory: a frozen parameter has a gradient",
        "fp8compile/memory.py",
        "for p in model.parameters() if p.requires_grad]",
        "for p in model.parameters()]",
        ("tests/test_memory.py",),
    ),
)

AROUND = (
    Mutant(
        "store: the reports of the first model",
        "fp8compile/store.py",
        "serving[-1].alive",
        "serving[0].alive",
        ("tests/test_store_serving.py",),
    ),
    Mutant(
        "recipe: a pattern matches no module beneath",
        "fp8compile/module_recipes.py",
        "for n in range(1, len(parts) + 1)",
        "for n in range(len(parts), len(parts) + 1)",
        ("tests/test_recipe.py",),
    ),
    Mutant(
        "overflow: a mask of -inf is the culprit",
        "fp8compile/overflow.py",
        "if pair[0] == made[0] or _held_nan(",
        "if True or _held_nan(",
        ("tests/test_overflow.py",),
    ),
)

AMP = (
    Mutant(
        "amp: -inf of other dtypes clipped to +65504",
        "fp8compile/amp/gradients.py",
        "neginf=-FP16_MAX",
        "neginf=FP16_MAX",
        ("tests/amp/test_interrupted.py",),
    ),
    Mutant(
        "amp: quiet is not reset when the scale is halved",
        "fp8compile/amp/policies.py",
        "quiet = torch.where(lower, 0, quiet).to(torch.int32)",
        "quiet = quiet.to(torch.int32)",
        ("tests/amp/test_policies.py",),
    ),
    Mutant(
        "amp: quiet is not reset when the scale is doubled",
        "fp8compile/amp/policies.py",
        "torch.where(settled & some, 0, now.quiet)",
        "now.quiet",
        ("tests/amp/test_policies.py",),
    ),
    Mutant(
        "amp: the dynamic scale grows to inf",
        "fp8compile/amp/policies.py",
        "torch.where(due & torch.isfinite(grown), grown, now.scale)",
        "torch.where(due, grown, now.scale)",
        ("tests/amp/test_policies.py", "tests/amp/test_dynamic.py"),
    ),
    Mutant(
        "amp: inf in FP32 rows says nothing",
        "fp8compile/amp/histogram.py",
        "weights[i, [INF, NAN], 1] = 1",
        "weights[i, [INF, NAN], 1] = 0",
        ("tests/amp/test_histogram_mode.py",),
    ),
    Mutant(
        "amp: bad updates count though good ones are between",
        "fp8compile/amp/collapse.py",
        "self.bad_in_a_row + 1 if verdict < 0 else 0",
        "self.bad_in_a_row + (verdict < 0)",
        ("tests/amp/test_collapse.py",),
    ),
    Mutant(
        "amp: means of ranks weigh alike",
        "fp8compile/amp/accumulation.py",
        "mean.float() * (self._counts[i] / total)",
        "mean.float()",
        ("tests/amp/test_accumulation.py",),
    ),
)

OPTIM = (
    Mutant(
        "optim: short groups draw the bits of full ones",
        "fp8compile/optim/plan.py",
        "first + self.offset",
        "first",
        ("tests/optim/test_rows.py",),
    ),
    Mutant(
        "optim: Adam's bias correction of v is of m",
        "fp8compile/optim/updates.py",
        'root = states.get("max_exp_avg_sq", v).sqrt() / ((1 - n["beta2"] ** step)',
        'root = states.get("max_exp_avg_sq", v).sqrt() / ((1 - n["beta1"] ** step)',
        ("tests/optim/test_against_torch.py",),
    ),
    Mutant(
        "optim: the low bits point away from the master",
        "fp8compile/optim/checkpoint.py",
        "master.abs() > p.float().abs(), 127, -128",
        "master.abs() > p.float().abs(), -128, 127",
        ("tests/optim/test_checkpoint.py::test_a_tie_keeps_the_weight_that_is_there",),
    ),
    Mutant(
        "optim: a pattern on names goes before an override",
        "fp8compile/optim/placing.py",
        "asked = overridden(p) or names.overridden.get(id(p))",
        "asked = None if patterns else overridden(p) or names.overridden.get(id(p))",
        ("tests/optim/test_overrides.py", "tests/optim/test_placing.py"),
    ),
    Mutant(
        "optim: shards of columns are encoded",
        "fp8compile/optim/sharding.py",
        "if dims != {0}:",
        "if not dims:",
        ("tests/optim/test_distributed.py::test_shards_of_columns_keep_fp32",),
    ),
)

MUTANTS = (*NUMERICS, *PASSES, *ANALYSES, *AROUND, *AMP, *OPTIM)
