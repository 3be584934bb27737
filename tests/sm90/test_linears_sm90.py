"""FP8 linears lowered for an H100, in a Llama layer: every product legal, every value encoded and stored once.

``_scaled_mm`` on a GPU takes what the CPU does not ask for (torch/_meta_registrations.py, aten/src/ATen/native/cuda/Blas.cpp,
cuBLASLt): a row-major left and a column-major right operand, sides that are multiples of 16, not both in E5M2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .fake_h100 import figures
from .linears import DEFAULT, E4M3, FP8, IN_CI, LINEAR_ONLY, PLAIN, ROWWISE, STORAGE, TENSORWISE
from .subprocesses import result_of

LINEARS, ACTIVATIONS = 7, 4  # q k v o gate up down; what they read: norm, attention, norm, SwiGLU
OTHERS = tuple(pipeline for pipeline in (PLAIN, STORAGE, *FP8) if pipeline not in IN_CI)
E4, E5 = "float8_e4m3fn", "float8_e5m2"


def graphs(pipeline: str) -> list[dict[str, Any]]:
    part = IN_CI if pipeline in IN_CI else OTHERS
    found: list[dict[str, Any]] = result_of("run_linears", *part)["graphs"][pipeline]
    return found


def in_ci(pipelines: Iterable[str]) -> Any:
    """These pipelines as parameters of a test; those that CI leaves out are marked."""
    return pytest.mark.parametrize(
        "pipeline", [p if p in IN_CI else pytest.param(p, marks=pytest.mark.sweep) for p in pipelines]
    )


def products(pipeline: str) -> list[dict[str, Any]]:
    return [product for graph in graphs(pipeline) for product in graph["products"]]


@in_ci(FP8)
def test_all_three_products_of_all_linears_are_scaled(pipeline: str) -> None:
    assert [len(graph["products"]) for graph in graphs(pipeline)] == [LINEARS, 2 * LINEARS]
    assert not [name for graph in graphs(pipeline) for name in graph["externs"] if name.endswith(".mm")]


@in_ci(FP8)
def test_every_product_is_legal(pipeline: str) -> None:
    for product in products(pipeline):
        (a, (M, K), a_stride), (b, (K_b, N), b_stride) = product["a"], product["b"]
        assert {a, b} <= {E4, E5} and (a, b) != (E5, E5), "cuBLASLt multiplies no two E5M2"
        assert K_b == K and K % 16 == 0 and N % 16 == 0
        assert a_stride == [K, 1] and b_stride == [1, K], "row-major, column-major"
        assert product["out"] == ["bfloat16", [M, N], [N, 1]]
        assert product["bias"] is None and product["scale_result"] is None


@in_ci(FP8)
def test_every_scale_is_legal(pipeline: str) -> None:
    for product in products(pipeline):
        M, N = product["a"][1][0], product["b"][1][1]
        for name, rowwise in (("inv_a", [M, 1]), ("inv_b", [1, N])):
            dtype, shape, stride = product[name]
            assert dtype == "float32"
            assert (shape == rowwise) if pipeline == ROWWISE else prod(shape) == 1
            assert all(s == 1 for s, n in zip(stride, shape, strict=True) if n > 1), "contiguous"


def test_gradients_alone_are_e5m2_and_stand_on_the_left() -> None:
    forward, backward = ([(p["a"][0], p["b"][0]) for p in graph["products"]] for graph in graphs(LINEAR_ONLY))
    assert set(forward) == {(E4, E4)}
    assert set(backward) == {(E5, E4)}


@pytest.mark.sweep
def test_all_is_e4m3_where_the_recipe_says_so() -> None:
    assert {(p["a"][0], p["b"][0]) for p in products(E4M3)} == {(E4, E4)}


@in_ci(TENSORWISE)
def test_every_value_is_encoded_once(pipeline: str) -> None:
    """Seen over both graphs: a value has one name in the joint graph. The backward computes codes again, under the scale
    of the forward, of what is kept exactly or decoded: of weights, and of activations."""
    forward, backward = ({name for name, _ in graph["encodings"]} for graph in graphs(pipeline))
    assert len(forward) == sum(len(graph["encodings"]) for graph in graphs(pipeline)[:1]) == ACTIVATIONS + LINEARS
    assert len(forward | backward) == ACTIVATIONS + 2 * LINEARS
    assert len(backward - forward) == LINEARS, "the gradients"


def test_codes_are_stored_once_and_transposed_once() -> None:
    """q, k and v read one buffer; so do gate and up. In the backward: weights and activations transposed, gradients both."""
    forward, backward = (graph["code_stores"] for graph in graphs(LINEAR_ONLY))
    assert forward == ACTIVATIONS + LINEARS
    assert backward == LINEARS + ACTIVATIONS + 2 * LINEARS


@in_ci((PLAIN, STORAGE, *FP8))
def test_attention_is_one_extern_each_way(pipeline: str) -> None:
    flash = "_scaled_dot_product_flash_attention"
    assert [graph["attention"] for graph in graphs(pipeline)] == [[flash], [f"{flash}_backward"]]


# Launches, bytes that they and amaxes of weights move, externs, bytes of the other externs: forward, then backward.
# Exact for fake_h100.WORKS_WITH.
FIGURES = figures(
    {
        PLAIN: [(5, 11_114_496, 8, 18_432_024), (7, 19_214_336, 15, 36_847_640)],
        STORAGE: [(8, 15_343_616, 8, 18_432_024), (12, 21_903_360, 15, 36_847_640)],
        DEFAULT: [(24, 34_601_076, 9, 12_992_592), (36, 39_673_956, 15, 25_968_776)],
        LINEAR_ONLY: [(22, 30_896_244, 9, 12_992_592), (32, 40_810_596, 15, 25_968_776)],
        E4M3: [(24, 34_601_076, 9, 12_992_592), (36, 39_673_956, 15, 25_968_776)],
        ROWWISE: [(19, 28_551_936, 8, 13_028_120), (60, 53_014_016, 15, 26_039_832)],
    },
    oldest={
        STORAGE: [(10, 18_161_664, 8, 18_432_024), (12, 21_903_360, 15, 36_847_640)],
        DEFAULT: [(27, 37_943_370, 9, 12_992_592), (36, 39_673_956, 15, 25_968_776)],
        LINEAR_ONLY: [(22, 30_896_202, 9, 12_992_592), (32, 40_810_596, 15, 25_968_776)],
        E4M3: [(27, 37_943_370, 9, 12_992_592), (36, 39_673_956, 15, 25_968_776)],
    },
)
# The one configuration of a kernel that spills, and bytes; the tuner does not time it.
SPILLS = figures({"gate": [({"XBLOCK": 32}, 648)]}, oldest={"gate": []})


@in_ci(FIGURES)
def test_kernels_and_bytes(pipeline: str) -> None:
    found = [(len(g["launches"]), g["num_bytes"], len(g["externs"]), g["extern_bytes"]) for g in graphs(pipeline)]
    assert found == FIGURES[pipeline]


@pytest.mark.sweep
def test_every_configuration_assembles_and_what_is_timed_does_not_spill() -> None:
    """Codes of gate and up beside their product, in groups of 86 of which a program would take 32."""
    spilling = []
    for graph in graphs(DEFAULT):
        assert {cubin["kernel"] for cubin in graph["cubins"]} == set(graph["launches"])
        spilling += [cubin for cubin in graph["cubins"] if cubin["spill_bytes"]]
    assert [(cubin["blocks"], cubin["spill_bytes"]) for cubin in spilling] == SPILLS["gate"]
    assert not any(cubin["timed"] for cubin in spilling)
    others = [
        c for graph in graphs(DEFAULT) for c in graph["cubins"] if c["kernel"] in {s["kernel"] for s in spilling}
    ]
    assert not spilling or any(c["timed"] and not c["spill_bytes"] for c in others)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_generated_encoding_is_bit_equal_to_eager(fmt: str) -> None:
    differing = result_of("run_linears_interpreted", interpret=True)[fmt]
    assert len(differing) == 5 and not any(differing.values()), differing
