"""Faults in linears in INT8."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PRODUCTS = ("tests/numerics/test_integer_products.py",)
PASS = "tests/passes/test_quantize_linears_int8.py::"
BY_HAND = (f"{PASS}test_scales_run_along_the_contracted_dimension_bit_for_bit[(37, 10, 7)-eager]",)

INTEGERS = (
    Mutant(
        "int8: a sum that is too long for INT32 is not cut",
        "fp8compile/numerics/integer_products.py",
        "if a.shape[1] > MOST_PRODUCTS else",
        "if False else",
        PRODUCTS,
    ),
    Mutant(
        "int8: the longest sum is one product too long",
        "fp8compile/numerics/integer_products.py",
        "MOST_PRODUCTS = (2**31 - 1) // int(INT8.max) ** 2",
        "MOST_PRODUCTS = (2**31 - 1) // int(INT8.max) ** 2 + 1",
        PRODUCTS,
    ),
    Mutant(
        "int8: a bias is rounded before it is added",
        "fp8compile/numerics/integer_products.py",
        "return (y if added is None else y + added).to(dtype)",
        "return y.to(dtype) if added is None else (y.to(dtype) + added).to(dtype)",
        PRODUCTS,
    ),
    Mutant(
        "int8: columns under the scales of rows",
        "fp8compile/linears/layouts.py",
        "inv_scale = codec.inv_scale(x.t()).t()",
        "inv_scale = codec.inv_scale(x)[:1]",
        BY_HAND,
    ),
    Mutant(
        "int8: rows that vary enter a sum of any length",
        "fp8compile/linears/integer_matmuls.py",
        "if not isinstance(length, int) and not",
        "if False and not",
        (f"{PASS}test_a_wgrad_over_rows_that_vary_is_left",),
    ),
    Mutant(
        "int8: a CPU without VNNI is not told",
        "fp8compile/linears/device.py",
        "return None if private.cpu_has_vnni() else",
        "return None if True else",
        (f"{PASS}test_a_cpu_without_vnni_is_left_and_told",),
    ),
    Mutant(
        "int8 operands: each view of a value is encoded by itself",
        "fp8compile/linears/views.py",
        "return not shape or shape[-1] != width",
        "return True",
        (f"{PASS}test_all_matmuls_are_products_of_integers_and_an_encoding_serves_all_who_contract_a_value_alike",),
    ),
)
