"""The recipe in a file that FP8COMPILE_RECIPE names: what decides, what the report says, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.recipe.from_file import VARIABLE, read_recipe, recipe_of, remarks_on

FIELDS = (
    '{"debug.codegen": "eager", "linears": {"emulate": true}, "saved.group_size": 64, '
    '"modules": {"b": {"linears": "off"}}}'
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "recipe.json"
    path.write_text(FIELDS)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_options_decide_where_there_are_any(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Recipe(
        debug={"codegen": "eager"},
        linears={"emulate": True},
        saved={"group_size": 64},
        modules={"b": {"linears": "off"}},
    )
    assert recipe_of(None) == recipe_of({}) == named != Recipe()
    assert recipe_of({"preset": "off"}) == Recipe.preset("off") and remarks_on({"preset": "off"}) == ()
    assert str(file) in remarks_on(None)[0]
    for unset in ("", None):
        monkeypatch.setenv(VARIABLE, unset) if unset is not None else monkeypatch.delenv(VARIABLE)
        assert recipe_of(None) == Recipe() and remarks_on(None) == ()


def test_all_graphs_of_a_process_have_one_recipe(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = recipe_of(None)
    file.write_text('{"preset": "off"}')
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv(VARIABLE, file.name)
    assert recipe_of(None) is first


def test_a_model_without_options_follows_the_file_and_its_report_says_so(file: Path) -> None:
    compiled = torch.compile(Net(), backend="fp8compile")
    x = torch.randn(128, 64, requires_grad=True)
    compiled(x).sum().backward()
    report = fp8compile.report(compiled)
    assert {linear.origin.module for linear in report.linears} == {"a"}
    assert report.recipe == str(read_recipe(str(file)))
    assert [r for r in report.remarks if str(file) in r] == list(remarks_on(None))
    assert str(file) in report.to_text()
    assert not fp8compile.set_recipe(
        compiled, {"linears.emulate": False}
    ).linears.emulate  # from the file's recipe on
    assert fp8compile.set_recipe(compiled, read_recipe(str(file))) == read_recipe(str(file))
    compiled(x).sum().backward()
    assert fp8compile.report(compiled).recipe == report.recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "It cannot be read: [Errno 2] No such file"),
        ("{linear: off}", "It cannot be read: Expecting property name"),
        ('["off"]', "It holds ['off']"),
        ('{"linaers": "off"}', "Recipe has no field 'linaers'. Did you mean 'linears'?"),
        ('{"preset": "of"}', "no preset 'of'. Did you mean 'off'?"),
    ],
)
def test_a_bad_file_is_named_with_the_cure(file: Path, text: str | None, message: str) -> None:
    file.write_text(text) if text is not None else file.unlink()
    with pytest.raises(ValueError) as caught:
        torch.compile(Net(), backend="fp8compile")(torch.randn(128, 64))
    error = caught.value
    assert message in str(error)
    assert f"{VARIABLE} names {str(file)!r}" in str(error)
