"""Where the compiler is wrong in the vectors of AVX-512, shorter ones are taken, and a warning says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fp8compile import _torch as private
from fp8compile.compiler import cpu_vectors, report_store
from fp8compile.compiler.cpu_vectors import SHORT, WARNING, is_seen_to_be_wrong, long_vectors_are_right, vectors_of
from fp8compile.compiler.store_check import stored_twice_in_a_loop

ON_CPU = [torch.ones(2), 3]
ON_GPU = [mock.Mock(spec=Tensor, device=torch.device("cuda", 0))]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """One with AVX-512, whose compiler is right or wrong as the test says."""
    said = {"right": False}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_vectors, "is_seen_to_be_wrong", lambda: False)
    monkeypatch.setattr(cpu_vectors, "long_vectors_are_right", lambda: said["right"])
    monkeypatch.setattr(report_store, "_warned", set())
    yield said


def test_short_ones_only_where_long_ones_are_wrong_and_that_is_said(
    machine: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert [vectors_of(ON_CPU, {}) for _ in range(2)] == [SHORT] * 2 and caplog.messages == [WARNING], "said once"
    machine["right"] = True
    assert vectors_of(ON_CPU, {}) == {}


def test_what_the_user_says_is_taken(machine: dict[str, bool]) -> None:
    assert vectors_of(ON_CPU, {"cpp.simdlen": 512}) == {}
    with private.inductor_config.patch({"cpp.simdlen": 512}):
        assert vectors_of(ON_CPU, {}) == {}


def test_nothing_is_compiled_for_the_test_where_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vectors, "long_vectors_are_right", lambda: pytest.fail("not needed"))
    assert vectors_of(ON_GPU, {}) == {}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert vectors_of(ON_CPU, {}) == {}


@pytest.mark.parametrize(
    ("says", "seen"),
    [
        ("gcc version 12.2.0 (Debian 12.2.0-14)", True),
        ("gcc version 12.20.1", False),
        ("clang 12.2.0", False),
    ],
)
def test_a_compiler_that_was_seen_to_be_wrong_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, seen: bool
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    tried = mock.Mock(return_value=True)
    monkeypatch.setattr(cpu_vectors, "long_vectors_are_right", tried)
    for cxx in (str(compiler), (None, str(compiler))):
        is_seen_to_be_wrong.cache_clear()
        with private.inductor_config.patch({"cpp.cxx": cxx}):
            assert vectors_of(ON_CPU, {}) == (SHORT if seen else {})
    assert tried.called is not seen
    is_seen_to_be_wrong.cache_clear()
    with private.inductor_config.patch({"cpp.cxx": "/no/such/compiler"}):
        assert not is_seen_to_be_wrong()
    is_seen_to_be_wrong.cache_clear()


@pytest.mark.parametrize("wrong", [False, True])
def test_one_wrong_code_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    def compiled(x: Tensor) -> tuple[Tensor, ...]:
        codes, *others = stored_twice_in_a_loop(x)
        codes.view(torch.uint8)[3, 5] ^= wrong
        return (codes, *others)

    monkeypatch.setattr(private, "compile_fx", lambda graph, inputs: compiled)
    assert long_vectors_are_right.__wrapped__() == (not wrong)


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_only_where_code_is_generated(
    machine: dict[str, bool], caplog: pytest.LogCaptureFixture, codegen: str
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    compiled = torch.compile(model, backend="fp8compile", options={"saved.min_numel": 0, "debug.codegen": codegen})
    compiled(torch.randn(32, 32)).sum().backward()
    assert (WARNING in caplog.messages) == (codegen == "inductor")


def test_in_the_first_step_of_a_model_the_test_itself_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles while Dynamo hands over another graph, which then is as it would be."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_vectors, "is_seen_to_be_wrong", lambda: False)
    long_vectors_are_right.cache_clear()
    model, x = nn.Linear(32, 32), torch.randn(32, 32)
    compiled = torch.compile(model, backend="fp8compile", options={"saved.min_numel": 0}, dynamic=True)
    assert torch.allclose(compiled(x), model(x), atol=0.1)
    assert long_vectors_are_right.cache_info().misses == 1
