"""tune: what is measured and told; what fails in one recipe; interruption; and that all is left as it was."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.tools import tune
from fp8compile.tools.tuning import compiled_arm, gradients, rounds
from fp8compile.tools.tuning.arms import OFF, PLAIN
from fp8compile.tools.tuning.measured_arm import OUT_OF_MEMORY, MeasuredArm
from fp8compile.tools.tuning.rounds import FIRST_ROUNDS, INTERRUPTED, MOST_ROUNDS, NO_TIME, Rounds
from fp8compile.tools.tuning.tuned import Tuned
from tests.support.sensitive import SENSITIVE, Net, batch, squares

STORED = {"linears": "off", "debug.codegen": "eager"}
FEW = {**STORED, "saved": "4bit"}
BOTH = {"stored": STORED, "few": FEW}
ROUNDS = 5  # of all recipes, in tests that do not time them
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Inductor's part is the graph itself; the recipes of these tests run node by node."""
    monkeypatch.setattr(compiled_arm, "private", SimpleNamespace(compile_fx=lambda gm, inputs: gm.forward))
    monkeypatch.setattr(rounds, "MOST_ROUNDS", ROUNDS)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a step by recipe, in the place of measured ones; the steps are taken all the same."""
    made: dict[str, float] = {}
    real = MeasuredArm.timed

    def timed(self: MeasuredArm, steps: int) -> float:
        real(self, 1)
        return made.get(self.arm.name, 1.0)

    monkeypatch.setattr(MeasuredArm, "timed", timed)
    return made


@pytest.fixture
def all_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradients are compared: they are well."""
    known = SimpleNamespace(not_finite=(), compared=lambda recipe: (50.0, 0), close=lambda: None)
    monkeypatch.setattr(rounds, "ExactStep", lambda *args: known)


def tuned(model: nn.Module, x: Any = None, **others: Any) -> Tuned:
    """What ``tune`` tells; it returns the recipe of that."""
    found: list[Tuned] = []
    given = {"loss": squares, "recipes": BOTH, "show": found.append, **others}
    recipe = tune(model, batch() if x is None else x, **given)
    assert recipe == found[0].recipe
    return found[0]


def state_of(model: nn.Module) -> list[Any]:
    """Everything that a step may change, as values."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    of_numpy = [part.tolist() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()]
    generators = torch.get_rng_state(), random.getstate(), of_numpy  # of the last, a draw moves the place alone
    modes = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    return [[t.clone() for t in tensors], generators[0].clone(), *generators[1:], *modes]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def prepared() -> Net:
    """With gradients, statistics of a batch, dropout, and a part in the mode of evaluation."""
    torch.manual_seed(3)
    model = Net(dropout=0.3)
    squares(model(batch())).backward()
    model.drop.eval()
    return model


def noisy(out: Tensor) -> Tensor:
    """A loss that draws from every generator."""
    return squares(out) * (1 + random.random() + numpy.random.rand() + torch.rand(()))


def test_a_model_as_it_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), batch()
    before, found = state_of(model), []

    def told(result: Tuned) -> None:
        found.append(result)
        print(result)

    recipe = tune(model, x, loss=squares, recipes={"storage": {"linears": "off"}}, minutes=10, show=told)
    plain, stored = found[0].rows
    assert (plain.name, stored.name, stored.recipe) == (PLAIN, "storage", Recipe(linears="off"))
    assert plain.rounds == 2 * FIRST_ROUNDS + MOST_ROUNDS and stored.rounds == FIRST_ROUNDS + MOST_ROUNDS
    assert plain.kept is not None and stored.kept is not None and 0 < 2 * stored.kept < plain.kept
    assert plain.peak is not None and stored.peak is not None and plain.kept < plain.peak
    assert 30 < stored.db < 100 and stored.below == 0, "encoded, and well"
    assert all(row.seconds > 0 and row.first_seconds > row.seconds and not row.note for row in found[0].rows)
    assert recipe in (OFF, stored.recipe)
    assert same(before, state_of(model))
    with pytest.raises(ValueError, match="no graph of this"):
        fp8compile.report(model)
    assert str(found[0]) in capsys.readouterr().out


def test_the_table_is_printed_and_says_what_to_paste(
    uncompiled: None, all_well: None, times: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    times.update({PLAIN: 1.0, "stored": 0.7, "few": 0.4})
    assert tune(Net(), batch(), loss=squares, recipes=BOTH) == Recipe(**FEW)
    out = capsys.readouterr().out
    assert re.search(r"^plain Inductor +1000\.0 +0% +- ", out, re.M) and re.search(
        r"^few +400\.0 +0% +0\.40 ±0\.00", out, re.M
    )
    assert 'options={"linears": "off", "saved": "4bit", "debug": {"codegen": "eager"}}' in out
    times["stored"] = 0.99
    assert tune(Net(), batch(), loss=squares, recipes={"stored": STORED}) == OFF == Recipe.preset("off")
    out = capsys.readouterr().out
    assert "best: plain Inductor" in out and 'options={"preset": "off"}' in out


def test_a_recipe_that_harms_gradients_is_not_chosen(uncompiled: None, times: dict[str, float]) -> None:
    times.update({PLAIN: 1.0, "stored": 0.1})
    found = tuned(Net(SENSITIVE), recipes={"stored": STORED})
    assert found.rows[1].below == 1 and found.rows[1].db < 10 and found.recipe == OFF
    assert "1 below 10 dB" in str(found)
    assert tuned(Net(), recipes={"stored": STORED}).recipe == Recipe(**STORED)


def test_memory_takes_the_least_peak_within_a_limit_of_time(
    uncompiled: None, all_well: None, times: dict[str, float]
) -> None:
    times.update({PLAIN: 1.0, "stored": 1.2, "few": 1.4})
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    found = tuned(model, goal="memory", slower=0.25)
    plain, stored, few = (row.peak or 0 for row in found.rows)
    assert few < stored < plain and found.recipe == Recipe(**STORED)
    assert dataclasses.replace(found, slower=0.5).recipe == Recipe(**FEW)
    assert dataclasses.replace(found, slower=0.0).recipe == OFF


@pytest.mark.parametrize("fails", [None, "interrupted", "loss"])
def test_all_is_left_as_it_was(uncompiled: None, monkeypatch: pytest.MonkeyPatch, fails: str | None) -> None:
    model = prepared()
    before, calls = state_of(model), [0]

    def loss(out: Tensor) -> Tensor:
        calls[0] += 1
        if fails == "loss" or (fails and calls[0] == 20):
            raise KeyboardInterrupt if fails == "interrupted" else RuntimeError("no")
        return noisy(out)

    try:
        found = tuned(model, loss=loss, recipes={"stored": STORED})
        assert fails != "loss" and (INTERRUPTED in found.remarks) == (fails == "interrupted") and calls[0] >= 20
    except ValueError as error:
        assert fails == "loss" and "RuntimeError: no" in str(error)
    assert same(before, state_of(model))


def test_the_state_that_is_compared_is_changed_by_a_step() -> None:
    """So that the test above can fail."""
    model = prepared()
    before = state_of(model)
    noisy(model(batch())).backward()
    after = state_of(model)
    assert [same(a, b) for a, b in zip(before, after, strict=True)] == [False] * 4 + [True] * 2


def test_a_model_that_is_compiled_goes_on_as_it_was(uncompiled: None, all_well: None) -> None:
    model = Net()
    compiled = torch.compile(model, backend="fp8compile", options={**STORED, "saved.min_numel": 0})
    squares(compiled(batch())).backward()
    tuned(compiled, recipes={"few": FEW})
    assert {report.kind for report in fp8compile.report(compiled).graphs} == {"training"}
    assert Recipe(**STORED, saved={"min_numel": 0}) == eval(f"fp8compile.{fp8compile.report(compiled).recipe}")


@pytest.mark.parametrize(
    ("at", "timed"), [(0, ()), (1, (PLAIN,)), (5, (PLAIN, "stored")), (12, (PLAIN, "stored", "few"))]
)
def test_interrupted_it_returns_the_best_so_far(
    uncompiled: None,
    all_well: None,
    times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    timed: Sequence[str],
) -> None:
    times.update({PLAIN: 1.0, "stored": 0.7, "few": 0.4})
    real = Rounds._round

    def interrupted(self: Rounds, *args: Any, **kwargs: Any) -> None:
        if self.number == at:
            raise KeyboardInterrupt
        real(self, *args, **kwargs)

    monkeypatch.setattr(Rounds, "_round", interrupted)
    try:
        found = tuned(Net())
    except KeyboardInterrupt:
        pytest.fail("what was measured is lost")
    assert tuple(row.name for row in found.rows if row.ran) == timed and INTERRUPTED in found.remarks
    assert found.recipe == {0: OFF, 1: OFF, 5: Recipe(**STORED), 12: Recipe(**FEW)}[at]
    assert ("no recipe was measured" in str(found)) == (at == 0)


def test_out_of_its_minutes_it_returns_the_best_so_far(uncompiled: None, all_well: None) -> None:
    found = tuned(Net(), minutes=1e-9)
    assert [row.rounds for row in found.rows] == [FIRST_ROUNDS, 0, 0]
    assert [row.note for row in found.rows] == ["", NO_TIME, NO_TIME] and found.recipe == OFF
    assert "minutes=1e-09 are over" in found.remarks[0] and f"\nstored, few: {NO_TIME}\n" in str(found)


def _out_of_memory_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recipe's compilation ends so, inside Dynamo."""
    real = compiled_arm.CompiledArm._compile

    def compile(self: compiled_arm.CompiledArm, *args: Any) -> Callable[..., Any]:
        if self.arm.name == name:
            raise OUT
        return real(self, *args)

    monkeypatch.setattr(compiled_arm.CompiledArm, "_compile", compile)


@pytest.mark.parametrize("name", [PLAIN, "stored", "few"])
def test_one_that_is_out_of_memory_says_so_and_the_others_go_on(
    uncompiled: None, all_well: None, times: dict[str, float], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    times.update({PLAIN: 1.0, "stored": 0.7, "few": 0.4})
    _out_of_memory_at(name, monkeypatch)
    found = tuned(Net())
    assert {row.name: row.note for row in found.rows if row.note} == {name: OUT_OF_MEMORY}
    assert [row.name for row in found.rows if row.ran] == [each for each in (PLAIN, *BOTH) if each != name]
    assert found.best is not None and found.best.name == ("stored" if name == "few" else "few")
    assert f"\n{name}: {OUT_OF_MEMORY}\n" in str(found)


def test_one_that_fails_in_a_later_turn_is_not_chosen(
    uncompiled: None, all_well: None, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times.update({PLAIN: 1.0, "stored": 0.7, "few": 0.4})
    real = MeasuredArm.turn

    def turn(self: MeasuredArm, number: int, steps: int) -> None:
        if self.arm.name == "few" and number > 3 * FIRST_ROUNDS:
            monkeypatch.setattr(self, "timed", lambda steps: (_ for _ in ()).throw(OUT))
        real(self, number, steps)

    monkeypatch.setattr(MeasuredArm, "turn", turn)
    found = tuned(Net())
    assert found.rows[2].note == OUT_OF_MEMORY and not found.rows[2].ran and found.recipe == Recipe(**STORED)
    assert found.rows[1].rounds == FIRST_ROUNDS + ROUNDS, "the others go on"


def test_where_the_exact_step_does_not_fit_nothing_is_said_of_gradients(
    uncompiled: None, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*args: Any) -> None:
        raise OUT

    times.update({"stored": 0.7, "few": 0.4})
    monkeypatch.setattr(gradients.Trials, "judged", judged)
    found = tuned(Net())
    assert found.recipe == OFF and [row.below for row in found.rows] == [0, None, None]
    assert found.remarks == (rounds.NOT_COMPARED.format(OUT_OF_MEMORY),)
    _out_of_memory_at(PLAIN, monkeypatch)
    assert tuned(Net()).recipe == Recipe(**FEW), "nor could anything be compared"


def test_eager_out_of_memory_is_no_error(uncompiled: None, all_well: None) -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise OUT
            return super().forward(x)

    assert all(row.ran for row in tuned(Large(), recipes={"stored": STORED}).rows)


def test_a_model_of_which_no_graph_is_compiled(uncompiled: None) -> None:
    class Eager(Net):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    with pytest.raises(ValueError, match=r"fp8compile\.tune: .*no graph"):
        tuned(Eager())
