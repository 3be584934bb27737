"""The harness replaces private names of torch and triton: notice, by name, when either has changed."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from . import fake_h100
from .subprocesses import result_of


@pytest.mark.parametrize("package", fake_h100.MADE_FOR)
def test_harness_was_made_for_this_version(package: str) -> None:
    installed, made_for = version(package).split("+")[0], fake_h100.MADE_FOR[package]
    assert installed == made_for, (
        f"the sm_90 harness was made for {package} {made_for}, {installed} is installed. If all else in this "
        "folder passes and the generated kernels look as before, set MADE_FOR in fake_h100.py."
    )


def test_every_name_that_is_replaced_exists() -> None:
    assert result_of("run_canary", interpret=True) == fake_h100.MADE_FOR


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
