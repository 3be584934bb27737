"""The harness replaces private names of torch and triton: notice, by name, when either has changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from . import fake_h100
from .subprocesses import result_of


def test_harness_works_with_what_is_installed() -> None:
    assert fake_h100.installed() in fake_h100.WORKS_WITH, (
        f"the sm_90 harness works with {fake_h100.known_pairs()}; {fake_h100.installed()} is installed. If all else in this "
        "folder passes but for exact figures, and the generated kernels look as before, add the pair to WORKS_WITH."
    )


def test_every_name_that_is_replaced_exists() -> None:
    assert result_of("run_canary", interpret=True) == fake_h100.installed()


def test_figures_are_those_of_the_installed_pair() -> None:
    """Of the pair that the harness was made for, but where another has its own."""
    found = fake_h100.figures({"a": 1, "b": 2}, oldest={"a": 11}, newest={"a": 15})
    wanted = {fake_h100.OLDEST["torch"]: 11, fake_h100.NEWEST["torch"]: 15}.get(fake_h100.installed()["torch"], 1)
    assert found == {"a": wanted, "b": 2}


def test_a_name_that_is_gone_is_reported() -> None:
    owner = SimpleNamespace(kept=1)
    fake_h100.replace(owner, "kept", 2)
    fake_h100.replace(owner, "only_in_cuda_builds", 3, may_be_absent=True)
    with pytest.raises(fake_h100.HarnessOutdated, match=r"SimpleNamespace\.gone is gone .* made for torch 2"):
        fake_h100.replace(owner, "gone", 4)
    assert owner == SimpleNamespace(kept=2, only_in_cuda_builds=3)


def test_this_process_is_never_mocked() -> None:
    with pytest.raises(RuntimeError, match="subprocess"):
        fake_h100.install()
