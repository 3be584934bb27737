"""Codes under a scale that was known before: exact in range, counted where they clip, never hiding an inf."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8compile.numerics import E4M3, E5M2, Format
from fp8compile.numerics.delayed import (
    AMAX,
    CLIPPED,
    CLIPPED_FEW,
    ELEMENTS,
    LONGEST,
    NON_FINITE,
    PATIENCE,
    clips_above,
    entry_of,
    falls_back,
    grown_by,
    inv_scale_from,
    next_history,
    next_patience,
    or_amax_of_kind,
    partial_statistics,
    placed,
    quantize_under,
    total_statistics,
    without_zeros,
)
from fp8compile.numerics.scaling import quantize

FORMATS = (E4M3, E5M2)
INF, NAN = float("inf"), float("nan")


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("inv_scale", [1.0, 2.0**-20, 3e-5, 1e20])
def test_codes_are_those_of_current_scaling_but_for_what_is_not_finite(
    dtype: torch.dtype, fmt: Format, inv_scale: float
) -> None:
    x, known = every_value(dtype), torch.full((1, 1), inv_scale)
    codes = quantize_under(x, known, fmt).float()
    finite = x.isfinite()
    assert torch.equal(codes[finite], quantize(x, known.reshape(()), fmt).float()[finite])
    assert bool(codes[~finite].isnan().all()) and int((~finite).sum()) > 2


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_what_is_called_clipped_has_a_larger_error_than_rounding_could_give(fmt: Format) -> None:
    """Beside the format's largest value the next would be one step away; half of that is what rounding may cost."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    largest, second = sorted(set(codes[codes.isfinite()].tolist()))[-1:-3:-1]
    assert clips_above(fmt) == largest + (largest - second) / 2
    above = torch.tensor([[clips_above(fmt), math.nextafter(clips_above(fmt), INF) * (1 + 1e-6), -1e9, 0.0]])
    _, clipped, _ = partial_statistics(above, torch.ones(1, 1), fmt)
    assert clipped.tolist() == [2.0]


def test_statistics_are_those_counted_one_by_one() -> None:
    g = torch.Generator().manual_seed(0)
    several = [torch.randn(16, n, generator=g) * 10.0**k for n, k in ((8, 0), (64, 2), (1, -3))]
    several[1][3, 5], several[1][9, 9], several[2][0, 0] = INF, NAN, -INF
    scales = [torch.full((1, 1), s) for s in (300.0, 4.0, 1.0)]
    parts = [partial_statistics(x, s, E4M3) for x, s in zip(several, scales, strict=True)]
    found = total_statistics(parts, [x.shape[1] for x in several])
    for row, x, s in zip(found, several, scales, strict=True):
        values = x.reshape(-1).tolist()
        finite = [v for v in values if math.isfinite(v)]
        assert row[CLIPPED] == sum(abs(v) * float(s) > 464 for v in finite)
        assert row[NON_FINITE] == len(values) - len(finite) and row[ELEMENTS] == len(values)
        want = max(map(abs, finite)) if len(finite) == len(values) else None
        assert (row[AMAX] == want) if want is not None else not math.isfinite(row[AMAX])
    assert found[0, CLIPPED] > 0


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_statistics_down_blocks_of_rows_are_those_along_rows_bit_for_bit(rows: int, fmt: Format) -> None:
    """Any partition of a tensor gives the same maximum and the same counts."""
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).bfloat16() * 1e3
    lost = x.clone()
    lost[0, 3], lost[17, 0], lost[63, 39] = INF, NAN, -INF
    scale = torch.full((1, 1), fmt.max / 500)
    for each in (x, lost):
        along = total_statistics([partial_statistics(each, scale, fmt)], [40])
        blocks = each.view(-1, rows, 40)
        down = total_statistics([partial_statistics(blocks, scale, fmt, -2)], [rows])
        assert torch.equal(along.view(torch.int32), down.view(torch.int32)) and down[0, CLIPPED] > 0


def test_each_half_has_its_own_place() -> None:
    early, late = torch.ones(2, 4), torch.full((1, 4), 2.0)
    both = placed([early, late], [False, True], 3)
    assert both[:, 0].tolist() == [1, 1, 0, 2, 0, 0]
    assert placed([late], [True], 3)[:, 0].tolist() == [0, 0, 0, 2, 0, 0]
    assert placed([early], [False], 3)[:, 0].tolist() == [1, 1, 0, 0, 0, 0]


def statistics(amax: float, clipped: float = 0.0, non_finite: float = 0.0, elements: float = 1e6) -> Tensor:
    return torch.tensor([[amax, clipped, non_finite, elements]])


def learnt(history: Tensor, seen: Tensor) -> Tensor:
    return next_history(history, entry_of(seen, history.amax(1) == 0), falls_back(seen))


def test_the_history_is_the_last_amaxes_newest_first() -> None:
    history = torch.zeros(1, 3)
    for amax in (1.0, 5.0, 2.0, 3.0):
        history = learnt(history, statistics(amax))
    assert history.tolist() == [[3.0, 2.0, 5.0]]


def test_an_amax_of_zero_pushes_nothing_out() -> None:
    history = torch.tensor([[4.0, 2.0]])
    assert torch.equal(learnt(history, statistics(0.0)), history)


def test_what_is_left_behind_a_clipped_unknown_is_not_learnt() -> None:
    seen = torch.cat([statistics(3.0, clipped=1e5), statistics(1e-30), statistics(2.0), statistics(1e-30)])
    unknown = torch.tensor([True, True, True, False])
    assert entry_of(seen, unknown).tolist() == [3.0, 0.0, 2.0, pytest.approx(1e-30)]
    seen[0, CLIPPED] = 0
    assert entry_of(seen, unknown)[1] == pytest.approx(1e-30), "small values are values"


def test_patience_lasts_twice_as_long_as_the_last_one_took() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    assert next_patience(torch.tensor([5, PATIENCE]), no).tolist() == [6, PATIENCE]
    assert [next_patience(torch.tensor([n, 7]), yes).tolist() for n in (3, 100, 10**6)] == [
        [0, PATIENCE],
        [0, 200],
        [0, LONGEST],
    ]


@pytest.mark.parametrize("amax", [INF, NAN])
def test_an_amax_that_is_not_finite_is_left_out(amax: float) -> None:
    history = torch.tensor([[4.0, 2.0]])
    assert torch.equal(learnt(history, statistics(amax, non_finite=1)), history)


def test_too_much_is_a_hundred_thousandth_beyond_a_few() -> None:
    """Few elements of a small tensor are no reason: each new largest value would be one."""
    assert not falls_back(statistics(1.0, clipped=CLIPPED_FEW + 10, elements=1e6))
    assert falls_back(statistics(1.0, clipped=CLIPPED_FEW + 11, elements=1e6))
    assert not falls_back(statistics(1.0, clipped=CLIPPED_FEW, elements=64))


def test_who_clipped_too_much_forgets_what_it_knew() -> None:
    history = torch.tensor([[4.0, 2.0, 1.0]])
    assert learnt(history, statistics(0.1, clipped=1e5)).tolist() == [[pytest.approx(0.1), 0.0, 0.0]]


def test_scales_follow_from_the_history() -> None:
    history, largest = torch.tensor([[1.0, 8.0], [0.0, 0.0], [3e38, 0.0]]), torch.tensor([448.0, 57344.0, 448.0])
    found = inv_scale_from(history.amax(1), largest)
    assert found[0] == 8.0 / 448 and found[1] == 2.0**-126 and found[2].isfinite()
    assert inv_scale_from(history.amax(1), largest, margin=3)[0] == 64.0 / 448


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_largest_value_seen_is_never_called_clipped(fmt: Format) -> None:
    """Whatever rounding does to the scale and to its reciprocal."""
    amaxes = torch.rand(100_000, generator=torch.Generator().manual_seed(1)).add(1e-3) * 2.0 ** torch.arange(
        100_000
    ).remainder(60)
    scale = inv_scale_from(amaxes, torch.full_like(amaxes, fmt.max)).reciprocal()
    assert float((amaxes * scale).max()) < clips_above(fmt)


def test_what_is_computed_from_clipped_codes_may_be_as_much_larger() -> None:
    """Each of a backward's gradients, 20 times as large as before, is clipped at twice what it was, and then multiplied."""
    x, w = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)), torch.eye(64) + 1 / 64
    once = [x @ w.matrix_power(k) for k in range(4)]
    limits, seen = torch.stack([2 * y.abs().max() for y in once]), list[Tensor]()
    codes = 20 * x
    for k, limit in enumerate(limits):
        seen.append(codes @ w if k else codes)
        codes = seen[-1].clamp(-limit, limit)
    amax = torch.stack([y.abs().max() for y in seen])
    by = grown_by(amax, limits / 448, torch.full((4,), 448.0), amax > limits, torch.ones(()))
    assert by.shape == (5,) and by[0] == 1 and by[1] == pytest.approx(10)
    true = torch.stack([20 * y.abs().max() for y in once])
    assert bool((amax[1:] < 0.9 * true[1:]).all()), "what was seen is too small"
    assert bool((amax * by[:-1] >= true).all())


def test_only_clipping_enlarges_and_only_what_comes_after() -> None:
    ones, smallest = torch.ones(4), 2.0**-126

    def by(amax: list[float], fell: list[bool], inv_scale: Tensor = ones, before: float = 1.0) -> list[float]:
        found: list[float] = grown_by(
            torch.tensor(amax), inv_scale, ones, torch.tensor(fell), torch.tensor(before)
        ).tolist()
        return found

    assert by([9.0, 9.0, 9.0, 9.0], [False] * 4) == [1, 1, 1, 1, 1]
    assert by([9.0, 5.0, 7.0, 1.0], [False, True, True, False]) == [1, 1, 5, 7, 7]
    assert by([INF, 5.0, NAN, 1.0], [True, True, True, False]) == [1, 1, 5, 5, 5]
    assert by([1.0, 5.0, 1.0, 1.0], [False, True, False, False], before=8.0) == [8, 8, 8, 8, 8]
    assert by([9.0] * 4, [True] * 4, torch.full((4,), smallest)) == [1] * 5, "nothing of it was left to go on from"


def test_what_is_unknown_is_taken_to_be_as_large_as_the_largest_of_its_kind() -> None:
    amax, kinds = torch.tensor([0.0, 3.0, 5.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1, 1])
    assert or_amax_of_kind(amax, kinds).tolist() == [3.0, 3.0, 5.0, 5.0, 2.0]
    assert or_amax_of_kind(torch.zeros(3), kinds[:3]).tolist() == [0.0] * 3


@pytest.mark.parametrize("fmt, binades", [(E4M3, 14), (E5M2, 29)], ids=["e4m3", "e5m2"])
def test_a_smaller_value_keeps_its_precision_for_as_many_binades_as_are_said(fmt: Format, binades: int) -> None:
    x = torch.linspace(0.5, 1, 1000)
    inv_scale = torch.tensor(1 / fmt.max)

    def worst(x: Tensor) -> float:
        return float(((quantize_under(x, inv_scale, fmt).float() * inv_scale - x) / x).abs().max())

    smallest = x * 2.0 ** (1 - binades)
    assert worst(smallest) < 1.05 * fmt.half_ulp < worst(smallest / 4)


def test_zeros_of_a_history_are_no_entries() -> None:
    assert without_zeros(torch.tensor([[0.0, 3.0, 0.0, 5.0], [2.0, 1.0, 0.0, 0.0]])).tolist() == [
        [3.0, 5.0, 0.0, 0.0],
        [2.0, 1.0, 0.0, 0.0],
    ]
