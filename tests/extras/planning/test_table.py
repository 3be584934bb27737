"""The table: as it is printed, how wide, which layouts, in which order; what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import expecttest
import pytest

from fp8compile.extras.planning.table import MOST_ROWS, plan

SIZES = (7e9, 8e9, 13e9, 32e9, 70e9, 405e9)


class TestText(expecttest.TestCase):
    def test_70b_on_64_gpus(self) -> None:
        self.assertExpectedInline(
            str(plan(70e9, 64)),
            """\
70.55e9 parameters, Llama-3-70B: 80 layers, hidden 8192,
intermediate 28672, 64 heads, 8 of keys, vocabulary 128256
64 GPUs of 80 GiB; a step: 64 sequences of 8192 tokens

ESTIMATES in GiB, of the GPU that needs most: memory, bytes sent in a step
FSDP  TP  PP  micro-batches  BF16   ours  fits  sent: FSDP  TP     PP
4     2   8   16 of 1        120.0  55.9  ours  13.1        110.0  2.0
2     2   16  32 of 1        123.3  51.0  ours  4.8         120.0  4.0
8     2   4   8 of 1         134.9  71.0  ours  29.3        105.0  1.0
32    2   1   1 of 2         193.4  74.7  ours  191.0       100.6  -
4     4   4   16 of 1        75.9   39.4  both  12.6        315.0  1.0
8     4   2   8 of 1         91.4   55.0  ours  28.7        302.2  0.2
2     4   8   32 of 1        68.9   32.3  both  4.4         330.0  2.0
1     4   16  64 of 1        66.5   24.9  both  -           360.0  4.0
64    1   1   1 of 1         196.2  77.5  ours  388.1       -      -
16    4   1   1 of 4         192.0  73.3  ours  92.4        301.9  -
4     8   2   16 of 1        53.9   31.2  both  12.3        705.2  0.2
2     8   4   32 of 1        46.4   23.6  both  4.2         735.0  1.0
and 7 more: --json, or --tp and --pp

Memory of the first layout, FSDP 4 x TP 2 x PP 8, estimated:
GiB          BF16   ours
weights      2.2    2.2
gradients    2.2    2.2
states       13.4   4.2
gathered     17.9   17.9
activations  83.8   28.6
logits       0.0    0.0
workspace    0.3    0.7
all          120.0  55.9

BF16 is plain Inductor and AdamW with FP32 master weights and moments. Ours is
the default recipe and fp8compile.optim.AdamW(model, master="split"). Both send
the same bytes. Not counted: the CUDA context, buffers of NCCL, fragmentation.
No block is checkpointed. Nothing here says how fast a layout is.""",
        )


@pytest.mark.parametrize("gpus", [1, 8, 64, 512, 4096])
@pytest.mark.parametrize("parameters", SIZES)
def test_every_table_fits_80_columns(parameters: float, gpus: int) -> None:
    made = plan(parameters, gpus)
    lines = str(made).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert "ESTIMATES" in str(made) and "Nothing here says how fast" in " ".join(lines)
    assert len(made.rows) <= MOST_ROWS or f"and {len(made.rows) - MOST_ROWS} more: --json" in str(made)


def test_layouts_use_all_gpus_and_come_once() -> None:
    for gpus in (1, 8, 48, 4096):
        layouts = [row.layout for row in plan(70e9, gpus, batch=4096 * 3).rows]
        assert {each.fsdp * each.tp * each.pp for each in layouts} == {gpus}
        assert len(set(layouts)) == len(layouts)


def test_what_fits_comes_first_and_by_bytes_sent() -> None:
    made = plan(70e9, 256)
    fits = [row.ours.total <= made.card for row in made.rows]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    sent = [row.sent.total for row in made.rows if row.ours.total <= made.card]
    assert sent == sorted(sent)
    assert {row.fits(made.card) for row in made.rows} >= {"both", "ours", "none"}


def test_json_is_everything_in_bytes() -> None:
    made = plan(70e9, 256, seq=4096, batch=512, tp=4, pp=2)
    found: dict[str, Any] = json.loads(json.dumps(made.to_dict()))
    (row,) = found["rows"]
    assert found["estimates"] is True and found["shape"]["parameters"] == 70_553_706_496
    assert row["layout"] == {"fsdp": 32, "tp": 4, "pp": 2} and row["micro_batches"] * row["micro_batch"] * 32 == 512
    for name in ("bf16", "ours", "sent"):
        total = row[name].pop("total")
        assert total == sum(row[name].values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 0}, "params=0 is not between 1e+09 and 1e+12"),
        ({"gpus": 0}, "gpus=0 is not a whole number from 1 to 16384"),
        ({"gpus": 10**6}, "gpus=1000000 is not a whole number from 1 to 16384"),
        ({"gpus": 12, "tp": 8}, "gpus=12 is not a multiple of tp * pp = 8 * 16 = 128"),
        ({"gpus": 12, "tp": 4, "pp": 2}, "gpus=12 is not a multiple of tp * pp = 4 * 2 = 8: change one of the three"),
        ({"tp": 16, "pp": 1}, "tp=16 does not divide the 8 heads of keys of Llama-3-70B: give one of 1, 2, 4, 8"),
        ({"tp": 0}, "tp=0 is not a whole number of at least 1"),
        ({"pp": -2}, "pp=-2 is not a whole number of at least 1"),
        ({"gpus": 128, "tp": 1, "pp": 128}, "pp=128 leaves a stage of Llama-3-70B without one of its 80 layers"),
        ({"seq": 2**21}, "seq=2097152 is not a whole number from 1 to 1048576: the tokens of one sequence"),
        ({"seq": 8191, "tp": 8, "pp": 1}, "seq=8191 is not a multiple of tp=8"),
        ({"batch": 3, "tp": 1, "pp": 1}, "batch=3 is not a multiple of the 64 replicas of this layout"),
        ({"batch": 0}, "batch=0 is not a whole number from 1 to"),
        ({"micro_batch": 3, "tp": 1, "pp": 1}, "micro_batch=3 does not divide the 1 sequences of a replica"),
        ({"card_gib": 0}, "card_gib=0 is not the memory of a GPU in GiB"),
    ],
)
def test_what_is_refused_is_named_with_its_cure(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(**{"parameters": 70e9, "gpus": 64, **changes})
