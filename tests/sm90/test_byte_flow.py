"""The check of machine code for stale bytes (byte_flow.py): on a few instructions, and on what ptxas makes of our kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from fp8compile.compiler import ptxas

from . import checked
from .byte_flow import stale_stores
from .checked import tool
from .subprocesses import result_of

PACK = "F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C"


def found(*lines: str) -> list[int]:
    """The numbers of the lines whose stores are wrong; ``-> n`` stands for a branch back to line n."""
    code = [line.replace("-> ", "BRA 0x000") + " ;" for line in lines]
    return [each.address for each in stale_stores("\n".join(f"/*{n:04x}*/   {line}" for n, line in enumerate(code)))]


def test_a_code_that_this_iteration_made_is_fresh() -> None:
    assert not found(
        f"{PACK} R4, R3, R2, RZ", "STS.U8 [R9], R4", "SHF.R.S32.HI R5, RZ, 0x8, R4", "STS.U8 [R9], R5", "-> 0"
    )


def test_a_code_of_the_last_iteration_is_stale() -> None:
    """As ptxas 12.8 has it: the byte is stored above the instruction that makes it, directly and shifted."""
    assert found(
        "STS.U8 [R9], R4", "PRMT R5, R4, 0x9911, RZ", "STS.U8 [R9], R5", f"{PACK} R4, R3, R2, RZ", "-> 0"
    ) == [0, 2]


def test_what_was_made_before_the_loop_is_fresh_unless_the_loop_makes_it_anew() -> None:
    before = f"{PACK} R4, R3, R2, RZ"
    assert not found(before, "STS.U8 [R9], R4", "-> 1")
    assert found(before, "STS.U8 [R9], R4", "MOV R4, R6", "-> 1") == [1]


def test_one_stale_byte_of_four_is_seen_beside_codes_and_not_in_other_words() -> None:
    codes = f"{PACK} R4, R3, R2, RZ"
    assert found(codes, "PRMT R5, R4, 0x5410, R6", "STG.E desc[UR4][R2.64], R5") == [2]
    assert not found(codes, "PRMT R5, R4, 0x5410, R4", "STG.E desc[UR4][R2.64], R5")
    assert not found("STG.E desc[UR4][R2.64], R6", "FADD R6, R6, R6")


def test_codes_merged_into_a_register_keep_its_upper_bytes() -> None:
    low = f"{PACK} R4, R3, R2, RZ"
    assert not found(low, "IMAD.U32 R5, R4, 0x10000, RZ", f"{PACK} R6, R3, R2, RZ", "STG.E [R2], R6")
    assert found(f"{PACK} R6, R3, R2, R7", "STG.E [R2], R6") == [1]


def test_after_the_loop_its_last_codes_are_fresh() -> None:
    assert not found(f"{PACK} R4, R3, R2, RZ", "-> 0", "STG.E.U8 [R2], R4")


def test_a_guarded_write_may_leave_the_old_byte() -> None:
    assert found(f"@P0 {PACK} R4, R3, R2, RZ", "STS.U8 [R9], R4") == [1]
    assert not found("MOV R4, RZ", f"@P0 {PACK} R4, R3, R2, RZ", "STS.U8 [R9], R4")


def test_nested_loops() -> None:
    inner = ("STS.U8 [R9], R4", "-> 1")
    assert not found(f"{PACK} R4, R3, R2, RZ", *inner, "-> 0")
    assert found("NOP", *inner, f"{PACK} R4, R3, R2, RZ", "-> 0") == [1]


@pytest.mark.parametrize("opcode", ["LDG.E.64", "CS2R", "IMAD.WIDE"])
def test_pairs_of_registers_are_written_together(opcode: str) -> None:
    assert not found(f"{opcode} R4, R2, R3, R6", "STG.E.U8 [R2], R5")


def test_a_load_of_matrices_writes_a_register_for_each() -> None:
    code = f"{PACK} R9, R3, R2, RZ"
    assert not found("LDSM.16.M88.4 R4, [R2]", code, "PRMT R8, R9, 0x5410, R7", "STG.E [R2], R8")
    assert found("LDSM.16.M88.2 R4, [R2]", code, "PRMT R8, R9, 0x5410, R7", "STG.E [R2], R8") == [3]


CASES = pytest.mark.parametrize(
    "case",
    [
        "check",
        *(
            pytest.param(f"llama 2k, {pipeline}", marks=pytest.mark.sweep)
            for pipeline in ("linears_delayed_cached", "linears_delayed_cached_merged", "linears", "both")
        ),
    ],
)


@CASES
def test_kernels_assembled_with_the_ptxas_in_force_are_right_where_it_is_not_refused(case: str) -> None:
    """Below 13.0 the fault is seen in the check at first use, so that neither check is asleep."""
    found = result_of("run_byte_flow", case)
    wrong = found["cases"][case]["wrong"]
    if not ptxas.is_wrong(tuple(found["ptxas"])):
        assert not wrong
    elif case == "check":
        assert wrong and all("_red_" in kernel for kernel in wrong), "it is in the looped reduction"
    assert found["cases"][case]["binaries"] > 10


@CASES
def test_kernels_assembled_with_a_ptxas_that_is_not_refused_are_right(case: str) -> None:
    if not tool("ptxas-blackwell").exists():
        pytest.skip("this Triton ships one ptxas")
    found = result_of("run_byte_flow", case, "--blackwell")
    if ptxas.is_wrong(tuple(found["ptxas"])):
        pytest.skip(f"the ptxas for Blackwell is {found['ptxas']}, which is refused")
    assert found["cases"][case]["binaries"] > 10 and not found["cases"][case]["wrong"]


PTX = "cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2;"
RIGHT = f"/*0000*/   {PACK} R4, R3, R2, RZ ;\n/*0010*/   STS.U8 [R9], R4 ;\n"


@pytest.fixture
def sass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What binaries say, the last one first; nothing is assembled."""
    said = list[str]()
    monkeypatch.setenv(checked.MEMORY, str(tmp_path))
    monkeypatch.setattr(checked, "disassembled", lambda _: said.pop())
    monkeypatch.setattr(checked, "_assembled", lambda *_: b"")
    monkeypatch.setattr(checked, "_in_force", lambda: (13, 0))
    yield said
    assert not said, "each was looked at"


def test_what_is_assembled_is_looked_at_once(sass: list[str]) -> None:
    sass.append(RIGHT)
    assert checked.check("kernel", PTX, b"") and not checked.check("kernel", PTX, b"")
    assert not checked.check("kernel", "cvt.rn.bf16.f32 %rs1, %f1;", b""), "it has no FP8 codes"


def test_stale_bytes_of_an_assembled_kernel_are_refused_each_time(sass: list[str]) -> None:
    for _ in range(2):
        sass.append("\n".join(reversed(RIGHT.splitlines())))
        with pytest.raises(AssertionError, match=r"ptxas \(13, 0\) makes kernel store stale bytes: 0010 STS"):
            checked.check("kernel", PTX, b"")


def test_where_the_ptxas_in_force_is_refused_another_one_assembles(
    sass: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "_in_force", lambda: (12, 8))
    monkeypatch.setattr(checked, "_release_for_blackwell", lambda: (12, 9))
    assert not checked.check("kernel", PTX, b""), "there is none that is right"
    monkeypatch.setattr(checked, "_release_for_blackwell", lambda: (13, 1))
    sass.append(RIGHT)
    assert checked.check("kernel", PTX, b"")
