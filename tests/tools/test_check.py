"""check: which gradients are off, what makes them so, a recipe without it; and what is rounding and no fault of any code."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.recipe.recipe import uncounted
from fp8compile.tools.checking.rows import BELOW, OK, ROUNDING
from tests.support.measure import compiled
from tests.support.sensitive import SENSITIVE, Net, batch, squares


@pytest.fixture(autouse=True)
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is said of graphs; tests/tools/test_check_generated.py generates code, which takes long."""
    monkeypatch.setattr("fp8compile.tools.checking.check.generated_step", lambda *args: None)


def test_a_model_where_all_is_well() -> None:
    found = fp8compile.check(Net(dropout=0.1), batch(), loss=squares)
    assert found.ok and found.recipe == Recipe() and not found.line and not found.below
    assert {row.verdict for row in found.rows} == {OK, ROUNDING} and found.steps == 5
    assert all(row.db > 10 for row in found.rows if row.verdict == OK)
    assert any(row.db < 60 for row in found.rows), "nothing was encoded: it was compared with itself"
    assert "at 10 dB or above, or rounding" in str(found)


def test_the_one_sensitive_tensor_is_found_and_left_exact() -> None:
    model = Net(SENSITIVE)
    found = fp8compile.check(model, batch(), loss=squares)
    assert not found.ok and {row.name for row in found.below} == {"after.weight"}
    (cause,) = found.below[0].causes
    assert (cause.module, cause.kind) == ("before", "saved") and found.exact == (("before", "saved"),)
    assert cause.db == pytest.approx(found.below[0].db, abs=1) and "addmm" in cause.tensors[0]
    assert found.recipe is not None and found.line == 'options={"modules": {"before": {"saved": "off"}}}'
    assert all(row.repaired > found.bar for row in found.rows if row.verdict != ROUNDING)
    after = fp8compile.check(model, batch(), loss=squares, recipe=eval(found.line.removeprefix("options=")))
    assert after.ok and after.recipe == found.recipe
    assert fp8compile.explain(model, batch(), recipe=found.recipe).saved, "all else is still encoded"


def test_the_one_sensitive_linear_is_found_among_others() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with torch.no_grad():  # one huge weight takes the scale of its tensor: all others are subnormal in E4M3, or zero
        model[2].weight.mul_(0.02)
        model[2].weight[0, 0] = 1000.0
    found = fp8compile.check(model, batch(), loss=squares, recipe={"linears.emulate": True, "saved.min_numel": 10**9})
    assert not found.ok and found.exact == (("2", "linears"),)
    assert found.line.endswith('"modules": {"2": {"linears": "off"}}}') and '"emulate": True' in found.line
    assert all(row.repaired > 10 for row in found.rows if row.verdict != ROUNDING)


def test_a_bias_before_a_batch_norm_is_rounding_and_no_alarm() -> None:
    found = {row.name: row for row in fp8compile.check(Net(), batch(), loss=squares).rows}
    bias = found["after.bias"]
    assert bias.verdict == ROUNDING and bias.floor < 10 and bias.db < 10
    rounding = {"after.bias", "before.bias"}  # before it is the same sum, times a matrix
    assert {name for name, row in found.items() if row.verdict == ROUNDING} == rounding
    assert all(row.floor > 60 for name, row in found.items() if name not in rounding)


def test_rounding_excuses_no_error_as_large_as_the_step() -> None:
    from fp8compile.numerics.gradient_quality import GradientJudge, error_powers

    exact = {"a": torch.tensor([3.0, 4.0]), "noise": torch.tensor([1e-8]), "none": None, "zero": torch.zeros(2)}
    again = {**exact, "noise": torch.tensor([-1e-8])}
    judge = GradientJudge.of(exact, [again], bar=20.0)
    assert judge.floors["noise"] < 0 and judge.floors["a"] == math.inf

    def failing(**other: Tensor) -> list[str]:
        return judge.failing(error_powers(exact, {**exact, **other}))

    assert failing() == []
    assert failing(noise=torch.tensor([0.4]), zero=torch.tensor([0.0, 0.4])) == []
    assert failing(noise=torch.tensor([0.6])) == ["noise"] and failing(zero=torch.tensor([0.0, 0.6])) == ["zero"]
    assert failing(a=torch.tensor([3.0, 4.4])) == [] and failing(a=torch.tensor([3.0, 4.6])) == ["a"]
    assert failing(noise=torch.tensor([math.nan])) == ["noise"] and failing(a=torch.tensor([math.inf, 4])) == ["a"]


def test_a_check_that_compares_the_encoded_step_with_itself_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8compile.tools.checking.trials.exact", uncounted)
    with pytest.raises(AssertionError):
        test_a_model_where_all_is_well()
    with pytest.raises(AssertionError):
        test_the_one_sensitive_tensor_is_found_and_left_exact()


def test_everything_is_left_as_it_was() -> None:
    model = Net(SENSITIVE, dropout=0.2)
    model.norm.eval()
    model.head.weight.grad = torch.ones(64, 64)
    running = compiled(model, **{"saved.min_numel": 0})
    running(batch()).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    state = torch.get_rng_state()
    found = fp8compile.check(running, batch(), loss=squares)
    assert found.recipe is not None and found.recipe.saved.min_numel == 0, "the running recipe is checked"
    assert torch.equal(torch.get_rng_state(), state) and modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]
    for old, parameter in zip(gradients, model.parameters(), strict=True):
        assert old is not None and parameter.grad is not None and torch.equal(old, parameter.grad)
    with torch._dynamo.config.patch(error_on_recompile=True):
        running(batch()).sum().backward()


def test_batch_norm_statistics_and_dropout_are_the_same_in_every_step() -> None:
    found = fp8compile.check(Net(dropout=0.5), batch(), loss=squares, recipe={"saved.min_numel": 10**9})
    assert all(row.db == math.inf for row in found.rows), "nothing is encoded, so the steps are equal"


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = torch.tanh(self.lin(x))
        torch._dynamo.graph_break()
        return {"y": y * y.detach().exp() if scale is None else y * scale}


@pytest.mark.parametrize("given", ["tensor", "tuple", "mapping", "keywords"])
def test_a_batch_comes_in_any_form_and_graphs_may_break(given: str) -> None:
    x, scale = batch().requires_grad_(), torch.full((256, 64), 2.0)
    args = {"tensor": x, "tuple": (x, scale), "mapping": {"x": x, "scale": scale}, "keywords": (x,)}[given]
    kwargs = {"scale": scale} if given == "keywords" else None
    found = fp8compile.check(Keywords(), args, kwargs, loss=lambda out: squares(out["y"]))
    name = "x" if given == "mapping" else "argument 0"
    assert found.ok and {row.name for row in found.rows} == {"lin.weight", "lin.bias", name}


def test_the_json_holds_everything_and_the_table_is_short() -> None:
    found = fp8compile.check(Net(SENSITIVE), batch(), loss=squares)
    data = json.loads(found.to_json())
    assert data["rows"][0]["name"] == found.rows[0].name and data["line"] == found.line and not data["ok"]
    assert len(data["rows"]) == len(found.rows) and {row["verdict"] for row in data["rows"]} == {OK, BELOW, ROUNDING}
    text = str(found)
    assert len(text.splitlines()) <= 25 and found.line in text and "after.weight: " in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8compile.check(Net(), batch(), bar=-1), "bar=-1 is no SQNR.*such as 10"),
        (lambda: fp8compile.check(Net(), batch(), bar=True), "bar=True is no SQNR"),
        (lambda: fp8compile.check(Net(), batch(), loss=lambda out: out), "loss must return a scalar"),
        (lambda: fp8compile.check(Net(), batch(), recipe="none"), "no preset 'none'"),
        (lambda: fp8compile.check(Net().requires_grad_(False), batch()), "nothing to differentiate.*requires_grad_"),
        (lambda: fp8compile.check(Net(), {"x": batch()}, {"y": batch()}), "check: batch is a mapping"),
    ],
)
def test_errors_name_the_cure(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_gradients_that_are_not_finite_exactly_either_are_said_so() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = math.inf
    found = fp8compile.check(model, batch(), recipe=Recipe(), loss=squares)
    assert not found.ok and found.recipe == Recipe() and "there is nothing to compare with" in str(found)
