"""Range analysis: what holds between values, what vanishes and fits, rounding, and symbolic sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile._torch import make_fx, select_decomp_table
from fp8compile.analysis.ranges import Interval, ranges
from fp8compile.analysis.ranges.interval import BLOCK
from fp8compile.fx.graph import is_tensor
from tests.support.graphs import joint_of
from tests.support.measure import llama_case
from tests.support.range_graphs import DATA, analysed, traced

aten = torch.ops.aten
INF = math.inf
A = (-2.0, 3.0)

# Each is held to [lower, upper] of a value within +-65504; the same operands laid out otherwise prove nothing of the kind.
RELATIONS = {
    "x * x": (lambda x: x * x, 0, INF),
    "x - amax(x)": (lambda x: x - x.amax(-1, keepdim=True), -INF, 0),
    "x - max(x)": (lambda x: x - x.max(0)[0], -INF, 0),
    "x - amin(x)": (lambda x: x - x.amin(-1, keepdim=True), 0, INF),
    "exp(x - amax(x))": (lambda x: (x - x.amax(-1, keepdim=True)).exp(), 0, 1),
    "sum exp(x - amax(x))": (lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1), 1, 4),
    "softmax": (lambda x: x.softmax(-1), 0, 1),
    "softmax in FP16": (lambda x: x.half().softmax(-1), 0, 1),
    "softmax by reciprocal": (lambda x: (e := x.exp()) * e.sum(-1, keepdim=True).reciprocal(), 0, 1),
    "softmax with epsilon": (
        lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / (e.sum(-1, keepdim=True) + 1e-6),
        0,
        1,
    ),
    "exp(log_softmax)": (lambda x: x.log_softmax(-1).exp(), 0, 1),
    "l2 norm": (lambda x: F.normalize(x, dim=0), -1, 1),
    "l1 norm": (lambda x: x / x.abs().sum(1, keepdim=True), -1, 1),
    "largest": (lambda x: x / x.abs().amax().clamp_min(1e-3), -1, 1),
    "rms norm": (lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), -2, 2),
    "rms norm, x * x": (lambda x: x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt(), -2, 2),
    "layer norm": (lambda x: F.layer_norm(x, (4,)), -2, 2),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), -math.sqrt(3), math.sqrt(3)),
    "elu + 1": (lambda x: F.elu(x) + 1, 0, 65505),
    "softplus": (lambda x: F.softplus(x), 0, 65504),
    "silu": (lambda x: F.silu(x), -65504, 65504),
    "attention": (lambda x: x.softmax(-1) @ x.t(), -65504, 65504),
    "attention, batched": (lambda x: torch.bmm(x[None].half().softmax(-1), x.t()[None].half()), -65504, 65504),
    "average": (lambda x: x.sum() / 12, -65504, 65504),
}
OTHERWISE = {
    "x * y": lambda x, y: x * y,
    "x - amax along the other side": lambda x, y: x - x.amax(1),
    "x - amax(y)": lambda x, y: x - y.amax(-1, keepdim=True),
    "exp(x - amax along the other side)": lambda x, y: (x - x.amax(1)).exp(),
    "e / sum(e) along the other side": lambda x, y: (e := x.exp()) / e.sum(1),
    "e / (sum(e) - 1)": lambda x, y: (e := x.exp()) / (e.sum(1, keepdim=True) - 1),
    "x / norm(y)": lambda x, y: x / y.pow(2).sum(-1, keepdim=True).sqrt(),
    "x / norm along the other side": lambda x, y: x / x.pow(2).sum(1).sqrt(),
    "x / norm transposed": lambda x, y: x / x.pow(2).sum(1, keepdim=True).sqrt().t(),
    "softmax along the other side": lambda x, y: x.softmax(0) @ y,
    "x / sum(x)": lambda x, y: x / x.sum(-1, keepdim=True),
    "x / sum(x^2)": lambda x, y: x / x.pow(2).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation(name: str) -> None:
    fn, lower, upper = RELATIONS[name]
    _, proven = analysed(fn, DATA, decompositions=True)
    slack = 0.004  # a cast to FP16 errs by 2^-11, at most four roundings
    assert proven.lower >= lower - slack * abs(lower) - slack and proven.upper <= upper + slack * abs(upper)
    assert proven.vanishing == (name == "softplus"), "whose exp is tiny where x is very negative"


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_operands_are_no_relation(name: str) -> None:
    _, proven = analysed(OTHERWISE[name], (*DATA, (4, 4)), (*DATA, (4, 4)), decompositions=True)
    assert not proven.fits()


def test_what_vanishes() -> None:
    data, small, positive = (-100.0, 100.0), (-1e-6, 1e-6), (0.01, 1e5)
    fns: dict[str, tuple[Callable[..., Any], bool]] = {
        "data": (lambda x, s, p: x + 0, False),
        "quotient by much": (lambda x, s, p: x / p, True),
        "quotient by little": (lambda x, s, p: x / 64, False),
        "reciprocal": (lambda x, s, p: p.reciprocal(), True),
        "exp": (lambda x, s, p: x.exp(), True),
        "exp of little": (lambda x, s, p: s.exp(), False),
        "product": (lambda x, s, p: x.exp() * x, True),
        "sum with data": (lambda x, s, p: x.exp() + x, False),
        "sum with 1": (lambda x, s, p: x.exp() + 1, False),
        "sum with 0": (lambda x, s, p: x.exp() + 0, True),
        "sum of two": (lambda x, s, p: x.exp() + x / p, True),
        "all small": (lambda x, s, p: s * 1, True),
        "zero": (lambda x, s, p: torch.zeros_like(x), False),
        "at least 1": (lambda x, s, p: x.exp().clamp_min(1.0), False),
        "probability": (lambda x, s, p: x.softmax(-1), False),
        "gate": (lambda x, s, p: x / (1 + (-x).exp()), False),
        "matmul": (lambda x, s, p: x.exp() @ x.t(), True),
    }
    for name, (fn, vanishes) in fns.items():
        _, proven = analysed(fn, data, small, positive, decompositions=True)
        assert proven.vanishing == vanishes, name


def test_what_fits() -> None:
    assert Interval(-65504.0, 65504.0).fits() and Interval(0.0, 65519.9).fits()  # which rounds to 65504
    assert not Interval(0.0, 65520.0).fits() and not Interval(-INF, 0.0).fits()
    assert not Interval(0.0, 1.0, vanishing=True).fits()
    assert not Interval(0.0, 2.0).fits(limit=1.0)


def test_values_known_by_calibration_override() -> None:
    gm = traced(lambda x: x * x + 1, A)
    square = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor)
    assert str(ranges(gm.graph, {square: Interval(0, 4)})[square.next]) == "[1, 5]"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_are_finite_and_casts_pass_on(dtype: torch.dtype) -> None:
    gm = make_fx(lambda x: x.float().half().to(dtype), tracing_mode="fake")(torch.ones(3, dtype=dtype))
    largest = torch.finfo(dtype).max
    assert all((x.lower, x.upper) == (-largest, largest) for x in ranges(gm.graph).values())


def test_a_16_bit_node_is_rounded_to_its_format() -> None:
    third = analysed(lambda x: x / 3, (1.0, 1.0), dtype=torch.float16)[1]
    assert third.lower == torch.tensor(1 / 3).half().item() and third.upper == torch.tensor(1 / 3).item()
    assert analysed(lambda x: x * 1.0, DATA, dtype=torch.float16)[1] == Interval(*DATA)


def test_bits_are_no_numbers() -> None:
    assert analysed(lambda x: x.view(torch.int32).view(torch.float32), A)[1] == Interval(-INF, INF, True)


def test_a_cast_to_fp8_rounds() -> None:
    assert analysed(lambda x: x.to(torch.float8_e4m3fn).float(), (0.0, 1.07))[1] == Interval(0.0, 1.125)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_a_cast_to_more_bits_keeps_relations(dtype: torch.dtype) -> None:
    """x x >= 0 where both factors are decoded from one code, as an operand of an FP8 product is."""
    narrow = torch.ones(3, dtype=dtype)
    product = next(n for n in reversed(make_fx(lambda c: c.float() * c.float())(narrow).graph.nodes) if is_tensor(n))
    assert ranges(product.graph)[product].lower == 0.0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_a_cast_to_fewer_bits_loses_them(dtype: torch.dtype) -> None:
    """x and x rounded are two values, whatever rounding does to signs: nothing is known of their product."""
    gm = make_fx(lambda x: x * x.to(dtype).float())(torch.ones(3))
    product = next(n for n in reversed(gm.graph.nodes) if is_tensor(n))
    assert ranges(gm.graph)[product].lower < 0.0


def test_mean_of_data_fits_however_long() -> None:
    _, proven = analysed(lambda x: x.mean(), (*DATA, (1 << 20,)), dtype=torch.float16)
    assert proven.fits()
    assert BLOCK * 2.0**-24 == 2.0**-12  # what would be too much by a hair, were 65504 not 2047 * 32
    assert not analysed(lambda x: x.sum(), (*DATA, (2,)), dtype=torch.float16)[1].fits()


def test_rounding_of_a_sum_is_within_its_bound() -> None:
    """Sums of 0.1 in FP32, one by one: some exceed n times 0.1, all lie in the range of a scan over as many."""
    tenth = torch.tensor(0.1).item()
    sums = torch.full((BLOCK,), 0.1).cumsum(0)
    exact = torch.arange(1, BLOCK + 1, dtype=torch.float64) * tenth
    assert (sums > exact).any()
    for op in (lambda x: aten.cumsum(x, 0), lambda x: aten.sum(x)):
        above = [float(analysed(op, (tenth, tenth, (n,)))[1].upper) for n in (7, 100, 1000, BLOCK)]
        assert all(
            exact[n - 1] < up and sums[n - 1] <= up for n, up in zip((7, 100, 1000, BLOCK), above, strict=True)
        )


def test_joint_graph_of_a_layer() -> None:
    """Norms and attention end what grew before them, in the forward of a joint graph in FP16."""
    layer, args = llama_case(2, 16, 32, 48, 2, dtype=torch.float16)
    graph = joint_of(layer, *args)
    found = ranges(graph)
    values = [n for n in graph.nodes if is_tensor(n) and n.meta["val"].is_floating_point()]
    assert all(n in found for n in values)
    normed = [n for n in graph.nodes if "rsqrt" in str(n.args) and n.target is aten.mul.Tensor][:2]
    assert len(normed) == 2 and all(found[n].upper == pytest.approx(math.sqrt(32), rel=1e-3) for n in normed)
    assert not any(found[n.args[0]].fits() for n in normed[1:])  # type: ignore[index]


def test_symbolic_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        return (
            x.sum(0),
            x.sum(0) / n,
            x.t() @ y / n,
            (x @ y.t()).softmax(-1).sum(-1),
            x.sum() / x.numel(),
            x.cumsum(0) / n,
        )

    dtype = torch.float16
    gm = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(
        *torch.ones(2, 5, 8, dtype=dtype)
    )
    known = {node: Interval(-100.0, 100.0) for node in gm.graph.find_nodes(op="placeholder")}
    found = ranges(gm.graph, known)
    total, average, product, ones, whole, scan = (found[n] for n in gm.graph.output_node().args[0])
    assert total.amax == INF and not total.fits()
    assert average.fits() and average.upper == pytest.approx(100, rel=2**-10)
    assert product.fits() and product.upper == pytest.approx(1e4, rel=2**-10)
    assert not ones.fits(), "a softmax sums to 1, but that much is not proven"
    assert whole.fits() and whole.upper == pytest.approx(100, rel=2**-10)
    assert scan.amax <= 201  # a scan may add in a row
