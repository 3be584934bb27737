"""Faults in scales of blocks, and in formats by direction."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CODECS = ("tests/numerics/test_blocks.py",)
PASS = "tests/passes/test_quantize_linears_blocks.py::"
BY_HAND = (f"{PASS}test_blocks_run_along_the_contracted_dimension_bit_for_bit[blockwise-(300, 144, 80)-eager]",)
RECIPES = ("tests/recipe/test_recipe.py",)

BLOCKS = (
    Mutant(
        "blocks: a short block under the first one's scale",
        "fp8compile/numerics/blocks.py",
        "last = inv_scale.narrow(dim, full, 1)",
        "last = inv_scale.narrow(dim, 0, 1)",
        CODECS,
    ),
    Mutant(
        "blocks: operands scaled across the contracted dimension",
        "fp8compile/linears/block_operands.py",
        '(side == "left") != is_across(views)',
        '(side == "left") == is_across(views)',
        BY_HAND,
    ),
    Mutant(
        "blocks: weights in lines",
        "fp8compile/linears/block_operands.py",
        "if mode == BLOCKWISE and is_weight:",
        "if mode == BLOCKWISE and False:",
        BY_HAND,
    ),
    Mutant(
        "blocks: a weight on the left is no weight",
        "fp8compile/analysis/linears.py",
        "left, right = (uncast(operand) is self.weight for operand in self.operands)",
        "left, right = False, True",
        (f"{PASS}test_a_weight_on_the_left_has_the_blocks_of_a_weight",),
    ),
    Mutant(
        "blocks: two codecs of a value share one encoding",
        "fp8compile/linears/block_operands.py",
        "value, codec = _Value(base, width), codec_of(mode, fmt, is_weight, axis)",
        "value, codec = _Value(base, width), codec_of(mode, fmt, is_weight, 1)",
        BY_HAND,
    ),
    Mutant(
        "blocks: a device is not told",
        "fp8compile/linears/block_operands.py",
        "if not recipe.linears.emulate:",
        "if False:",
        (f"{PASS}test_a_device_with_fp8_units_is_told_that_blocks_are_emulated_only",),
    ),
    Mutant(
        "blocks: rows that vary are taken",
        "fp8compile/linears/block_operands.py",
        "return None if isinstance(matmul.M, int) else",
        "return None if True else",
        (f"{PASS}test_rows_that_vary_are_left",),
    ),
    Mutant(
        "blocks: E8M0 scales told as saved codes",
        "passes/encode_saved.py",
        'if edge.forward.meta["val"].dtype not in OPERANDS:',
        'if edge.forward.meta["val"].element_size() > 1:',
        (f"{PASS}test_what_only_matmuls_need_is_kept_as_codes_of_the_wgrads_blocks",),
    ),
    Mutant(
        "blocks: formats, wgrad in the format of dgrad",
        "fp8compile/recipe/linear_formats.py",
        'return by_direction.get(direction, "e4m3")',
        'return by_direction["dgrad"]',
        (f"{PASS}test_a_gradient_has_the_format_of_the_matmul_that_reads_it",),
    ),
    Mutant(
        "blocks: formats, an open direction is not refused",
        "fp8compile/recipe/linear_formats.py",
        "if direction not in value]:",
        "if direction not in DIRECTIONS]:",
        RECIPES,
    ),
    Mutant(
        "blocks: cached weights are taken",
        "fp8compile/recipe/validation.py",
        "if cache_weights and mode in IN_BLOCKS:",
        "if cache_weights and mode in ():",
        RECIPES,
    ),
)
