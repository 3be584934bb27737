"""The study of modes of scaling: it has every mode, and its figures are those of the model that it names."""

from __future__ import annotations

import pytest
import torch

from benchmarks.studies import bench_mode_training
from benchmarks.studies.bench_scaling_modes import CHANNELS, FACTOR, MODES, of_modes, with_outliers
from benchmarks.studies.models import bert, llama
from fp8compile import Recipe
from fp8compile.recipe.validation import CHOICES


def test_every_mode_of_the_recipe_is_in_the_study() -> None:
    recipes = [Recipe(**options) for options in MODES.values()]
    assert {recipe.linears.mode for recipe in recipes} == set(CHOICES["linears.mode"]) - {
        "off",
        "auto",
    }  # auto is tensorwise, of some
    assert {recipe.linears.scaling for recipe in recipes} == set(CHOICES["linears.scaling"])
    assert len(set(recipes)) == len(MODES)


def test_every_mode_is_trained_too() -> None:
    recipes = [Recipe.from_options(options) for arm, options in bench_mode_training.ARMS.items() if arm != "plain"]
    assert {recipe.linears.mode for recipe in recipes} == {
        Recipe(**options).linears.mode for options in MODES.values()
    }
    assert {recipe.linears.scaling for recipe in recipes} == set(CHOICES["linears.scaling"])
    assert not any(recipe.stores_saved for recipe in recipes), "linears alone"


def test_a_gap_is_that_of_the_same_seed() -> None:
    plain = {"0": {"validation_loss": 2.0}, "1": {"validation_loss": 4.0}}
    runs = {"plain": plain, "rowwise": {"1": {"validation_loss": 4.1}}}
    assert bench_mode_training.gaps(runs, "rowwise") == pytest.approx([0.025])


def test_a_row_says_what_ran_and_how_near_it_is() -> None:
    (row,) = of_modes(llama(0, tiny=True), ["blockwise, e4m3"]).values()
    in_fp8 = row["matmuls"].pop("e4m3 x e4m3 blockwise, emulated")
    assert in_fp8 == 4 * 3, "attention's; the MLP's 170 is no multiple of 16"
    assert all(text.startswith("left: ") for text in row["matmuls"])
    assert 15 < row["worst_db"] < row["median_db"] < 40 and 20 < row["output_db"] < 60


def test_outliers_are_in_every_norm_of_a_copy() -> None:
    case = bert(0, tiny=True)
    changed = with_outliers(case).model
    for name, before in case.model.named_parameters():
        after = changed.get_parameter(name)
        if "LayerNorm.weight" in name:
            ratio = after / before
            assert (ratio[list(CHANNELS)] == FACTOR).all() and int((ratio != 1).sum()) == len(CHANNELS)
        else:
            assert torch.equal(after, before)
