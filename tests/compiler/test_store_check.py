"""On a pair of torch and triton that nobody tested, a kernel is checked before the first graph runs on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8compile.compiler import store_check
from fp8compile.compiler.store_check import TESTED, check_stores, check_stores_first, is_tested


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "tested"),
    [
        ("2.13.0+cu128", "3.7.1", True),
        ("2.11.0", "3.6.0", True),
        ("2.15.0a0+git1", "3.9.0", True),
        ("2.13.0", "3.8.0", False),
        ("2.12.1", "3.7.1", False),
        ("2.13.0", "0.0", False),
    ],
)
def test_pairs_are_told_by_their_releases(torch_version: str, triton_version: str, tested: bool) -> None:
    assert is_tested(torch_version, triton_version) == tested


def test_nothing_is_checked_on_a_cpu_or_on_a_tested_pair() -> None:
    def compiled(x: Tensor) -> Tensor:
        return x

    assert check_stores_first(compiled, [torch.ones(2), 3]) is compiled
    on_cuda = mock.Mock(spec=Tensor, device=torch.device("cuda", 0))
    with mock.patch.object(store_check, "is_tested", lambda *_: True):
        assert check_stores_first(compiled, [on_cuda]) is compiled


def test_elsewhere_the_check_runs_before_the_first_call() -> None:
    on_cuda, seen = mock.Mock(spec=Tensor, device=torch.device("cuda", 0)), []
    with (
        mock.patch.object(store_check, "is_tested", lambda *_: False),
        mock.patch.object(store_check, "check_stores", lambda device: seen.append(str(device))),
    ):
        run = check_stores_first(lambda x: seen.append(x) or x, [on_cuda, on_cuda, torch.ones(2)])
        assert run(5) == 5
    assert seen == ["cuda:0", 5]


def test_generated_code_of_this_machine_is_right() -> None:
    check_stores.cache_clear()
    check_stores(torch.device("cpu"))


def test_one_wrong_code_is_refused_with_the_cure() -> None:
    def one_wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, turned = store_check._stored_twice(x)
        turned.view(torch.uint8)[3, 5] ^= 1
        return codes, turned

    check_stores.cache_clear()
    cure = ", ".join(f"torch {a}.{b} with triton {c}.{d}" for (a, b), (c, d) in TESTED)
    with (
        mock.patch.object(torch, "compile", lambda fn: one_wrong),
        pytest.raises(RuntimeError, match=rf"of 262144 FP8 values .*, 1 are not .*{cure}"),
    ):
        check_stores(torch.device("cpu"))
    check_stores.cache_clear()
