"""Which tests are nearest to a change."""

from __future__ import annotations

from pathlib import Path

from tests.nearest import ALWAYS, nearest


def test_tests_of_the_same_name_then_of_the_same_room() -> None:
    assert nearest(["passes/share_casts.py"]) == [
        "tests/passes/test_share_casts.py",
        "tests/passes/test_share_casts_dtypes.py",
        *ALWAYS,
    ]
    assert nearest(["fp8compile/optim/code_writer.py"]) == ["tests/optim", *ALWAYS]
    assert nearest(["benchmarks/studies/parity.py"]) == ["tests/benchmarks/test_parity.py", *ALWAYS]
    assert nearest(["benchmarks/kernels/bench_casts.py"]) == ["tests/benchmarks", *ALWAYS]
    assert nearest(["fp8compile/analysis/ranges/rules.py"]) == ["tests/analysis/ranges/test_rules.py", *ALWAYS]


def test_a_test_is_itself_and_prose_has_none(tmp_path: Path) -> None:
    assert nearest(["tests/optim/test_rounding.py", "README.md", "tests/support/measure.py"]) == [*ALWAYS]
    assert nearest(["tests/test_canary.py", "fp8compile/_torch.py"]) == ["tests/test_canary.py", *ALWAYS]
    assert nearest(["fp8compile/optim/plan.py"], tmp_path) == [*ALWAYS]
