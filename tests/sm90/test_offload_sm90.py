"""Lowered for an H100: four layers of which codes wait on the host. Copies, their order, and the waits before a use."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from fp8compile import _torch as private

from .subprocesses import result_of

pytestmark = pytest.mark.skipif(private.transfers() is None, reason="torch 2.11 has no operators for it")

_BEGUN = re.compile(r"(\w+) = torch\.ops\.ao\.(?:offload|reload)\.default\((\w+)")
_WAITED = re.compile(r"(\w+) = torch\.ops\.ao\.wait_tensor\.default\((\w+), (?:None, )?(\w+)\)")
_SAME = re.compile(r"(\w+) = (\w+)$")
offloading = pytest.mark.parametrize("offload", ["auto", "all"])


class Copy(NamedTuple):
    """A copy in generated code: its source and result, and the lines in which it begins and is waited for."""

    source: str
    result: str
    begun: int
    waited: int


def half(offload: str, which: int) -> list[str]:
    found: list[str] = result_of("run_offload")[offload][which]
    return found


def copies(lines: list[str]) -> list[Copy]:
    """The copies of a half, each with the one wait for it."""
    found, waits, same = [], {}, {}
    for at, line in enumerate(lines):
        if waited := _WAITED.match(line):
            waits[same.get(waited[2], waited[2])] = (at, waited)
        elif begun := _BEGUN.match(line):
            found.append((at, begun))
        elif alias := _SAME.match(line):
            same[alias[1]] = same.get(alias[2], alias[2])
    assert len(found) == len(waits)
    made = []
    for at, begun in found:
        waited_at, waited = waits[begun[1]]
        assert waited[3] == begun[2], "the wait keeps the source in memory"
        made.append(Copy(begun[2], waited[1], at, waited_at))
    return made


def between(lines: list[str], copy: Copy) -> list[str]:
    return lines[copy.begun + 1 : copy.waited]


def test_without_it_there_are_no_copies() -> None:
    assert not any("ops.ao" in line for which in (0, 1) for line in half("off", which))


@offloading
def test_no_source_is_dropped_or_used_again_before_its_copy_is_done(offload: str) -> None:
    for which in (0, 1):
        lines = half(offload, which)
        assert copies(lines)
        for copy in copies(lines):
            gone = [line for line in between(lines, copy) if re.search(rf"\bdel {copy.source}\b", line)]
            assert not gone, gone


@offloading
def test_what_comes_back_is_read_behind_its_wait(offload: str) -> None:
    lines = half(offload, 1)
    for copy in copies(lines):
        read = [line for line in between(lines, copy) if re.search(r"\.run\(|mm\(", line) and copy.source in line]
        assert not read and copy.begun < copy.waited


def test_all_codes_go_and_auto_takes_a_part() -> None:
    """Eight values a layer: the input, q, k, v, attention's result, the sum behind it, gate and up."""
    assert [len(copies(half("all", which))) for which in (0, 1)] == [32, 32]
    some = len(copies(half("auto", 0)))
    assert 0 < some < 32 and len(copies(half("auto", 1))) == some


def test_kernels_run_beside_hidden_copies() -> None:
    """Under "auto" something runs between the beginning of each copy and the wait for it, both ways."""
    for which in (0, 1):
        lines = half("auto", which)
        for copy in copies(lines):
            assert any(".run(" in line or "mm(" in line or "attention" in line for line in between(lines, copy)), copy
