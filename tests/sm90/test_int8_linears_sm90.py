"""INT8 linears lowered for an H100, in a Llama layer: all products are INT8 ones and legal; kernels and bytes.

``torch._int_mm`` on a GPU takes more than 16 rows, and a contracted side and columns that are multiples of 8
(aten/src/ATen/native/cuda/Blas.cpp). Whether cuBLASLt is fast with every one of these layouts is not known without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .fake_h100 import MADE_FOR, installed
from .subprocesses import result_of

LINEARS = 7  # q k v o gate up down
INT8 = "linears int8"


def graphs(row: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of("run_formats", row)["rows"][row]
    return found


@pytest.mark.parametrize("row", [INT8])
def test_all_three_products_of_all_linears_are_int8(row: str) -> None:
    names = [[product[0] for product in graph["products"]] for graph in graphs(row)]
    assert names == [["_int_mm"] * LINEARS, ["_int_mm"] * 2 * LINEARS]


@pytest.mark.parametrize("row", [INT8])
def test_every_product_is_legal(row: str) -> None:
    for _, (a, (M, K), a_stride), (b, (K_b, N), b_stride), (out, shape, stride) in _products(row):
        assert (a, b, out) == ("int8", "int8", "int32") and (K_b, shape) == (K, [M, N])
        assert M > 16 and K % 8 == 0 and N % 8 == 0
        assert stride == [N, 1]
        for strides in (a_stride, b_stride):
            assert sorted(strides)[0] == 1 and sorted(strides)[1] % 16 == 0, (
                "one side lies in memory, rows are aligned"
            )


@pytest.mark.parametrize("row", [INT8])
def test_the_right_operand_of_a_forward_is_a_transposed_weight(row: str) -> None:
    forward, _ = graphs(row)
    assert all(b[2][0] == 1 and a[2][1] == 1 for _, a, b, _ in forward["products"])


def _products(row: str) -> list[Any]:
    return [product for graph in graphs(row) for product in graph["products"]]


# Launches, bytes that they move, externs, bytes of those: forward, then backward. Exact for fake_h100.MADE_FOR.
FIGURES: dict[str, list[tuple[int, int, int, int]]] = {
    INT8: [(14, 29_495_040, 8, 18_432_024), (61, 78_902_208, 15, 36_847_640)],
}


@pytest.mark.skipif(installed()["torch"] != MADE_FOR["torch"], reason="figures of other versions are not known")
@pytest.mark.parametrize("row", [INT8])
def test_kernels_and_bytes(row: str) -> None:
    found = [(g["launches"], g["num_bytes"], g["externs"], g["extern_bytes"]) for g in graphs(row)]
    assert found == FIGURES[row]
