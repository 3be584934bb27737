"""The prediction for a linear: its constants against the counts they come from, its choice against every other choice."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from statistics import fmean

import pytest

from benchmarks.harness.kernel_time import BYTES, LAUNCH
from fp8compile.cost.device_rates import RATES
from fp8compile.cost.linear_cost import (
    ACTIVATION,
    ADDED,
    READ_BY,
    WEIGHT,
    LinearShape,
    encoding_us,
    matmul_us,
    microseconds,
    predicted,
    share_us,
)
from fp8compile.fx.ops import DGRAD, FORWARD, WGRAD
from tests.sm90.layers import CASES, Layer
from tests.support.sources import ROOT

H100 = RATES["h100"]
COUNTED = ("llama 16k", "bert 16k", "vit 16k")
DIRECTIONS = (FORWARD, DGRAD, WGRAD)
KINDS = [("dynamic", ACTIVATION), ("dynamic", WEIGHT), ("delayed", ACTIVATION), ("delayed", WEIGHT)]


def linears_of(layer: Layer) -> Iterator[tuple[int, int, bool]]:
    """``(K, N, whether its input is another's too)`` of each linear, k and v after q, up after gate."""
    hidden, ffn = layer.hidden, layer.ffn
    yield from ((hidden, hidden, shared) for shared in (False, True, True, False))
    if layer.kind == "llama":
        yield from ((hidden, ffn, False), (hidden, ffn, True))
    else:
        yield (hidden, ffn, False)
    yield (ffn, hidden, False)


def elements(layer: Layer, kind: str) -> int:
    tokens = layer.batch * layer.seq
    if kind == WEIGHT:
        return sum(K * N for K, N, _ in linears_of(layer))
    return tokens * sum(N + K * (not shared) for K, N, shared in linears_of(layer))


def values(layer: Layer, kind: str) -> int:
    found = list(linears_of(layer))
    return len(found) if kind == WEIGHT else len(found) + sum(not shared for *_, shared in found)


def work(name: str, pipeline: str) -> tuple[float, int]:
    """Bytes that are copied in the time that a layer's generated kernels are predicted to take, launches apart; launches."""
    rows = json.loads((ROOT / "benchmarks/results/layer-instructions-sm90-lowered.json").read_text())["rows"]
    [row] = [row for row in rows if (row["layer"], row["pipeline"]) == (name, pipeline)]
    return (row["us"] - row["launches"] * LAUNCH) * 1e-6 * BYTES, row["launches"]


def added(name: str, scales: str, kind: str) -> tuple[float, float]:
    """Bytes an element, launches a value, in one layer."""
    all_of_it, cached = {
        "dynamic": ("linears alone", "linears, cached weights"),
        "delayed": ("linears, delayed", "linears, delayed, cached weights"),
    }[scales]
    more, less = (all_of_it, cached) if kind == WEIGHT else (cached, "plain Inductor")
    (nbytes, launches), (other_bytes, other_launches) = work(name, more), work(name, less)
    layer = CASES[name]
    return (nbytes - other_bytes) / elements(layer, kind), (launches - other_launches) / values(layer, kind)


@pytest.mark.parametrize(("scales", "kind"), KINDS)
def test_what_encodings_add_is_what_was_counted(scales: str, kind: str) -> None:
    """The mean of three layers, in the digits of the table; a weight's bytes from Llama, whose weights are large."""
    found = [added(name, scales, kind) for name in COUNTED]
    nbytes = found[0][0] if kind == WEIGHT else fmean(each for each, _ in found)
    assert ADDED[scales, kind].nbytes == pytest.approx(nbytes, abs=0.06)
    assert ADDED[scales, kind].launches == pytest.approx(fmean(each for _, each in found), abs=0.06)


SHAPES = [(M, K, N) for M in (128, 2048, 16384) for K in (512, 4096) for N in (512, 11008)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("directions", [(FORWARD, DGRAD, WGRAD), (FORWARD, WGRAD), (FORWARD, DGRAD), (FORWARD,)])
def test_no_other_choice_is_predicted_to_be_faster(shape: tuple[int, int, int], directions: tuple[str, ...]) -> None:
    for scales, cached, sharing in itertools.product(("dynamic", "delayed"), (False, True), (1, 3)):
        linear = LinearShape(*shape, directions, sharing, scales, cached)
        found = predicted(linear, H100)
        choices = itertools.chain.from_iterable(itertools.combinations(directions, n) for n in range(4))
        best, without = min(microseconds(linear, chosen, H100) for chosen in choices), microseconds(linear, (), H100)
        assert found.us == (best if best <= 0.98 * without else without)
        assert found.us_in_its_dtype == without
        assert found.us <= min(found.us_in_its_dtype, found.us_in_fp8 / 0.98)


def test_a_matmul_takes_its_operations_or_its_bytes() -> None:
    large, long = LinearShape(8192, 8192, 8192), LinearShape(2**20, 16, 16)
    assert matmul_us(large, FORWARD, False, H100) == pytest.approx(2 * 8192**3 / H100.bf16 * 1e-6 + H100.gap)
    assert matmul_us(large, FORWARD, True, H100) == pytest.approx(2 * 8192**3 / H100.fp8 * 1e-6 + H100.gap)
    rows, weight = 2**20 * 16, 16 * 16
    bytes_of_wgrad = 2 * rows + 2 * weight  # FP8 input and gradient, a 16-bit weight gradient
    assert matmul_us(long, WGRAD, True, H100) == pytest.approx(bytes_of_wgrad / H100.copy * 1e-6 + H100.gap)


def test_shares_add_up_to_each_encoding_once() -> None:
    linear = LinearShape(2048, 4096, 1024)
    whole = sum(matmul_us(linear, each, True, H100) for each in linear.directions)
    whole += sum(encoding_us(linear, operand, H100) for operand in READ_BY)
    assert sum(share_us(linear, each, linear.directions, H100) for each in linear.directions) == pytest.approx(whole)


def test_what_one_matmul_alone_reads_is_encoded_for_it_alone() -> None:
    linear = LinearShape(2048, 4096, 1024)
    added = share_us(linear, FORWARD, (FORWARD,), H100) - matmul_us(linear, FORWARD, True, H100)
    assert added == pytest.approx(sum(encoding_us(linear, each, H100) for each in ("input", "weight")))


def test_a_frozen_weights_operands_are_encoded_in_one_order() -> None:
    """Without a wgrad the forward alone reads the input, the dgrad alone the gradient; both read the weight."""
    trained, frozen = (LinearShape(2048, 4096, 1024, there) for there in (DIRECTIONS, (FORWARD, DGRAD)))
    for operand, part in {"input": 0.75, "gradient": 0.75, "weight": 1.0}.items():
        assert encoding_us(frozen, operand, H100) == pytest.approx(part * encoding_us(trained, operand, H100))


def test_who_shares_an_input_pays_a_part_of_it() -> None:
    alone, one_of_three = (LinearShape(2048, 4096, 1024, sharing=n) for n in (1, 3))
    assert encoding_us(alone, "input", H100) == pytest.approx(3 * encoding_us(one_of_three, "input", H100))
    assert encoding_us(alone, "weight", H100) == encoding_us(one_of_three, "weight", H100)


def test_fp32_is_multiplied_at_its_own_rate_and_encoded_from_twice_the_bytes() -> None:
    half, full = (LinearShape(8192, 4096, 4096, itemsize=size) for size in (2, 4))
    operations = matmul_us(half, FORWARD, False, H100) - H100.gap
    times = H100.bf16 / H100.fp32
    assert matmul_us(full, FORWARD, False, H100) == pytest.approx(times * operations + H100.gap)
    assert matmul_us(full, FORWARD, False, H100.with_tf32) == pytest.approx(2 * operations + H100.gap)
    assert matmul_us(full, FORWARD, True, H100) == pytest.approx(matmul_us(half, FORWARD, True, H100))
    launches = encoding_us(LinearShape(0, 0, 0), "input", H100)
    assert encoding_us(full, "input", H100) - launches == pytest.approx(
        2 * (encoding_us(half, "input", H100) - launches)
    )


def row_of_the_guide(M: int, K: int, N: int) -> str:
    found, best = (
        predicted(LinearShape(M, K, N), H100),
        predicted(LinearShape(M, K, N, scales="delayed", cached=True), H100),
    )
    verdict = {3: "FP8", 0: "stays"}.get(len(found.directions), f"{' and '.join(found.directions)} in FP8")
    if not found.directions and best.directions:
        verdict += f"; with delayed scales and cached weights {best.us_in_fp8:,.3g}, so FP8"
    sizes = f"| {M:,} | {K:,} to {N:,} |"
    return f"{sizes} {round(found.us_in_fp8):,} | {round(found.us_in_its_dtype):,} | {verdict} |"


@pytest.mark.parametrize(
    "shape", [(2048, 768, 768), (16384, 768, 768), (16384, 768, 3072), (2048, 4096, 4096), (16384, 4096, 11008)]
)
def test_the_guides_table_is_what_is_predicted(shape: tuple[int, int, int]) -> None:
    assert row_of_the_guide(*shape) in (ROOT / "docs/guide/linears.md").read_text()


def test_small_linears_do_not_pay_and_large_ones_do() -> None:
    assert predicted(LinearShape(512, 512, 1376), H100).directions == ()
    assert predicted(LinearShape(16384, 4096, 11008), H100).directions == (FORWARD, DGRAD, WGRAD)
    slow = dataclasses.replace(H100, gap=100.0)
    assert predicted(LinearShape(2048, 4096, 4096), slow).directions == ()
