"""Faults in what a GPU takes in few instructions: short forms of codecs, first halves of amaxes, amaxes of weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PASS = ("tests/passes/test_shorten_codecs.py",)
TILES = ("tests/compiler/test_tile_scales.py",)
SIGMOIDS = ("tests/passes/test_share_sigmoids.py",)
FORMS = ("tests/numerics/test_code_forms.py",)
FIRST = ("tests/linears/test_first_amax.py",)
WEIGHTS = ("tests/linears/test_weight_amaxes.py",)
HELD = ("tests/compiler/test_group_kernels.py",)
BLOCKS = ("tests/compiler/test_code_kernels.py",)
LOWERED = "tests/sm90/test_instructions_sm90.py::"

SHORT_FORMS = (
    Mutant(
        "loop loads: what a loop loaded is known behind it",
        "fp8compile/compiler/inductor.py",
        "with_scales_of_tiles(with_loads_in_loops(inner))",
        "with_scales_of_tiles(inner)",
        ("tests/sm90/test_loops_sm90.py",),
    ),
    *(
        Mutant(f"share_sigmoids: {fault}", "passes/share_sigmoids.py", sound, broken, SIGMOIDS)
        for fault, sound, broken in (
            ("two draws of random numbers are one", " or not (is_pointwise(a) or is_view(a))", ""),
            (
                "16-bit quotients are rewritten",
                ' and x.meta["val"].dtype == quotient.meta["val"].dtype == torch.float32',
                "",
            ),
            ("any quotient is a SiLU", "    return node is x and is_tensor", "    return is_tensor"),
            (
                "SiLUs of other values are rewritten",
                "any(_is_same(quotient.args[0], value) for value in values)",
                "values",
            ),
        )
    ),
    *(
        Mutant(f"tile scales: {fault}", "fp8compile/compiler/tile_scales.py", sound, broken, TILES)
        for fault, sound, broken in (
            ("a block may span the end of a row", " and step * length % block == 0", ""),
            ("a block may span two groups", "step * divisor % block == 0 and ", ""),
            (
                "what depends on the element too is taken",
                "    if variable in index.xreplace",
                "    if variable not in index.xreplace",
            ),
            ("sums are taken too", " or kernel.inside_reduction", ""),
            ("each number has one name", "if computed not in names:", "if not names:"),
        )
    ),
    Mutant(
        "tile scales: each element loads its own",
        "fp8compile/compiler/inductor.py",
        "with_tiles_for_codes(with_scales_of_tiles(with_loads_in_loops(inner)))",
        "with_tiles_for_codes(with_loads_in_loops(inner))",
        (f"{LOWERED}test_a_tile_loads_the_scale_of_a_group_once",),
    ),
    Mutant(
        "shorten_codecs: a conversion saturates at another limit than its clamp",
        "passes/shorten_codecs.py",
        " or found[1] != fmt.max:",
        ":",
        PASS,
    ),
    Mutant(
        "shorten_codecs: the user's own arithmetic is rewritten",
        "passes/shorten_codecs.py",
        "if SPLICED in node.meta and _on_a_gpu(node)",
        "if _on_a_gpu(node)",
        PASS,
    ),
    Mutant(
        "shorten_codecs: integers that were cut are rounded",
        "passes/shorten_codecs.py",
        "if value.target is not aten.round.default:",
        "if not value.all_input_nodes:",
        PASS,
    ),
    Mutant(
        "shorten_codecs: one limit is taken for both",
        "passes/shorten_codecs.py",
        "most > 0 and least == -most",
        "most > 0",
        PASS,
    ),
    Mutant(
        "code forms: bits of signed numbers are compared",
        "fp8compile/numerics/code_forms.py",
        "return x.abs().float().view(torch.int32)",
        "return x.float().view(torch.int32)",
        FORMS,
    ),
    Mutant(
        "code forms: integers are rounded in steps of two",
        "fp8compile/fx/code_lowerings.py",
        "TO_INTEGER = 1.5 * 2.0**23",
        "TO_INTEGER = 1.5 * 2.0**24",
        FORMS,
    ),
    Mutant(
        "first amax: a norm's result is taken in groups",
        "fp8compile/linears/first_amax.py",
        "return None if any(map(is_reduction, computed_from(value))) else",
        "return",
        FIRST,
    ),
    Mutant(
        "first amax: what is in memory is stored again",
        "fp8compile/linears/first_amax.py",
        " or not is_pointwise(value):\n        return False",
        ":\n        return False",
        FIRST,
    ),
    Mutant(
        "first amax: an error function is computed for the amax and for the codes",
        "fp8compile/linears/operands.py",
        "(self.stores_dear and is_dear(base)) or not",
        "not",
        (f"{LOWERED}test_an_error_function_is_computed_once_in_a_half[both]",),
    ),
    Mutant(
        "weight amaxes: autocast's weight has the scale of what was rounded",
        "fp8compile/fx/scales_at_once.py",
        "exact_inv_scale(amax.to(rounded),",
        "exact_inv_scale(amax,",
        WEIGHTS,
    ),
    Mutant(
        "scales at once: generated code rounds half up",
        "fp8compile/fx/scales_at_once.py",
        "ops.constant(BF16_HALF - 1, bits)",
        "ops.constant(BF16_HALF, bits)",
        ("tests/fx/test_scales_at_once.py",),
    ),
    Mutant(
        "scales at once: a launch for each",
        "fp8compile/fx/scales_at_once.py",
        "TOGETHER = 16",
        "TOGETHER = 1",
        ("tests/sm90/test_linears_sm90.py::test_kernels_and_bytes[linear_only]",),
    ),
    Mutant(
        "weight amaxes: weights of two dtypes in one list",
        "fp8compile/linears/weight_amaxes.py",
        'lists[fmt, weight.meta["val"].dtype, value.meta["val"].dtype][value]',
        'lists[fmt, torch.float32, value.meta["val"].dtype][value]',
        WEIGHTS,
    ),
    Mutant(
        "weight amaxes: a launch for each weight",
        "fp8compile/linears/weight_amaxes.py",
        "FEWEST = 2",
        "FEWEST = 1000",
        (*WEIGHTS, f"{LOWERED}test_amaxes_of_weights_are_one_call"),
    ),
    Mutant(
        "group kernels: sums down columns are held",
        "fp8compile/compiler/group_kernels.py",
        " and all(map(sums_along_rows, features.reduction_nodes()))",
        "",
        HELD,
    ),
    Mutant(
        "group kernels: groups are walked along",
        "fp8compile/compiler/inductor.py",
        "with_groups_held(with_tiles_for_codes(with_scales_of_tiles(with_loads_in_loops(inner))))",
        "with_tiles_for_codes(with_scales_of_tiles(with_loads_in_loops(inner)))",
        (f"{LOWERED}test_groups_are_held_in_registers",),
    ),
    Mutant(
        "code kernels: who asks for tuning does not get it",
        "fp8compile/compiler/code_kernels.py",
        "None if is_tuned or is_decided else",
        "None if is_decided else",
        BLOCKS,
    ),
    Mutant(
        "code kernels: kernels without codes are not tuned either",
        "fp8compile/compiler/code_kernels.py",
        "return any(dtype(dep.name) in STORED for dep in writes)",
        "return any(dtype(dep.name) for dep in writes)",
        BLOCKS,
    ),
    Mutant(
        "code kernels: a block may be longer than its kernel",
        "fp8compile/compiler/code_kernels.py",
        "return blocks if fits else None",
        "return blocks",
        BLOCKS,
    ),
    Mutant(
        "shorten_codecs: a scale is that of a format with another largest number",
        "passes/shorten_codecs.py",
        "if _operand(share, aten.mul.Tensor, 1.0 / fmt.max) is amax:",
        "if share.all_input_nodes[0] is amax:",
        PASS,
    ),
    Mutant(
        "shorten_codecs: a scale bounded elsewhere is one of ours",
        "passes/shorten_codecs.py",
        "share = _operand(bounded, aten.clamp_min.default, SMALLEST_INV_SCALE)",
        "share = bounded.all_input_nodes[0]",
        PASS,
    ),
    Mutant(
        "shorten_codecs: a factor that broadcasts is what is encoded",
        "passes/shorten_codecs.py",
        ' or x.meta["val"].shape != value.meta["val"].shape:',
        ":",
        PASS,
    ),
    Mutant(
        "code forms: a scale is not rounded as it is stored",
        "fp8compile/fx/code_lowerings.py",
        "if scale_dtype == torch.bfloat16:",
        "if scale_dtype == torch.float16:",
        FORMS,
    ),
    Mutant(
        "code forms: a scale of infinity is finite",
        "fp8compile/fx/code_lowerings.py",
        "return ops.where(is_finite, found,",
        "return ops.where(ops.ge(value, value), found,",
        FORMS,
    ),
)
