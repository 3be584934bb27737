"""Range analysis rule by rule.

Every case says the exact range, and by which error (of a sum, of a function) the proven one may exceed it; then the operation
is run on random values within the ranges of its inputs, which must lie in the proven range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fp8compile.analysis.ranges import Interval
from fp8compile.analysis.ranges.interval import FUNCTION_ERROR
from fp8compile.analysis.ranges.matching import packet
from fp8compile.analysis.ranges.table import RULES
from tests.support.range_graphs import analysed, drawn, traced

aten, prims = torch.ops.aten, torch.ops.prims
INF = math.inf
FUNCTION = 2 * FUNCTION_ERROR  # and the rounding to FP32 after it
A, B, POSITIVE = (-2.0, 3.0), (-5.0, 4.0), (0.25, 9.0)


def of_sum(n: int) -> float:
    """What the proven sum of n may exceed the exact one by, and its rounding to FP32."""
    return (n + 64 + 2) * 2.0**-24


class Case(NamedTuple):
    """``fn`` of values within ``inputs`` (a shape may follow the bounds) is within ``exact``, by a relative ``slack``."""

    fn: Callable[..., Any]
    inputs: tuple[tuple[Any, ...], ...]
    exact: tuple[float, float]
    slack: float = 0.0


def of(fn: Callable[..., Any], lower: float, upper: float, *inputs: tuple[Any, ...], slack: float = 0.0) -> Case:
    return Case(fn, inputs or (A,), (lower, upper), slack)


E = math.exp
CASES = {
    # moved
    "view": of(lambda x: aten.view(x, [4, 3]), -2, 3),
    "_unsafe_view": of(lambda x: aten._unsafe_view(x, [12]), -2, 3),
    "as_strided": of(lambda x: aten.as_strided(x, [2, 2], [1, 2]), -2, 3),
    "permute": of(lambda x: aten.permute(x, [1, 0]), -2, 3),
    "transpose": of(lambda x: aten.transpose(x, 0, 1), -2, 3),
    "t": of(lambda x: aten.t(x), -2, 3),
    "expand": of(lambda x: aten.expand(x, [2, 3, 4]), -2, 3),
    "unsqueeze": of(lambda x: aten.unsqueeze(x, 0), -2, 3),
    "squeeze": of(lambda x: aten.squeeze(x), -2, 3),
    "clone": of(lambda x: aten.clone(x), -2, 3),
    "alias": of(lambda x: aten.alias(x), -2, 3),
    "detach": of(lambda x: aten.detach(x), -2, 3),
    "lift_fresh_copy": of(lambda x: aten.lift_fresh_copy(x), -2, 3),
    "select": of(lambda x: aten.select(x, 0, 1), -2, 3),
    "slice": of(lambda x: aten.slice(x, 0, 1, 2), -2, 3),
    "diagonal": of(lambda x: aten.diagonal(x), -2, 3),
    "flip": of(lambda x: aten.flip(x, [0]), -2, 3),
    "rev": of(lambda x: prims.rev(x, [0]), -2, 3),
    "roll": of(lambda x: aten.roll(x, [1], [0]), -2, 3),
    "repeat": of(lambda x: aten.repeat(x, [2, 1]), -2, 3),
    "unfold": of(lambda x: aten.unfold(x, 1, 2, 1), -2, 3),
    "gather": of(lambda x: aten.gather(x, 0, torch.zeros(1, 4, dtype=torch.long)), -2, 3),
    "index": of(lambda x: aten.index(x, [torch.tensor([0, 2])]), -2, 3),
    "_unsafe_index": of(lambda x: aten._unsafe_index(x, [torch.tensor([0, 2])]), -2, 3),
    "index_select": of(lambda x: aten.index_select(x, 0, torch.tensor([0])), -2, 3),
    "embedding": of(lambda x: aten.embedding(x, torch.tensor([0, 1])), -2, 3),
    "amax": of(lambda x: aten.amax(x, [0]), -2, 3),
    "amin": of(lambda x: aten.amin(x, [0]), -2, 3),
    # of several
    "split": of(lambda x: aten.split(x, 2)[1], -2, 3),
    "split_with_sizes": of(lambda x: aten.split_with_sizes(x, [1, 2])[1], -2, 3),
    "unbind": of(lambda x: aten.unbind(x)[2], -2, 3),
    "sort": of(lambda x: aten.sort(x)[0], -2, 3),
    "topk": of(lambda x: aten.topk(x, 2)[0], -2, 3),
    "places of sort": of(lambda x: aten.sort(x, 0)[1].float(), 0, 2),
    "places of topk": of(lambda x: aten.topk(x, 2)[1].float(), 0, 3),
    "places of topk, by name": of(lambda x: aten.topk(x, 2, dim=0)[1].float(), 0, 2),
    "places of max": of(lambda x: aten.max(x, 0)[1].float(), 0, 2),
    "argmax": of(lambda x: aten.argmax(x).float(), 0, 11),
    "argmin along a dimension": of(lambda x: aten.argmin(x, 1).float(), 0, 3),
    "places in a window": of(
        lambda x: prims._low_memory_max_pool_with_offsets(x, [3, 3], [1, 1], [1, 1], [1, 1], False)[1].float(),
        *(-128, 127, (*A, (1, 1, 1, 1))),  # the window's middle is its fifth place, and the plane's only one
    ),
    "places of a pool": of(lambda x: aten.max_pool2d_with_indices(x, [2, 2])[1].float(), 0, 11, (*A, (1, 3, 4))),
    "max_pool2d_with_indices": of(lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], -2, 3, (-2, 3, (1, 1, 4, 4))),
    "_low_memory_max_pool_with_offsets": of(
        lambda x: prims._low_memory_max_pool_with_offsets(x, [2, 2], [2, 2], [0, 0], [1, 1], False)[0],
        *(-2, 3, (-2, 3, (1, 1, 4, 4))),
    ),
    "cat": of(lambda x, y: aten.cat([x, y]), -5, 4, A, B),
    "stack": of(lambda x, y: aten.stack([x, y]), -5, 4, A, B),
    "max": of(lambda x: aten.max(x), -2, 3),
    "max of a row": of(lambda x: aten.max(x, 1)[0], -2, 3),
    "max of two": of(lambda x, y: aten.max(x, y), -2, 4, A, B),
    "min": of(lambda x: aten.min(x), -2, 3),
    "where": of(lambda x, y: aten.where(x + y > 0, x, y), -5, 4, A, B),
    "slice_scatter": of(lambda x, y: aten.slice_scatter(x, y, 0), -5, 4, A, B),
    "select_scatter": of(lambda x, y: aten.select_scatter(x, y[0], 0, 1), -5, 4, A, B),
    "scatter": of(lambda x, y: aten.scatter(x, 0, torch.zeros(3, 4, dtype=torch.long), y), -5, 4, A, B),
    "scatter of a number": of(lambda x: aten.scatter(x, 0, torch.zeros(3, 4, dtype=torch.long), 7.0), -2, 7),
    "index_put": of(lambda x, y: aten.index_put(x, [torch.tensor([0])], y[0]), -5, 4, A, B),
    "constant_pad_nd": of(lambda x: aten.constant_pad_nd(x, [1, 1], 7.0), -2, 7),
    # made
    "full": of(lambda x: x + aten.full([3, 4], 2.0), 0, 5),
    "full_like": of(lambda x: aten.full_like(x, 2.0), 2, 2),
    "zeros": of(lambda x: x + aten.zeros([3, 4]), -2, 3),
    "zeros_like": of(lambda x: aten.zeros_like(x), 0, 0),
    "ones": of(lambda x: x + aten.ones([3, 4]), -1, 4),
    "ones_like": of(lambda x: aten.ones_like(x), 1, 1),
    "scalar_tensor": of(lambda x: x * aten.scalar_tensor(2.0), -4, 6),
    "iota": of(
        lambda x: x + prims.iota(4, start=1, step=2, dtype=torch.long, device="cpu", requires_grad=False), -1, 10
    ),
    "rand": of(lambda x: x + aten.rand([3, 4]), -2, 4),
    "rand_like": of(lambda x: aten.rand_like(x), 0, 1),
    # by element, exact
    "neg": of(lambda x: aten.neg(x), -3, 2),
    "abs": of(lambda x: aten.abs(x), 0, 3),
    "abs of negatives": of(lambda x: aten.abs(x), 1, 4, (-4, -1)),
    "abs of what is larger below": of(lambda x: aten.abs(x), 0, 3, (-3, 2)),
    "relu": of(lambda x: aten.relu(x), 0, 3),
    "maximum": of(lambda x, y: aten.maximum(x, y), -2, 4, A, B),
    "minimum": of(lambda x, y: aten.minimum(x, y), -5, 3, A, B),
    "clamp": of(lambda x: aten.clamp(x, -1.0, 10.0), -1, 3),
    "clamp_min": of(lambda x: aten.clamp_min(x, -1.0), -1, 3),
    "clamp_max": of(lambda x: aten.clamp_max(x, 1.0), -2, 1),
    "floor": of(lambda x: aten.floor(x), -3, 2, (-2.5, 2.5)),
    "ceil": of(lambda x: aten.ceil(x), -2, 3, (-2.5, 2.5)),
    "trunc": of(lambda x: aten.trunc(x), -2, 2, (-2.5, 2.5)),
    "round": of(lambda x: aten.round(x), -2, 2, (-2.5, 2.5)),
    "sign": of(lambda x: aten.sign(x), -1, 1),
    "sgn": of(lambda x: aten.sgn(x), -1, 1),
    "_to_copy": of(lambda x: aten._to_copy(x, dtype=torch.float64), -2, 3),
    "convert_element_type": of(lambda x: prims.convert_element_type(x, torch.float16), -2, 3),
    "cast to integers": of(lambda x: prims.convert_element_type(x, torch.int32).float(), -2, 2, (-2.5, 2.5)),
    "cast of flags": of(lambda x: prims.convert_element_type(x > 0, torch.float32), 0, 1),
    # by element, rounded
    "add": of(lambda x, y: aten.add(x, y, alpha=2), -12, 11, A, B),
    "sub": of(lambda x, y: aten.sub(x, y, alpha=2), -10, 13, A, B),
    "mul": of(lambda x, y: aten.mul(x, y), -15, 12, A, B),
    "div": of(lambda x, y: aten.div(x, y), -8, 12, A, POSITIVE),
    "div by negatives": of(lambda x, y: aten.div(x, y), -12, 8, A, (-9.0, -0.25)),
    "div by 0 at an end": of(lambda x, y: aten.div(x, y), 0.5, INF, (1, 2), (0, 2)),
    "div by 0 within": of(lambda x, y: aten.div(x, y), -INF, INF, A, B),
    "div, floored": of(lambda x, y: aten.div(x, y, rounding_mode="floor"), -9, 13, A, POSITIVE),
    "reciprocal": of(lambda x: aten.reciprocal(x), 0.125, 4, (0.25, 8)),
    "sqrt": of(lambda x: aten.sqrt(x), 0.5, 3, POSITIVE),
    "fma": of(lambda x, y: prims.fma(x, y, x), -17, 15, A, B),
    "native_dropout": of(lambda x: aten.native_dropout(x, 0.5, True)[0], -4, 6),
    # functions
    "exp": of(lambda x: aten.exp(x), E(-2), E(3), slack=FUNCTION),
    "exp2": of(lambda x: aten.exp2(x), 0.25, 8, slack=FUNCTION),
    "expm1": of(lambda x: aten.expm1(x), E(-2) - 1, E(3) - 1, slack=FUNCTION),
    "log": of(lambda x: aten.log(x), math.log(0.25), math.log(9), POSITIVE, slack=FUNCTION),
    "log of 0": of(lambda x: aten.log(x), -INF, math.log(9), (0, 9), slack=FUNCTION),
    "log2": of(lambda x: aten.log2(x), -2, 3, (0.25, 8), slack=FUNCTION),
    "log10": of(lambda x: aten.log10(x), -1, 2, (0.1, 100), slack=FUNCTION),
    "log1p": of(lambda x: aten.log1p(x), math.log1p(0.25), math.log1p(9), POSITIVE, slack=FUNCTION),
    "rsqrt": of(lambda x: aten.rsqrt(x), 1 / 3, 2, POSITIVE, slack=FUNCTION),
    "pow, odd": of(lambda x: aten.pow(x, 3), -8, 27, slack=FUNCTION),
    "pow": of(lambda x: aten.pow(x, 4), 0, 81, slack=FUNCTION),
    "pow, negative": of(lambda x: aten.pow(x, -2), 1 / 81, 16, POSITIVE, slack=FUNCTION),
    "pow, fractional": of(lambda x: aten.pow(x, 1.5), 0.125, 27, POSITIVE, slack=FUNCTION),
    "pow, of what may be negative": of(lambda x: aten.pow(x, 0.5), -INF, INF),
    "pow of a number": of(lambda x: aten.pow(10.0, x), 0.01, 1000, slack=FUNCTION),
    "tanh": of(lambda x: aten.tanh(x), math.tanh(-2), math.tanh(3), slack=FUNCTION),
    "sigmoid": of(lambda x: aten.sigmoid(x), 1 / (1 + E(2)), 1 / (1 + E(-3)), slack=FUNCTION),
    "erf": of(lambda x: aten.erf(x), math.erf(-2), math.erf(3), slack=FUNCTION),
    "atan": of(lambda x: aten.atan(x), math.atan(-2), math.atan(3), slack=FUNCTION),
    "sin": of(lambda x: aten.sin(x), -1, 1, slack=FUNCTION),
    "sin of little": of(lambda x: aten.sin(x), -0.1, 0.1, (-0.1, 0.1), slack=FUNCTION),
    "cos": of(lambda x: aten.cos(x), -1, 1, slack=FUNCTION),
    # sums and products
    "sum": of(lambda x: aten.sum(x), -24, 36, slack=of_sum(12)),
    "sum of columns": of(lambda x: aten.sum(x, [0]), -6, 9, slack=of_sum(3)),
    "sum of flags": of(lambda x: aten.sum(x > 0).float(), 0, 12, slack=of_sum(12)),
    "mean": of(lambda x: aten.mean(x, [1]), -2, 3, slack=of_sum(4)),
    "var": of(lambda x: aten.var(x, [1], correction=1), 0, 6.25 * 4 / 3, slack=9 * of_sum(4)),
    "var_mean": of(lambda x: aten.var_mean(x, [1], correction=0)[0], 0, 6.25, slack=9 * of_sum(4)),
    "mean of var_mean": of(lambda x: aten.var_mean(x, [1], correction=0)[1], -2, 3, slack=of_sum(4)),
    "cumsum": of(lambda x: aten.cumsum(x, 1), -8, 12, slack=of_sum(4)),
    "mm": of(lambda x, y: aten.mm(x, y), -60, 48, A, (*B, (4, 2)), slack=of_sum(4)),
    "bmm": of(lambda x, y: aten.bmm(x, y), -60, 48, (*A, (2, 3, 4)), (*B, (2, 4, 5)), slack=of_sum(4)),
    "mv": of(lambda x, y: aten.mv(x, y), -60, 48, A, (*B, (4,)), slack=of_sum(4)),
    "dot": of(lambda x, y: aten.dot(x, y), -60, 48, (*A, (4,)), (*B, (4,)), slack=of_sum(4)),
    "addmm": of(
        lambda c, x, y: aten.addmm(c, x, y, beta=2, alpha=3),
        -178,
        154,
        (1, 5, (2,)),
        A,
        (*B, (4, 2)),
        slack=2 * of_sum(4),
    ),
    "baddbmm": of(
        lambda c, x, y: aten.baddbmm(c, x, y),
        -59,
        53,
        (1, 5, (2, 3, 5)),
        (*A, (2, 3, 4)),
        (*B, (2, 4, 5)),
        slack=2 * of_sum(4),
    ),
    "convolution": of(
        lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        *(-54, 54, (*A, (1, 4, 5, 5)), (-1.0, 1.0, (6, 2, 3, 3))),
        slack=of_sum(18),
    ),
    "convolution, transposed": of(
        lambda x, w, b: aten.convolution(x, w, b, [2, 2], [0, 0], [1, 1], True, [0, 0], 2),
        *(-108, 109, (*A, (1, 8, 5, 5)), (-1.0, 1.0, (8, 3, 3, 3)), (0, 1, (6,))),
        slack=2 * of_sum(36),
    ),
    "attention": of(
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
        *(-2, 3, *[(*A, (1, 2, 8, 16))] * 3),
        slack=2.0**-6,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule(name: str) -> None:
    fn, inputs, exact, slack = CASES[name]
    gm, proven = analysed(fn, *inputs)
    lower, upper = float(proven.lower), float(proven.upper)
    reach = slack * max(abs(b) for b in exact) if slack else 0.0
    assert exact[0] - reach <= lower <= exact[0] and exact[1] <= upper <= exact[1] + reach, f"{proven}"
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = [drawn(*each, generator=generator) for each in inputs]
        seen = gm(*values)
        assert seen.isnan().any() or (lower <= seen.min() and seen.max() <= upper)


def test_every_rule_has_a_case() -> None:
    tried = {packet(node) for case in CASES.values() for node in traced(case.fn, *case.inputs).graph.nodes}
    attention = {rule for rule in RULES if "_scaled_dot_product" in str(rule)}  # three take a GPU, and the same rule
    elsewhere = attention | {prims.inductor_random, aten.reshape}  # written by Inductor's own passes
    assert set(RULES) - tried - elsewhere == set()


def test_what_has_no_rule_is_unbounded_and_may_vanish() -> None:
    _, proven = analysed(lambda x: aten.digamma(x), A)
    assert proven == Interval(-INF, INF, True) and not proven.fits()
