"""On an H100 the user's checkpointed regions keep their inputs in every recipe; regions, dropout and convolutions lower."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .compared import WIDTH
from .run_regions import BATCH, BLOCKS, HEADS, LOWERED, RECIPES, REGIONS, ROWS, SEQ, UNIT, WITH_TABLES
from .subprocesses import result_of

STATISTICS = 16  # bytes that delayed scales count of an operand in the forward, and the backward returns with its own
IN_CI = REGIONS[:1]
BY_WHOM = [*IN_CI, *(pytest.param(name, marks=pytest.mark.sweep) for name in REGIONS[1:])]
SCALES = {
    "default": 2 * 4,
    "int8": ROWS * 4,
}  # FP32: of what is normalised and of what is gated, as a whole or by rows
MATMULS = 3 * BLOCKS
CODES = UNIT // 2 + ROWS * (2 + 4)  # a scale in BF16 and a statistic in FP32 beside each row of 128


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("regions", BY_WHOM)
def test_regions_keep_their_inputs_in_every_recipe(regions: str, recipe: str) -> None:
    """As codes with their scales and the norm's statistics; without storage exactly, where the first block's is the caller's.
    Scales that a block takes are kept with them. Delayed scales keep statistics: 16 bytes an operand of any size."""
    kept = [tuple(each[:3]) for each in result_of("run_regions", regions)[recipe]]
    each_input, inputs = (UNIT, BLOCKS - 1) if recipe == "linears" else (CODES, BLOCKS)
    beside = sum(nbytes for nbytes, _, _ in kept) - inputs * each_input - BLOCKS * SCALES.get(recipe, 0)
    operands = 2 * MATMULS if recipe.startswith("delayed") else 0  # an input and a weight each, shared ones once
    assert beside <= STATISTICS * operands
    assert recipe.startswith("delayed") == bool(beside)


def lowered(name: str, arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    forward, backward = result_of("run_regions")[name][arm]
    return forward, backward


@pytest.mark.parametrize("name", LOWERED)
def test_both_halves_are_lowered(name: str) -> None:
    for half in lowered(name, "ours"):
        assert half["launches"]


def test_attention_in_regions_is_computed_again_from_their_inputs() -> None:
    for arm in ("plain", "ours"):
        _, backward = lowered("vit, checkpointed", arm)
        assert sum(nbytes for nbytes, _ in backward["given"]) == (BLOCKS - 1) * UNIT // 2  # half as many rows


def test_tables_of_rotations_are_computed_once_and_not_for_each_element() -> None:
    """Plain Inductor computes a cosine and a sine for each element of q and of k, in every kernel that rotates."""
    table, elements = SEQ * WIDTH // HEADS, BATCH * SEQ * WIDTH
    for half in (0, 1):
        plain, ours = (
            [_elements(s) for s in lowered(WITH_TABLES, arm)[half]["sources"] if _WAVES(s)]
            for arm in ("plain", "ours")
        )
        assert plain and set(plain) == {elements}
        assert len(ours) <= 2 and set(ours) == {table}, "cosines and sines"


_WAVES = re.compile(r"\b(?:cos|sin)\(").search


def _elements(source: str) -> int:
    return math.prod(map(int, re.findall(r"\b[xyr]\w*numel = (\d+)", source)))


def test_dropout_keeps_its_seeds_and_no_mask() -> None:
    _, backward = lowered("mlp, dropout", "ours")
    dtypes = [dtype for _, dtype in backward["given"]]
    assert "torch.int64" in dtypes and "torch.bool" not in dtypes


def test_codes_of_channels_last_values_have_channels_fastest() -> None:
    """They are matrices: beside a convolution four dimensions are laid out channels last once more, H fastest."""
    forward, _ = lowered("resnet, channels last", "ours")
    assert len(forward["codes"]) >= 4
    for shape, strides in forward["codes"]:
        sizes, steps = ([int(n) for n in text.split(",") if n.strip()] for text in (shape, strides))
        assert len(sizes) < 4 and steps == [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]


def test_places_are_narrow_where_they_are_made_and_wide_where_they_are_read() -> None:
    """Narrow integers have no kernel of their own: one kernel of each half knows them."""
    halves = {arm: lowered("picked by place", arm) for arm in ("plain", "ours")}
    given = [[dtype for _, dtype in halves[arm][1]["given"]] for arm in halves]
    assert "torch.int64" in given[0] and "torch.uint8" in given[1] and "torch.int64" not in given[1]
    for half in (0, 1):
        writes = [source for source in halves["ours"][half]["sources"] if "*u8" in source]
        assert len(writes) == 1, "the kernel that makes the places, and the one that scatters gradients to them"
        if half == 0:
            assert "triton_helpers.max_with_index" in writes[0]


def test_a_mask_is_packed_where_it_is_made_and_unpacked_where_it_is_read() -> None:
    """Bits have no kernel of their own."""
    halves = {arm: lowered("chosen by a mask", arm) for arm in ("plain", "ours")}
    given = [[dtype for _, dtype in halves[arm][1]["given"]] for arm in halves]
    assert "torch.bool" in given[0] and "torch.int16" in given[1] and "torch.bool" not in given[1]
    (packing,) = [source for source in halves["ours"][0]["sources"] if "*i16" in source]
    assert packing.count("tl.store(") >= 2, "the chosen values, or what is made of them, too"
    reading = [source for source in halves["ours"][1]["sources"] if "*i16" in source]
    assert reading and all("*bf16" in source for source in reading), "gradients too"
