"""A kernel's text for many parameters: what changes in it, and what is left alone because it is of another kind."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest

from fp8compile.optim.kernel_text import for_many, parsed, same_pointers

ONE = """\
import triton
import triton.language as tl

@triton_heuristics.persistent_reduction(
    size_hints={'x': 32768, 'r0_': 128},
    triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp8e4nv', 'ks0': 'i64', 'xnumel': 'i32', 'r0_numel': 'i32', \
'XBLOCK': 'constexpr'}, 'constants': {}, 'configs': [{(0,): [['tt.divisibility', 16]], (4,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D'}
)
@triton.jit
def triton_per_fused_add_0(in_ptr0, in_ptr1, ks0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    r0_numel = 128
    R0_BLOCK: tl.constexpr = 128
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]

    tl.store(in_ptr1 + xindex, tl.load(in_ptr0 + xindex))


def get_args():
    return ()
"""


class TestText(expecttest.TestCase):
    def test_pointers_and_sizes_come_from_a_table(self) -> None:
        kernel = parsed(ONE)
        assert kernel is not None and kernel.row == 128 and kernel.divisible == {0, 4}
        self.assertExpectedInline(
            for_many(kernel, [0], [0, 1, 2, 3, 4]),
            """\
import triton
import triton.language as tl


@triton.jit
def one(in_ptr0, in_ptr1, ks0, xnumel, r0_numel, block_of_it, XBLOCK : tl.constexpr):
    r0_numel = 128
    R0_BLOCK: tl.constexpr = 128
    xoffset = block_of_it * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]

    tl.store(in_ptr1 + xindex, tl.load(in_ptr0 + xindex))


@triton.jit
def optimizer_step(table, fresh, owners, XBLOCK: tl.constexpr):
    block, owner = tl.program_id(0), tl.load(owners + tl.program_id(0)).to(tl.int64)
    row, new = table + owner * 6, fresh + owner * 1
    a0 = tl.multiple_of(tl.load(new + 0).to(tl.pointer_type(tl.bfloat16)), 16)
    a1 = tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv))
    a2 = tl.load(row + 2).to(tl.int64)
    a3 = tl.load(row + 3).to(tl.int32)
    a4 = tl.multiple_of(tl.load(row + 4).to(tl.int32), 16)
    one(a0, a1, a2, a3, a4, block - tl.load(row + 5).to(tl.int32), XBLOCK)
""",
        )


def test_what_is_updated_in_place_is_one_pointer_where_it_is_so_in_every_row() -> None:
    kernel = parsed(ONE.replace("'ks0': 'i64'", "'out_ptr0': '*bf16'").replace("ks0", "out_ptr0"))
    assert kernel is not None and kernel.types == ("*bf16", "*fp8e4nv", "*bf16", "i32", "i32")
    whole, other = replace(kernel, divisible=frozenset()), [5, 6, 7, 8, 8]
    assert same_pointers(whole, [[16, 32, 16, 8, 8], [48, 64, 48, 8, 8]], []) == (0, 1, 0, 3, 4)
    assert same_pointers(whole, [[16, 32, 16, 8, 8], other], []) == (0, 1, 2, 3, 4)
    assert same_pointers(whole, [[16, 32, 16, 8, 8]], [0]) == (0, 1, 2, 3, 4)  # addresses that are new at every step
    assert same_pointers(kernel, [[16, 32, 16, 8, 8]], []) == (0, 1, 2, 3, 4)  # aligned, and not
    text = for_many(whole, [1], (0, 1, 0, 3, 4))
    assert "one(a0, a1, a0, a3, a4, block" in text and "a2" not in text


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("tl.program_id(0) * XBLOCK", "tl.program_id(0) * XBLOCK + tl.program_id(1)"),  # a grid of two axes
        ("tl.program_id(0)", "0"),  # one block
        ("XBLOCK : tl.constexpr)", "XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr)"),  # a loop along a row
        ("'*bf16'", "'*fp4'"),
        ("@triton_heuristics.persistent_reduction", "@triton_heuristics2"),
        ("'configs': ", "'attrs': "),
        ("'signature': ", "'types': "),
    ],
)
def test_another_kind_is_left_alone(text: str, other: str) -> None:
    assert text in ONE and parsed(ONE.replace(text, other)) is None
