"""A calibration as a file and as a part of the recipe."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile import Recipe, calibrate
from fp8compile.recipe.calibration import CalibratedValue, Calibration, Measurements
from tests.support.calibration import Scaled, error_of
from tests.support.measure import compiled
from tests.support.vit import ViT


@pytest.fixture
def small() -> Calibration:
    value = CalibratedValue("mul", "mul.Tensor", "a.b", 'net.py:3 in forward: y = "x" * w', "forward", "f16", 9e4)
    gradient = CalibratedValue("mul_1", "mul.Tensor", "a.b", "", "backward", "bf16", 1.5e-7)
    return Calibration((Measurements("training", (value, gradient)),), 4, 1024.0, ("aten.exp",), (("a", ("b",)),))


def test_a_file_says_the_same(small: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    small.save(path)
    again = Calibration.load(path)
    assert (
        again == small
        and hash(again) == hash(small)
        and repr(again) == repr(small)
        and again.text == path.read_text()
    )
    plain = json.loads(path.read_text())
    assert plain["loss_scale"] == 1024.0 and plain["graphs"][0]["values"][0]["amax"] == 9e4
    other = dataclasses.replace(small, headroom=8)
    assert other != small and other.digest != small.digest and str(other).endswith("1 graphs, headroom=8)")


def test_a_calibration_is_part_of_the_recipe_and_of_its_key(small: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    small.save(path)
    recipe, loaded = Recipe(fp32=small), Recipe(fp32=str(path))
    assert (
        loaded == recipe
        and hash(loaded) == hash(recipe)
        and loaded.key == recipe.key
        and loaded.fp32.islands == small
    )
    others = [Recipe(), Recipe(fp32="off"), Recipe(fp32=dataclasses.replace(small, headroom=16))]
    assert len({r.key for r in (recipe, *others)}) == 4
    assert pickle.dumps(loaded) == pickle.dumps(recipe) and pickle.loads(pickle.dumps(recipe)) == recipe
    assert str(recipe) == f"Recipe(fp32={small!r})" and len(repr(small)) < 60
    assert Recipe(linears="off", fp32=small).fp32.islands is small
    by_module = Recipe(fp32=small, modules={"a": {"saved": "off"}, "b": "off"})
    a, b = by_module.modules.values()
    assert a.fp32.islands is small and b.fp32.islands == "off" and by_module.at("a").fp32.islands is small
    all_off = by_module.replace_in_all({"fp32": "off"})
    assert [r.fp32.islands for r in (all_off, *all_off.modules.values())] == ["off"] * 3
    assert Recipe.from_options({"fp32": str(path)}) == recipe


def test_a_calibration_older_than_the_recipe() -> None:
    model, x = Scaled(), torch.ones(4).half()
    kept = {"fp32.keep": "aten.mul"}
    found = calibrate(model, [x], recipe=kept)
    told = error_of(lambda: compiled(model, fp32=found)(x))
    assert "older than the recipe: it was made with keep_fp32=('aten.mul',), and Recipe.fp32.keep is ()." in told
    assert "Calibrate again: fp8compile.calibrate(model, batches, recipe=...)" in told
    compiled(model, fp32=found, **kept)(x)
    modules = {"blocks.0": {"fp32.keep": "*"}}
    told = error_of(lambda: compiled(model, fp32=found, modules=modules, **kept)(x))
    assert "made with modules=(), and Recipe.modules is {'blocks.0': {'fp32.keep': ('*',)}}." in told
    again = calibrate(model, [x], recipe={**kept, "modules": modules})
    assert again.modules == (("blocks.0", ("*",)),)
    compiled(model, fp32=again, modules=modules, **kept)(x)
    compiled(model, fp32=found, modules={"blocks.0": {"saved": "e4m3"}}, **kept)(x)  # storage has no say in it


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "*",
            "",
            "is no calibration of fp8compile. Calibrate again: fp8compile.calibrate(model, batches).save(path)",
        ),
        ("*", "[1, 2]", "is no calibration of fp8compile"),
        ("*", '{"a": 1}', "is no calibration of fp8compile"),
        ('"format": 1', '"format": 99', "was made with format 99, and this is format 1: graphs may differ"),
        (f'"torch": "{Calibration.torch}"', '"torch": "2.3.0"', "was made with torch 2.3.0, and this is torch"),
        ('"keep_fp32"', '"kept"', "is no whole calibration: 'keep_fp32'"),
        ('"amax": 90000.0', '"amax": NaN', "amax=nan of mul = mul.Tensor of a.b (forward, f16) is no magnitude"),
        ('"amax": 90000.0', '"amax": "much"', "is no whole calibration"),
        (
            '"loss_scale": 1024.0',
            '"loss_scale": 0.0',
            "loss_scale=0.0 must be a number above 0 and below inf: what the loss",
        ),
        ('"headroom": 4.0', '"headroom": 0.5', "headroom=0.5 must be a number above 1"),
    ],
)
def test_a_file_that_is_none(small: Calibration, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(new if old == "*" else small.text.replace(old, new))
    assert path.read_text() != small.text
    with pytest.raises(ValueError) as caught:
        Recipe(fp32=str(path))
    assert message in str(caught.value)


def test_a_file_that_does_not_exist_or_a_word_that_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no calibration in '.*nowhere.json': No such file or directory. Calibrate again"
    ):
        Recipe(fp32=str(tmp_path / "nowhere.json"))
    with pytest.raises(
        ValueError, match=r"Recipe.fp32.islands cannot be 'polcy'. Did you mean 'policy'\? .* \(.json\)"
    ):
        Recipe(fp32="polcy")
    with pytest.raises(ValueError, match=r"Recipe.fp32.islands cannot be 3."):
        Recipe(fp32=3)


def test_a_module_can_leave_a_calibration_but_not_bring_one() -> None:
    model, images = ViT(depth=2).half(), torch.randn(2, 3, 16, 16).half()
    model.blocks[1].make_unstable()
    found = calibrate(model, [images])
    modules = {"blocks.1": {"fp32": "off"}, "norm": {"fp32": "off"}}
    told = fp8compile.explain(model, (images,), recipe={"fp32": found, "modules": modules}).islands
    assert {i.origin.module.split(".")[0] for i in told} <= {"blocks"} and not any(
        "blocks.1" in i.origin.module for i in told
    )
    with pytest.raises(ValueError, match="is a calibration, which is of a whole model"):
        Recipe(modules={"blocks.1": {"fp32": found}})
