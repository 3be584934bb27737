"""Other libraries' bars: FlashOptim's test of updates, the floors' dynamic programme, and that the study runs."""

from pathlib import Path

import pytest
import torch

from benchmarks.studies import bench_state_bars
from benchmarks.studies.bench_state_bars import least_error, round_trips, update_nmse

torch.set_num_threads(1)

BAR = 0.01  # FlashOptim's


@pytest.mark.parametrize("strategy", ["ones", "const", "rand"])
@pytest.mark.parametrize("shape", [(5, 5), (12, 12)], ids=str)
def test_four_bits_pass_flashoptims_update_test(strategy: str, shape: tuple[int, int]) -> None:
    assert update_nmse("4bit_log", strategy, shape) < BAR


def test_one_flat_row_fails_and_no_seven_levels_could_encode_it_well_enough() -> None:
    ramp = torch.arange(1.0, 128)
    assert update_nmse("4bit_log", "const", (144,)) > BAR
    assert least_error(ramp, ramp**-2, 7) > 2 * BAR
    assert least_error(ramp, ramp**-2, 15) < BAR


def test_the_floor_is_exact_where_it_is_known() -> None:
    """One level: the variance. As many levels as values: 0. Two of four values: the best of all cuts, by hand."""
    x = torch.tensor([3.0, 1.0, 10.0, 12.0])
    ones = torch.ones(4)
    energy = float((x * x).sum())
    assert least_error(x, ones, 1) == pytest.approx(float((x - x.mean()).square().sum()) / energy)
    assert least_error(x, ones, 4) == pytest.approx(0, abs=1e-12)
    assert least_error(x, ones, 2) == pytest.approx((2 + 2) / energy)
    weighted = least_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), 1)
    assert weighted == pytest.approx((0.75**2 + 3 * 0.25**2) / 13)


def test_dithering_is_what_leaves_the_round_trips_bounds() -> None:
    nearest, dithered = (round_trips("e4m3_expanded", how) for how in ("nearest", "dithered"))
    assert nearest["cosine"] < dithered["cosine"] / 4 and nearest["mean error"] == 0


def test_the_study_runs(tmp_path: Path) -> None:
    found = bench_state_bars.main(["--quick", "--json", str(tmp_path / "bars.json")])
    distances = found["bf16"]  # a third of an ulp, and a quarter
    assert distances["none, 1 steps"] / distances["fp32, 1 steps"] == pytest.approx(4 / 3, rel=0.05)
