"""A wrong assembler is refused, and generated code is checked, before the first graph runs on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.compiler import ptxas, store_check
from fp8compile.compiler.cpu_vectors import vectors_of
from fp8compile.compiler.store_check import (
    check_stores,
    check_stores_first,
    prepare_ptxas,
    ptxas_remarks,
    refuse_wrong_ptxas,
)

TOLD = "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release {}, V{}.93\nBuild cuda"
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("release", "wrong"), [("12.8", True), ("12.9", True), ("13.0", False), ("13.4", False), ("14.0", False)]
)
def test_the_release_of_ptxas_tells_a_wrong_one(release: str, wrong: bool) -> None:
    assert ptxas.is_wrong(ptxas.release_in(TOLD.format(release, release))) == wrong


def test_an_unknown_release_is_left_to_the_check() -> None:
    assert ptxas.release_in("no such thing") is None
    assert not ptxas.is_wrong(None)


@pytest.mark.parametrize(
    ("release", "capability", "refused"),
    [((12, 8), (9, 0), True), ((12, 9), (8, 9), True), ((13, 0), (9, 0), False), ((12, 8), (10, 0), False)],
)
def test_a_wrong_ptxas_is_refused(release: tuple[int, int], capability: tuple[int, int], refused: bool) -> None:
    refuse_wrong_ptxas.cache_clear()
    with (
        mock.patch.object(ptxas, "ptxas_in_force", lambda: release),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        if refused:
            with pytest.raises(RuntimeError, match=rf"ptxas {release[0]}\.{release[1]} corrupts .*13\.0"):
                refuse_wrong_ptxas(GPU)
        else:
            refuse_wrong_ptxas(GPU)
    refuse_wrong_ptxas.cache_clear()


@pytest.mark.parametrize(
    ("release", "capability", "said"),
    [((13, 0), (9, 0), ("13.0",)), (None, (8, 9), ("of unknown release",)), ((13, 0), (10, 0), ())],
)
def test_the_report_tells_which_ptxas_is_in_force(
    release: tuple[int, int] | None, capability: tuple[int, int], said: tuple[str, ...]
) -> None:
    with (
        mock.patch.object(ptxas, "ptxas_in_force", lambda: release),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        told = ptxas_remarks([torch.ones(2), mock.Mock(spec=Tensor, device=GPU)])
        assert told == tuple(f"generated kernels are assembled by ptxas {each}" for each in said)
        assert ptxas_remarks([torch.ones(2)]) == ()


def test_this_process_assembles_as_workers_do_where_a_gpu_is_used() -> None:
    called: list[bool] = []
    with mock.patch.object(private, "set_triton_ptxas_path", lambda: called.append(True)):
        prepare_ptxas([torch.ones(2), 3])
        assert not called
        prepare_ptxas([mock.Mock(spec=Tensor, device=GPU)])
    assert called == [True]


def test_nothing_is_checked_on_a_cpu() -> None:
    def compiled(x: Tensor) -> Tensor:
        return x

    assert check_stores_first(compiled, [torch.ones(2), 3]) is compiled


def test_on_a_gpu_the_checks_run_before_the_first_call() -> None:
    on_cuda, seen = mock.Mock(spec=Tensor, device=GPU), []
    with (
        mock.patch.object(store_check, "refuse_wrong_ptxas", lambda device: seen.append("ptxas")),
        mock.patch.object(store_check, "check_stores", lambda device: seen.append(str(device))),
    ):
        run = check_stores_first(lambda x: seen.append(x) or x, [on_cuda, on_cuda, torch.ones(2)])
        assert run(5) == 5
    assert seen == ["ptxas", "cuda:0", 5]


def test_generated_code_of_this_machine_is_right() -> None:
    """In the vectors that a graph of ours takes on this machine."""
    check_stores.cache_clear()
    torch._dynamo.reset()
    options = vectors_of([torch.ones(2)], {})
    with torch._inductor.config.patch(options):
        check_stores(torch.device("cpu"))


@pytest.mark.parametrize("wrong", ["_stored_twice", "stored_twice_in_a_loop"])
def test_one_wrong_code_is_refused_with_the_cure(wrong: str) -> None:
    right = getattr(store_check, wrong)

    def one_wrong(x: Tensor) -> tuple[Tensor, ...]:
        codes, transposed, *others = right(x)
        transposed.view(torch.uint8)[3, 5] ^= 1
        return (codes, transposed, *others)

    check_stores.cache_clear()
    with (
        mock.patch.object(torch, "compile", lambda fn: one_wrong if fn is right else fn),
        pytest.raises(RuntimeError, match=r"FP8 values .*, 1 are not .*TRITON_PTXAS_PATH"),
    ):
        check_stores(torch.device("cpu"))
    check_stores.cache_clear()
