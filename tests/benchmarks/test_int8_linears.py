"""The study of INT8 linears: it runs, its ratios are those of its laps, and its errors are those of the formats it names."""

from __future__ import annotations

from benchmarks.harness.int8_section import int8_linears
from benchmarks.harness.results import FOLDER
from benchmarks.studies import bench_int8_linears as study


def test_ratios_are_those_of_laps_that_ran_one_after_the_other() -> None:
    times = {"FP32": [4.0, 8.0, 8.0], "BF16": [2.0, 8.0, 2.0], "INT8": [1.0, 4.0, 1.0]}
    assert study._faster(times, "INT8") == {"FP32": 4.0, "BF16": 2.0}
    assert study._faster(times, "FP32") == {"FP32": 1.0, "BF16": 0.5}


def test_errors_of_a_product() -> None:
    """A step is amax / 127, and an error a twelfth of its square on average; twice that where rounding is stochastic."""
    found = study.errors("Gaussian", 256, 256, 128)
    assert found["INT8, a row"] > found["E4M3, a row"] + 6 > found["E5M2, a row"] + 6
    lost = found["INT8, a row"] - found[study.STOCHASTIC]
    assert 1.0 < lost < 2.6, "errors of x and w are alike: (2 + 1) / 2 is 1.8 dB"


def test_every_arm_runs_and_is_in_the_page() -> None:
    found = study.main(["--tiny"])
    assert set(found["layers"]["tiny"]) == set(study.ARMS)
    (products,) = found["products"].values()
    assert all(row["seconds"] >= row["least"] > 0 for row in products.values())
    page = "\n".join(int8_linears(FOLDER))
    assert all(arm in page for arm in study.ARMS) and all(like in page for like in study.LIKE)
