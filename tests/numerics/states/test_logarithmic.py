"""Logarithmic second moments: every code of every step, error bounds, which codes move, and what is unbiased."""

import math

import pytest
import torch

from fp8compile.numerics.states.companding import Companded4
from fp8compile.numerics.states.dither import threshold_of
from fp8compile.numerics.states.logarithmic import MOST_CLASS, Log2, Log4, with_class
from fp8compile.numerics.states.packing import joined_planes, packed_planes, parted_planes, unpacked_planes
from tests.support.reference import bits_equal

torch.set_num_threads(1)

THRESHOLDS = 4096
THRESHOLD = 3.2 / THRESHOLDS  # so many numbers in sequence stand for chances to this: test_dither.py
ROUNDINGS = ("nearest", "dithered")
LOG2_OFF = 2.0**-16  # of a step: logarithms and powers of FP32, over steps of 2**-8 octaves and more
RISE = 2.0**-11 / math.log(2)  # octaves that 4096 numbers in a row rise by: over s, so much of a chance may be off


def consecutive(first, count=THRESHOLDS):
    """FP32 numbers from ``first`` up."""
    return (torch.tensor(first).view(torch.int32) + torch.arange(count, dtype=torch.int32)).view(torch.float32)


def decoded(codec, x):
    return codec.decode(codec.encode(x), x.shape)


def levels_of(step_class, amax=1.0):
    """Of log4 with a step, its 15 levels, downwards: ``[15]``. As 16, of which a CPU leaves none to scalar functions."""
    frame = with_class(torch.tensor([[amax]]), torch.tensor([[step_class]], dtype=torch.int32))
    return Log4().decode_groups(torch.arange(15, -1, -1)[None], frame)[0, :15]


# ------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("step_class", range(MOST_CLASS - 2))
def test_every_code_of_every_step_is_a_fixed_point(step_class, rounding):
    """All 16 codes. Of the three widest steps, 14 are more octaves than FP32 has."""
    codec = Log4(16, rounding=rounding)
    assert levels_of(MOST_CLASS - 2, 3.7)[14] <= 2.0**-126 < levels_of(step_class, 3.7)[14]
    x = torch.cat([levels_of(step_class, 3.7), torch.zeros(1)])[None]
    codes, amax = codec.encode(x)
    assert int(amax.view(torch.int32)[0, 0]) & 31 == step_class
    assert unpacked_planes(codes, x.shape, 16, 4)[0].tolist() == [*range(15, 0, -1), 0]
    assert bits_equal(codec.decode((codes, amax), x.shape), x)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_code_of_two_bits_is_a_fixed_point(rounding):
    codec, x = Log2(4, rounding=rounding), torch.tensor([[1.0, 1 / 4, 1 / 16, 1 / 64]]) * 3.7
    codes, _ = codec.encode(x)
    assert codes.tolist() == [[3 | 2 << 2 | 1 << 4]]
    assert bits_equal(decoded(codec, x), x)


def test_the_step_is_the_least_that_reaches_the_smallest():
    """Ranges of 0.01 to 127 octaves: 14 steps of class c reach it, to 2**-6 of a class, and 14 of class c - 1 do not."""
    for octaves in torch.logspace(-2, math.log10(127), 200).tolist():
        x = torch.tensor([[2.0**124, 2.0 ** (124 - octaves)]])
        [_, amax] = Log4().encode(x)
        step_class = int(amax.view(torch.int32)[0, 0]) & 31
        needed = 2 * math.log2(octaves / 14) + 16
        assert step_class >= min(needed - 2.0**-6 - 1e-4, MOST_CLASS) and step_class >= 0
        assert step_class == 0 or step_class - 1 < needed + 1e-4


def test_amax_keeps_all_but_its_last_bits():
    every = torch.logspace(-37, 38.5, 5000, dtype=torch.float64).float()
    for step_class in (0, 13, MOST_CLASS):
        framed = with_class(every, torch.full(every.shape, step_class, dtype=torch.int32))
        assert (framed.view(torch.int32) & 31 == step_class).all() and framed.isfinite().all()
        assert ((framed.double() / every - 1).abs() <= 2.0**-19).all()
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert with_class(largest, torch.tensor([31], dtype=torch.int32)).isfinite().all()


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_nearest_is_off_by_half_a_step_at_most(spread):
    x = torch.exp(spread * torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    codec = Log4(rounding="nearest")
    parts = codec.encode(x)
    step = 2.0 ** ((parts[1].view(torch.int32) & 31).float() / 2 - 8)
    off = (codec.decode(parts, x.shape).double() / x.double()).log2().abs()
    assert (
        off <= step * (0.5 + LOG2_OFF) + 2.0**-18 + 14 * step * 2.0**-6 / 2
    ).all()  # the slack of a class, at its end
    narrow = (x / x.amax(1, keepdim=True)).clamp_min(1 / 128)
    assert ((decoded(Log2(rounding="nearest"), narrow) / narrow).log2().abs() <= 1 + 1e-5).all()


# ---------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    "codec", [Log4(rounding="dithered"), Log2(rounding="dithered")], ids=lambda codec: codec.name
)
def test_the_fourth_root_is_right_over_all_thresholds(codec):
    """One element beside its group's largest and smallest, at 40 places between two levels, at all 4096 mantissas' ends."""
    low = 2.0**-7 if codec.name == "log4" else 2.0**-6
    for at in torch.linspace(0.02, 0.98, 40).tolist():
        x = consecutive(low**at)
        group = torch.stack([torch.ones_like(x), torch.full_like(x, low), x], 1)
        v = decoded(codec, group)[:, 2].double()
        levels = v.unique()
        assert len(levels) <= 2 and levels[0] <= x[-1] * (1 + 1e-6) and levels[-1] >= x[0] * (1 - 1e-6)
        spacing = levels[-1] ** 0.25 - levels[0] ** 0.25
        off = (v**0.25).mean() - (x.double() ** 0.25).mean()
        step = 0.5 if codec.name == "log4" else 2.0
        assert abs(off) <= (THRESHOLD + 8 * LOG2_OFF + RISE / step) * spacing + 1e-7


BETAS = (0.5, 0.9, 0.99, 0.999, 0.9999)


@pytest.mark.parametrize("beta2", BETAS)
def test_which_codes_move_is_what_the_analysis_says(beta2):
    """All codes of log4 in steps of half an octave, all g**2 / v of a grid: nearest moves where the formula says, else never.

    Dithered, the mean over all thresholds has moved wherever v has, for any beta2, and by as much.
    """
    r = 2.0**0.5
    levels = levels_of(14)
    ends = torch.stack([levels[0], levels[14]])
    for j in range(1, 14):
        v = levels[j].double()
        for ratio in (0.0, 0.5, 1.0, 1.5, 3.0, 10.0, 14.0, 16.0, 100.0, 1000.0):
            fresh = beta2 * v + (1 - beta2) * ratio * v
            if not levels[14] < fresh < levels[0]:
                continue
            x = consecutive(float(fresh))
            group = torch.cat([ends.expand(len(x), 2), x[:, None]], 1)
            nearest = decoded(Log4(rounding="nearest"), group)[0, 2].double()
            up = ratio >= 1 + (r**0.5 - 1) / (1 - beta2)
            down = beta2 + (1 - beta2) * ratio <= r**-0.5
            assert ((nearest > v * 1.01) == up) and ((nearest < v * 0.99) == down), (j, ratio)
            mean = (decoded(Log4(rounding="dithered"), group)[:, 2].double() ** 0.25).mean()
            bound = (THRESHOLD + 8 * LOG2_OFF + RISE / 0.5) * fresh**0.25 * (r**0.25 - 1)
            assert abs(mean - (x.double() ** 0.25).mean()) <= bound


def test_nearest_falls_at_a_matched_beta2_and_at_no_larger_one():
    """1 / sqrt(r): an element decays beside one that stays, by nearest rounding, only with beta2 at or below it."""
    levels = levels_of(14)
    for beta2, falls in ((2.0**-0.25 * 0.999, True), (2.0**-0.25 * 1.001, False)):
        group = torch.stack([levels[0], levels[14], levels[5] * beta2])[None]
        assert (decoded(Log4(rounding="nearest"), group)[0, 2] < levels[5] * 0.99) == falls


class RightInV(Log4):
    """The same levels, rounded so that v itself is unbiased."""

    def codes_of(self, x, *basis):
        amax, frame = basis
        step = self.step_of(frame)
        down = (torch.log2(amax / x.clamp_min(2.0**-126)) / step).clamp(0, self.steps)
        above = down.floor()
        chance = (1 - torch.exp2(-step * (down - above))) / (1 - torch.exp2(-step))
        return torch.where(x > 0, 15 - above - (threshold_of(x) < chance).float(), 0.0)


def length_of_updates(codec, beta2=0.99, steps=1500):
    """The mean of 1 / sqrt(v) over that of FP32, where gradients are normal; the steps of each group are half an octave."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.ones(64, 126)
    ends = torch.tensor([8.0, 8.0 * 2.0**-6.9]).expand(64, 2)
    stored, found = exact.clone(), []
    for step in range(steps):
        g2 = torch.randn(64, 126, generator=generator).square()
        exact = beta2 * exact + (1 - beta2) * g2
        fresh = beta2 * stored + (1 - beta2) * g2
        if step >= steps // 2 and step % 50 == 0:
            found.append(float(fresh.rsqrt().mean() / exact.rsqrt().mean()))
        stored = decoded(codec, torch.cat([ends, fresh], 1))[:, 2:]
    return sum(found) / len(found)


def test_updates_are_as_long_as_fp32s_and_longer_where_v_itself_is_right():
    """p = 1 makes them longer by 3 / 16 a D: a = 0.97 of normal gradients, D = sqrt(2) - 1, 7.5 %.

    p = 1/4: of second order in D, a third of that at most.
    """
    first_order = 3 / 16 * 0.97 * (2**0.5 - 1)
    assert abs(length_of_updates(Log4(rounding="dithered")) - 1) < first_order / 3
    assert length_of_updates(RightInV()) - 1 > first_order * 2 / 3


# --------------------------------------------------------------------------------------------- packing, four bits


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_is_undone_for_every_length_to_a_thousand(bits):
    codes = torch.randint(0, 2**bits, (2, 1000), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for length in range(1, 1001):
        part = codes[:, :length]
        packed = packed_planes(part, part.shape, 128, bits)
        assert packed.shape == (2, math.ceil(length * bits / 8))
        assert torch.equal(unpacked_planes(packed, part.shape, 128, bits), part)


@pytest.mark.parametrize("bits", [2, 4])
def test_planes_of_bytes_are_the_bytes(bits):
    """A group in 4 planes is packed as the group in one piece."""
    codes = torch.randint(0, 2**bits, (3, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    planes = joined_planes(codes.split(32, 1), bits)
    assert torch.equal(torch.cat(planes, 1), packed_planes(codes, codes.shape, 128, bits))
    assert torch.equal(torch.cat(parted_planes(planes, bits), 1), codes.int())


def test_all_sixteen_codes_of_companded_four_bits_and_its_bound():
    codec = Companded4()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    codes, amax = codec.encode(x)
    assert set(unpacked_planes(codes, x.shape, 128, 4).unique().tolist()) == {*range(16)} - {8}
    assert amax.dtype == torch.bfloat16
    x_hat, peak = codec.decode((codes, amax), x.shape), amax.float()
    a = torch.maximum(x.abs(), x_hat.abs()) / peak
    assert ((x_hat - x).abs() <= peak / 14 * (1 + a) ** 2 / 2 + 2.0**-8 * peak).all()
    assert bits_equal(codec.decode(codec.encode(x_hat), x.shape), x_hat)
